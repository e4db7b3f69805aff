"""The radius within which each query has a given share of the keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..mesh import Mesh
from ._checks import check_period
from ._functorch import one_by_one
from ._library import LIBRARY

OP = "quantile_radius"
# Squared distances held at a time by one thread: few enough to stay in the cache, a row at least.
CHUNK_CPU = 2**17
CHUNK_DEVICE = 2**25


def quantile_radius(
    query_pos: Tensor | Mesh,
    key_pos: Tensor | Mesh,
    quantile: float,
    *,
    period: Sequence[float] | None = None,
) -> Tensor:
    r"""Quantile of the distances from each query to the keys: the radius of local position attention.

    .. math::
        r_i = Q_q \{ |x_i - y_k| : k = 1..M \}

    with linear interpolation between order statistics, as ``torch.quantile(distances, q, dim=-1)``: position
    q (M - 1) among the sorted distances. Chen, Wu, "Positional Knowledge is All You Need", take such a
    quantile as the radius of their local attention (section 2.2, equation 10). Passed as ``radius`` to
    :func:`continuum_ops.position_attention`, it leaves each query about the fraction q of the keys; the key
    that defines it counts.

    The order statistics are found by partial selection among the squared distances of a few queries at a
    time (direct differences, no N x M matrix): O(N M) time, O(M) memory, and M may exceed 2^24, where
    ``torch.quantile`` gives up. On the CPU ``torch.get_num_threads()`` threads share the queries.

    Args:
        query_pos: (N, d) or (B, N, d), or a mesh; of any float dtype, used in float32 or wider.
        key_pos: (M, d) or (B, M, d), or a mesh, M >= 1.
        quantile: q in [0, 1]: 0 is the nearest key, 1 the farthest.
        period: d numbers > 0, the lengths of a periodic domain (inf: not periodic along that axis); distances
            are those of the nearest images. A periodic grid does not imply it.

    Returns:
        radius (N,), or (B, N) if one of the positions has a batch; float32, or float64 if a position is
        float64. It has no gradient; ``torch.func.vmap`` and ``torch.compile`` take it.

    Raises:
        TypeError: positions that are not floating-point tensors, a quantile or period that are not numbers.
        ValueError: positions of another shape or device or without keys, a quantile outside [0, 1], periods
            that are not d numbers > 0.

    Example:
        >>> grid = co.Grid.uniform((43, 43))
        >>> radius = co.quantile_radius(grid, grid, 0.02)
        >>> radius.shape
        torch.Size([1849])
    """
    x, y = (p.points if isinstance(p, Mesh) else p for p in (query_pos, key_pos))
    _check_positions(x, y)
    _check_quantile(quantile)
    lengths = _lengths(period, x.shape[-1])
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    x, y = x.detach().to(dtype), y.detach().to(dtype)
    return torch.ops.continuum_ops.quantile_radius(x, y, float(quantile), lengths)


def _quantile_radius(x: Tensor, y: Tensor, quantile: float, lengths: list[float]) -> Tensor:
    rows = _rows(x, y)
    if len(rows) == 1:
        return _radius(x, y, quantile, lengths)
    result = x.new_empty(rows)
    for b in range(rows[0]):
        result[b] = _radius(x[b] if x.dim() == 3 else x, y[b] if y.dim() == 3 else y, quantile, lengths)
    return result


def _rows(x: Tensor, y: Tensor) -> tuple[int, ...]:
    """(N,), or (B, N) if one of the positions has a batch."""
    return (*(x if x.dim() == 3 else y).shape[:-2], x.shape[-2])


LIBRARY.impl("quantile_radius", _quantile_radius, "CompositeExplicitAutograd")


@torch.library.register_fake("continuum_ops::quantile_radius", lib=LIBRARY)
def _(x: Tensor, y: Tensor, quantile: float, lengths: list[float]) -> Tensor:
    return x.new_empty(_rows(x, y))


@torch.library.register_vmap("continuum_ops::quantile_radius", lib=LIBRARY)
def _(
    info: Any, in_dims: tuple[int | None, ...], x: Tensor, y: Tensor, quantile: float, lengths: list[float]
) -> tuple[Tensor, int]:
    positions = list(zip((x, y), in_dims, strict=False))
    if any(p.dim() - (dim is not None) == 3 for p, dim in positions):
        return one_by_one(torch.ops.continuum_ops.quantile_radius, info, in_dims, (x, y, quantile, lengths))
    moved = [p if dim is None else p.movedim(dim, 0) for p, dim in positions]
    return torch.ops.continuum_ops.quantile_radius(*moved, quantile, lengths), 0


def _radius(x: Tensor, y: Tensor, quantile: float, lengths: list[float]) -> Tensor:
    """(N,) for one sample."""
    # In float64, since float32 does not hold the positions beyond 2^24.
    position = quantile * (y.shape[0] - 1)
    low = math.floor(position)
    high = min(low + 1, y.shape[0] - 1)
    select = _select_cpu if x.device.type == "cpu" else _select_device
    squares = select(x, y, low, high, lengths)
    below, above = squares.sqrt().unbind(-1)
    return torch.lerp(below, above, position - low)


def _select_cpu(x: Tensor, y: Tensor, low: int, high: int, lengths: list[float]) -> Tensor:
    """Order statistics low and high of each row of squared distances, (N, 2); numpy's selection is fast."""
    queries, keys = x.numpy(), np.ascontiguousarray(y.numpy().T)  # (d, M)
    result = np.empty((len(queries), 2), queries.dtype)
    step = max(1, CHUNK_CPU // keys.shape[1])
    threads = max(1, min(torch.get_num_threads(), math.ceil(len(queries) / step)))

    def run(first: int) -> None:
        buffers = np.empty((2, step, keys.shape[1]), queries.dtype)
        for start in range(first * step, len(queries), threads * step):
            block = queries[start : start + step]
            rows = _squares(block, keys, lengths, *buffers[:, : len(block)])
            rows.partition(high, axis=1)
            result[start : start + step, 1] = rows[:, high]
            result[start : start + step, 0] = rows[:, :high].max(1) if low < high else rows[:, high]

    if threads == 1:
        run(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, range(threads)))  # the list raises what a thread raised
    return torch.from_numpy(result)


