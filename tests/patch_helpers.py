"""An independent computation of patch attention in long arithmetic, held against the error budget."""

from __future__ import annotations

import importlib
import itertools
import math

import numpy as np
import torch
from helpers import _long, assert_results, draw, lse_dtype
from numpy.typing import NDArray
from torch import Tensor

import continuum_ops as co
from continuum_ops.ops import _patch_attention_chunked as chunked

reference = importlib.import_module("continuum_ops.reference.patch_attention")
NAMES = ("query", "key", "value", "weights")


def scene(
    grid, kgrid=None, *, batch=2, heads=2, d=3, dv=None, dtype=torch.float32, seed=0, weights="none"
) -> list[Tensor | None]:
    """query, key, value and weights: what most tests begin with."""
    kgrid = grid if kgrid is None else kgrid
    q = draw((batch, *grid, heads, d), dtype, seed)
    k = draw((batch, *kgrid, heads, d), dtype, seed + 1)
    v = draw((batch, *kgrid, heads, d if dv is None else dv), dtype, seed + 2)
    shape = {"none": None, "grid": grid, "batch": (batch, *grid), "axis": (*grid[:-1], 1)}[weights]
    w = None if shape is None else draw(shape, lse_dtype(dtype), seed + 3, positive=True)
    return [q, k, v, w]


def _cut(array: NDArray, sizes) -> NDArray:
    """(B, P, L, H, C) of (B, *grid, H, C)."""
    grid = array.shape[1:-2]
    starts = itertools.product(*(range(0, n, s) for n, s in zip(grid, sizes, strict=True)))
    places = [(slice(None), *(slice(i, i + s) for i, s in zip(at, sizes, strict=True))) for at in starts]
    parts = [array[place].reshape(array.shape[0], -1, *array.shape[-2:]) for place in places]
    if not parts:
        return np.zeros((array.shape[0], 0, math.prod(sizes), *array.shape[-2:]), array.dtype)
    return np.stack(parts, 1)


def _join(cut: NDArray, grid, sizes) -> NDArray:
    array = np.zeros((cut.shape[0], *grid, *cut.shape[-2:]), cut.dtype)
    starts = itertools.product(*(range(0, n, s) for n, s in zip(grid, sizes, strict=True)))
    for p, at in enumerate(starts):
        place = (slice(None), *(slice(i, i + s) for i, s in zip(at, sizes, strict=True)))
        array[place] = cut[:, p].reshape(array[place].shape)
    return array


def exact(query, key, value, weights, sizes, *, scale=None, grad_out, grad_lse) -> dict[str, NDArray]:
    """The formula and its derivative in numpy, and under "terms" the sums over absolute values."""
    grid, kgrid = query.shape[1:-2], key.shape[1:-2]
    if scale is None:
        scale = 1.0 if weights is not None else 1.0 / max(math.prod(grid), 1)
    full = np.ones(query.shape[:-2]) if weights is None else _long(weights.expand(query.shape[:-2]))
    q, k, v, g = (_cut(_long(t), sizes) for t in (query, key, value, grad_out))
    w = _cut(full.astype(q.dtype)[..., None, None], sizes)
    q = np.where(w == 0, 0, q)
    s = scale * np.einsum("bpxhd,bjxhd->bhpj", w * q, k)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - top) if s.shape[-1] else s
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = np.where(
            total[..., 0] == 0, -np.inf, np.where(total == 0, 0, top)[..., 0] + np.log(total[..., 0])
        )
    result = {"out": _join(np.einsum("bhpj,bjxhc->bpxhc", p, v), grid, sizes), "lse": lse}
    gp = np.einsum("bpxhc,bjxhc->bhpj", g, v)
    row, gl = (p * gp).sum(-1, keepdims=True), _long(grad_lse)[..., None]
    gs, size = p * (gp - row + gl), p * (np.abs(gp) + np.abs(row) + np.abs(gl))

    def sums(gs, q, k, p, g):
        mixed = scale * np.einsum("bhpj,bjxhd->bpxhd", gs, k)
        parts = {
            "query": _join(w * mixed, grid, sizes),
            "key": _join(scale * np.einsum("bhpj,bpxhd->bjxhd", gs, w * q), kgrid, sizes),
            "value": _join(np.einsum("bhpj,bpxhc->bjxhc", p, g), kgrid, sizes),
        }
        if weights is not None:
            dots = np.where(w == 0, 0, (mixed * q).sum((-1, -2), keepdims=True))
            flat = _join(dots, grid, sizes)[..., 0, 0]
            shape = (1,) * (flat.ndim - weights.dim()) + tuple(weights.shape)
            axes = tuple(i for i, n in enumerate(shape) if n == 1 and flat.shape[i] != 1)
            parts["weights"] = flat.sum(axes, keepdims=True).reshape(weights.shape)
        return parts

    result |= sums(gs, q, k, p, g)
    terms = sums(size, np.abs(q), np.abs(k), p, np.abs(g))
    result["terms"] = {name: np.abs(t) for name, t in terms.items()}
    return result


