"""Patch attention in the order of the formula. For tests and for reading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor


def patch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    patch_size: int | Sequence[int],
    weights: Tensor | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """out_p(x) = sum_j a_pj v_j(x), a_p = softmax_j scale sum_x w_p(x) q_p(x) . k_j(x) (CA def. 13 to 18).

    Arguments as of :func:`continuum_ops.patch_attention`; computed in the dtype of query.
    """
    grid = query.shape[1:-2]
    sizes = [patch_size] * len(grid) if isinstance(patch_size, int) else list(patch_size)
    if scale is None:
        scale = 1.0 if weights is not None else 1.0 / max(math.prod(grid), 1)
    w = query.new_ones(grid) if weights is None else weights.to(query.dtype)
    w = w.expand(query.shape[:-2])[..., None, None].expand(query.shape)
    q, k, v, w = (patches(t, sizes) for t in (query, key, value, w))
    # (B, P, Pk, points, H, D): what has weight zero does not enter the sum, even if it is NaN.
    terms = torch.where(w[:, :, None] == 0, 0.0, w[:, :, None] * q[:, :, None] * k[:, None])
    scores = scale * terms.sum((3, 5))  # (B, P, Pk, H)
    attention = scores.softmax(2)
    out = torch.einsum("bpjh,bjxhc->bpxhc", attention, v)
    out = assemble(out, grid, sizes)
    if not return_lse:
        return out
    return out, scores.logsumexp(2).transpose(1, 2)


def patches(u: Tensor, sizes: Sequence[int]) -> Tensor:
    """(B, P, points of a patch, H, C) of u (B, *grid, H, C), patches and points in row-major order."""
    cut = [u[(slice(None), *place)].flatten(1, len(sizes)) for place in _places(u.shape[1:-2], sizes)]
    empty = u.new_zeros(u.shape[0], 0, math.prod(sizes), *u.shape[-2:])
    return torch.stack(cut, 1) if cut else empty


def assemble(cut: Tensor, grid: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The inverse of :func:`patches`."""
    u = cut.new_zeros(cut.shape[0], *grid, *cut.shape[-2:])
    for p, place in enumerate(_places(grid, sizes)):
        u[(slice(None), *place)] = cut[:, p].unflatten(1, tuple(sizes))
    return u


def _places(grid: Sequence[int], sizes: Sequence[int]) -> list[tuple[slice, ...]]:
    axes = [[slice(i, i + s) for i in range(0, n, s)] for n, s in zip(grid, sizes, strict=True)]
    return list(product(*axes))
