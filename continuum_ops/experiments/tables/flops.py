"""Floating point operations of a model on one function, counted as CA appendix C.2 counts them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..config import Config
from ..operator import build

Shape = tuple[int, ...]


def flops(config: Config) -> int:
    """Of a forward pass on one function on the mesh of the training.

    A product of matrices (m, k) and (k, n) counts 2 m k n, complex or not; a Fourier transform of n real
    numbers along an axis 5 n log2 of that axis' length for the first axis taken and half of it for the
    others, which have half of the frequencies. What acts on single numbers is left out.

    Raises:
        ImportError: a package of the model is missing.
    """
    source = config.data
    blank = source.blank()
    samples = source.read(blank, "train")
    operator = build(config, samples, source.statistics(blank)).eval()
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    with torch.no_grad(), counter:
        operator(samples.each(lambda x: x[:1]), config.model.weights)
    return int(counter.get_total_flops())


def _formulas() -> dict[Any, Any]:
    own, aten = torch.ops.continuum_ops, torch.ops.aten
    names = ("forward", "plain", "plain_forward")
    formulas: dict[Any, Any] = {getattr(own, f"continuum_attention_{name}"): _attention for name in names}
    formulas[own.continuum_attention_chunked] = _attention
    formulas |= {getattr(own, f"patch_attention_{name}"): _patch_attention for name in names}
    formulas[own.patch_analysis], formulas[own.patch_synthesis] = _patch_modes, _patch_modes_back
    formulas[aten._fft_r2c], formulas[aten._fft_c2r] = _fft, _fft_back
    return formulas


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    *lead, n, d = query
    return 2 * math.prod(lead) * n * key[-2] * (d + value[-1])


def _patch_attention(query: Shape, key: Shape, value: Shape, *rest: Any, **others: Any) -> int:
    """query (B, *grid, H, D): inner products of every two patches over the points of a patch."""
    grid, (heads, d) = query[1:-2], query[-2:]
    size = next(a for a in (*rest, *others.values()) if _is_size(a, len(grid)))
    sizes = [size] * len(grid) if isinstance(size, int) else size
    patches = math.prod(n // s for n, s in zip(grid, sizes, strict=True))
    return 2 * query[0] * math.prod(grid) * patches * heads * (d + value[-1])


def _is_size(argument: Any, axes: int) -> bool:
    """A patch size; weights and biases are shapes that end with the grid's."""
    return isinstance(argument, list) and len(argument) in (1, axes)


def _fft(u: Shape, dim: list[int], *_: Any, **__: Any) -> int:
    return _transform(math.prod(u), [u[i] for i in dim])


def _fft_back(u: Shape, dim: list[int], normalization: int, last: int, *_: Any, **__: Any) -> int:
    lengths = [last if i == dim[-1] else u[i] for i in dim]
    return _transform(math.prod(u) // u[dim[-1]] * last, lengths)


def _patch_modes(u: Shape, patches: list[int], points: list[int], *_: Any, **__: Any) -> int:
    return _transform(math.prod(u), points)


def _patch_modes_back(u: Shape, patches: list[int], points: list[int], *_: Any, **__: Any) -> int:
    batch, channels = u[2], u[-1]
    return _transform(batch * math.prod(patches) * math.prod(points) * channels, points)


def _transform(numbers: int, lengths: list[int]) -> int:
    first, *others = (math.log2(n) if n > 1 else 0.0 for n in reversed(lengths))
    return round(5 * numbers * (first + sum(others) / 2))