def _squares(
    queries: NDArray[Any], keys: NDArray[Any], lengths: list[float], total: NDArray[Any], term: NDArray[Any]
) -> NDArray[Any]:
    """Squared distances (R, M) of queries (R, d) to keys (d, M), in `total`; `term` is scratch."""
    total.fill(0.0)
    for axis, length in enumerate(lengths):
        np.subtract(queries[:, axis, None], keys[axis], out=term)
        if math.isfinite(length):
            term -= np.rint(term / term.dtype.type(length)) * term.dtype.type(length)
        np.multiply(term, term, out=term)
        total += term
    return total


def _select_device(x: Tensor, y: Tensor, low: int, high: int, lengths: list[float]) -> Tensor:
    """The same by torch.kthvalue, for accelerators."""
    result = x.new_empty(x.shape[0], 2)
    step = max(1, CHUNK_DEVICE // y.shape[0])
    for start in range(0, x.shape[0], step):
        rows = x.new_zeros(min(step, x.shape[0] - start), y.shape[0])
        for axis, length in enumerate(lengths):
            difference = x[start : start + step, None, axis] - y[:, axis]
            if math.isfinite(length):
                difference -= (difference / length).round() * length
            rows += difference.square_()
        for column, k in enumerate((low, high)):
            result[start : start + step, column] = rows.kthvalue(k + 1, dim=1).values
    return result


def _check_positions(x: Any, y: Any) -> None:
    for name, p in (("query_pos", x), ("key_pos", y)):
        if not isinstance(p, Tensor):
            raise TypeError(f"{OP}: {name} must be a Tensor or a mesh, got {type(p).__name__}")
        if not p.is_floating_point():
            raise TypeError(f"{OP}: {name} must be a floating-point tensor, got {p.dtype}")
        if p.dim() not in (2, 3):
            raise ValueError(f"{OP}: {name} must have shape (N, d) or (B, N, d), got {tuple(p.shape)}")
    if x.device != y.device:
        raise ValueError(f"{OP}: key_pos must be on query_pos's device {x.device}, got {y.device}")
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"{OP}: key_pos must have as many coordinates as query_pos, {x.shape[-1]}, got {y.shape[-1]}"
        )
    if x.dim() == y.dim() == 3 and x.shape[0] != y.shape[0]:
        raise ValueError(f"{OP}: key_pos must have query_pos's batch of {x.shape[0]}, got {y.shape[0]}")
    if y.shape[-2] == 0:
        raise ValueError(f"{OP}: key_pos must have at least one key, got shape {tuple(y.shape)}")


def _check_quantile(quantile: Any) -> None:
    if isinstance(quantile, bool) or not isinstance(quantile, (int, float)):
        raise TypeError(f"{OP}: quantile must be a number in [0, 1], got {type(quantile).__name__}")
    if not 0.0 <= quantile <= 1.0:
        raise ValueError(f"{OP}: quantile must be in [0, 1], got {quantile}")


def _lengths(period: Any, dimension: int) -> list[float]:
    return [math.inf] * dimension if period is None else check_period(OP, period, dimension)