class _Chunked(torch.autograd.Function):
    """The operator in PyTorch whatever kernels are there."""

    @staticmethod
    def forward(ctx, query, key, value, weights, sizes, scale):
        out, lse, kept = chunked.forward(chunked.Inputs(query, key, value, weights, sizes, scale))
        ctx.save_for_backward(query, key, value, weights, kept)
        ctx.options = sizes, scale
        return out, lse, kept

    @staticmethod
    def backward(ctx, grad_out, grad_lse, _):
        *tensors, kept = ctx.saved_tensors
        x = chunked.Inputs(*tensors, *ctx.options)
        grads = chunked.backward(x, grad_out, grad_lse, kept, [t is not None for t in tensors])
        return (*grads, None, None)


def attend(query, key, value, weights, sizes, **options):
    return co.patch_attention(query, key, value, sizes, weights, return_lse=True, **options)


def plain(query, key, value, weights, sizes, **options):
    """What a user would write: rearrange, einsum, softmax, einsum, rearrange, all in the dtype of query."""
    grid = query.shape[1:-2]
    if options.get("scale") is None:
        options["scale"] = 1.0 if weights is not None else 1.0 / max(math.prod(grid), 1)
    left = query
    if weights is not None:
        w = weights.to(query.dtype).expand(query.shape[:-2])[..., None, None]
        left = torch.where(w == 0, 0.0, w * query)
    q, k, v = (reference.patches(t, sizes) for t in (left, key, value))
    scores = options["scale"] * torch.einsum("bpxhd,bjxhd->bhpj", q, k)
    out = torch.einsum("bhpj,bjxhc->bpxhc", scores.softmax(-1), v)
    return reference.assemble(out, grid, sizes), scores.logsumexp(-1)


def run(function, tensors, sizes, grad_out, grad_lse, **options) -> dict[str, Tensor]:
    """Outputs of function and the gradients of query, key, value and weights; strides are kept."""
    leaves = [
        None if t is None else t.detach().as_strided(t.shape, t.stride(), t.storage_offset()).requires_grad_()
        for t in tensors
    ]
    out, lse = function(*leaves, sizes, **options)
    inputs = [t for t in leaves if t is not None]
    grads = iter(torch.autograd.grad([out, lse], inputs, [grad_out.to(out.dtype), grad_lse.to(lse.dtype)]))
    result = {"out": out.detach(), "lse": lse.detach()}
    return result | {n: next(grads) for n, t in zip(NAMES, leaves, strict=True) if t is not None}


def cotangents(query, value, sizes, seed=5) -> tuple[Tensor, Tensor]:
    grid = query.shape[1:-2]
    patches = math.prod(n // s for n, s in zip(grid, sizes, strict=True))
    grad_out = draw((*query.shape[:-1], value.shape[-1]), query.dtype, seed)
    return grad_out, draw((query.shape[0], query.shape[-2], patches), lse_dtype(query.dtype), seed + 1)


def check(tensors, sizes, *, grad_out=None, **options) -> dict[str, Tensor]:
    """Run the public function forward and backward and hold every result against the budget."""
    query, _, value, _weights = tensors
    sizes = [sizes] * (query.dim() - 3) if isinstance(sizes, int) else list(sizes)
    drawn, grad_lse = cotangents(query, value, sizes)
    grad_out = drawn if grad_out is None else grad_out
    result = run(attend, tensors, sizes, grad_out, grad_lse, **options)
    true = exact(*tensors, sizes, grad_out=grad_out, grad_lse=grad_lse, **options)
    rough = run(plain, tensors, sizes, grad_out, grad_lse, **options)
    assert_results(result, true, rough, dict(zip(NAMES, tensors, strict=True)), value)
    return result
