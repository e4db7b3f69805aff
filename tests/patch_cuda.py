"""Patch attention of the CUDA kernels, by the shim or on a GPU, against the formula in float64."""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import torch
from cuda_on_cpu import shim
from torch import Tensor

import continuum_ops.ops  # noqa: F401  (the operators)

OPS = torch.ops.continuum_ops
GRADS = ("query", "key", "value", "weights")


class Inputs(NamedTuple):
    """As in the schema."""

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor | None
    patch_size: list[int]
    scale: float

    @property
    def accumulation(self) -> torch.dtype:
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32


def inputs(
    *,
    batch=2,
    heads=2,
    counts=(2, 3),
    key_counts=None,
    patch=(2, 2),
    channels=8,
    value_channels=8,
    dtype=torch.float32,
    weights=0,
    scale=0.5,
    seed=0,
) -> Inputs:
    """Grids of so many patches of so many points; weights: 0 (none), 1 or the batch."""
    g = torch.Generator().manual_seed(seed)
    grid = [n * p for n, p in zip(counts, patch, strict=True)]
    key_grid = [n * p for n, p in zip(key_counts or counts, patch, strict=True)]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    drawn = None
    if weights:
        drawn = torch.rand(weights, *grid, generator=g, dtype=torch.float64) + 0.01
        drawn = drawn.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return Inputs(
        normal(batch, *grid, heads, channels),
        normal(batch, *key_grid, heads, channels),
        normal(batch, *key_grid, heads, value_channels),
        drawn,
        list(patch),
        scale,
    )


def cut(u: Tensor, sizes: list[int]) -> Tensor:
    """(B, H, P, points, C) of u (B, *grid, H, C), patch by patch."""
    grid = u.shape[1:-2]
    corners = product(*(range(0, n, s) for n, s in zip(grid, sizes, strict=True)))
    slices = [tuple(slice(c, c + s) for c, s in zip(corner, sizes, strict=True)) for corner in corners]
    parts = [u[(slice(None), *place)].flatten(1, len(sizes)) for place in slices]
    if not parts:
        return u.new_zeros(u.shape[0], u.shape[-2], 0, math.prod(sizes), u.shape[-1])
    return torch.stack(parts, 1).permute(0, 3, 1, 2, 4)


def join(rows: Tensor, grid: torch.Size, sizes: list[int]) -> Tensor:
    """The inverse of :func:`cut`."""
    u = rows.new_zeros(rows.shape[0], *grid, rows.shape[1], rows.shape[-1])
    corners = product(*(range(0, n, s) for n, s in zip(grid, sizes, strict=True)))
    for p, corner in enumerate(corners):
        place = tuple(slice(c, c + s) for c, s in zip(corner, sizes, strict=True))
        u[(slice(None), *place)] = rows[:, :, p].transpose(1, 2).unflatten(1, sizes)
    return u


def grads_for(x: Inputs, seed: int = 9) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    out = torch.randn((*x.query.shape[:-1], x.value.shape[-1]), generator=g, dtype=torch.float64).to(
        x.query.dtype
    )
    patches = math.prod(n // s for n, s in zip(x.query.shape[1:-2], x.patch_size, strict=True))
    lse = torch.randn(x.query.shape[0], x.query.shape[-2], patches, generator=g, dtype=torch.float64)
    return out, lse.to(x.accumulation)


def exact(x: Inputs, grad_out: Tensor, grad_lse: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The formula and its derivatives, and the same sums over absolute values, the measure of rounding."""
    q, k, v, g = (cut(t.double(), x.patch_size) for t in (x.query, x.key, x.value, grad_out))
    w = torch.ones(1, *x.query.shape[1:-2], dtype=torch.float64) if x.weights is None else x.weights.double()
    w = cut(w[..., None, None], x.patch_size)  # (W, 1, P, points, 1)
    s = x.scale * torch.einsum("bhpxc,bhjxc->bhpj", w * q, k)
    size = abs(x.scale) * torch.einsum("bhpxc,bhjxc->bhpj", w * q.abs(), k.abs())
    lse = s.logsumexp(-1)
    a = s.softmax(-1)
    # A score's rounding is relative to its terms; the probabilities and all that follows carry it.
    wobble = 1 + size.amax((-1, -2), keepdim=True) if size.numel() else size
    out = torch.einsum("bhpj,bhjxc->bhpxc", a, v)
    dp = torch.einsum("bhpxc,bhjxc->bhpj", g, v)
    dp_size = torch.einsum("bhpxc,bhjxc->bhpj", g.abs(), v.abs())
    delta, gl = (a * dp).sum(-1, keepdim=True), grad_lse.double()[..., None]
    ds = a * (dp - delta + gl)
    ds_size = wobble * a * (dp_size + (a * dp_size).sum(-1, keepdim=True) + gl.abs())

    def results(p: Tensor, ds: Tensor, q: Tensor, k: Tensor, g: Tensor, scale: float) -> dict[str, Tensor]:
        mixed = scale * torch.einsum("bhpj,bhjxc->bhpxc", ds, k)
        dw = torch.where(w == 0, 0.0, (mixed * q).sum(-1, keepdim=True).sum(1, keepdim=True))
        found = {
            "query": join(w * mixed, x.query.shape[1:-2], x.patch_size),
            "key": join(
                scale * torch.einsum("bhpj,bhpxc->bhjxc", ds, w * q), x.key.shape[1:-2], x.patch_size
            ),
            "value": join(torch.einsum("bhpj,bhpxc->bhjxc", p, g), x.value.shape[1:-2], x.patch_size),
        }
        if x.weights is not None:
            full = join(dw, x.query.shape[1:-2], x.patch_size)[..., 0, 0]
            found["weights"] = full.sum_to_size(x.weights.shape)
        return found

    grid = x.query.shape[1:-2]
    result = {"out": join(out, grid, x.patch_size), "lse": lse, **results(a, ds, q, k, g, x.scale)}
    spread = torch.einsum("bhpj,bhjxc->bhpxc", a * wobble, v.abs()) if size.numel() else out
    terms = {
        "out": join(spread, grid, x.patch_size),
        "lse": size.amax().reshape(1) + 1 if size.numel() else lse,
    }
    rest = results(a * wobble, ds_size, q.abs(), k.abs(), g.abs(), abs(x.scale))
    return result, {**terms, **rest}


def run(
    device: str, x: Inputs, grad_out: Tensor, grad_lse: Tensor | None, *, seed=0, tf32=False, needs=None
) -> dict[str, Tensor]:
    """Outputs and every gradient, by the registered operators, on the CPU."""
    needs = [t is not None for t in x[:4]] if needs is None else needs
    if device == "gpu":
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        try:
            return _run_gpu(x, grad_out, grad_lse, needs)
        finally:
            torch.set_float32_matmul_precision(before)
    shim().set_seed(seed)
    out, lse, probabilities = OPS.patch_attention_cuda_forward(*x, tf32)
    grads = OPS.patch_attention_cuda_backward(
        grad_out, grad_lse, *x[:4], lse, probabilities, x.patch_size, x.scale, needs, tf32
    )
    return _named(out, lse, grads, needs)


def _named(out: Tensor, lse: Tensor, grads: tuple[Tensor, ...], needs: list[bool]) -> dict[str, Tensor]:
    result = {"out": out, "lse": lse}
    for name, grad, need in zip(GRADS, grads, needs, strict=True):
        if need:
            result[name] = grad
        else:
            assert grad.shape == (0,), name
    return {name: t.cpu() for name, t in result.items()}


def _on_gpu(t: Tensor | None) -> Tensor | None:
    """With the same strides and offset in a copy of the whole storage."""
    if t is None:
        return None
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    return whole.cuda().as_strided(t.shape, t.stride(), t.storage_offset())


def _run_gpu(x: Inputs, grad_out: Tensor, grad_lse: Tensor | None, needs: list[bool]) -> dict[str, Tensor]:
    tensors = [_on_gpu(t) for t in x[:4]]
    out, lse, probabilities = OPS.patch_attention_forward(*tensors, x.patch_size, x.scale)
    grads = OPS.patch_attention_backward(
        _on_gpu(grad_out), _on_gpu(grad_lse), *tensors, lse, probabilities, x.patch_size, x.scale, needs
    )
    return _named(out, lse, grads, needs)


def check(device: str, x: Inputs, *, seed=0, tf32=False, grad_out: Tensor | None = None) -> dict[str, Tensor]:
    """Every result within 8 eps of the largest sum of its terms' sizes."""
    drawn, grad_lse = grads_for(x)
    grad_out = drawn if grad_out is None else grad_out
    result = run(device, x, grad_out, grad_lse, seed=seed, tf32=tf32)
    true, terms = exact(x, grad_out, grad_lse)
    eps = 2.0**-10 if tf32 else torch.finfo(x.query.dtype).eps
    assert result.keys() == true.keys()
    for name, actual in result.items():
        assert actual.shape == true[name].shape, f"{name}: shape {tuple(actual.shape)}"
        if actual.numel() == 0:
            continue
        error = (actual.double() - true[name]).abs().max().item()
        # Without weights the half dtypes' products are exact, but coefficients are rounded to the dtype.
        exact_scores = name == "lse" and x.weights is None and not tf32
        size = terms[name].abs().max().item() * (torch.finfo(x.accumulation).eps if exact_scores else eps)
        assert error <= 8 * size, f"{name}: error {error:.2e}, allowed {8 * size:.2e}"
    return result
