"""Patch attention with the patches of a grid spread over ranks: patches of keys go round a ring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import _checks as shared
from ..ops import _patch_attention_checks as checks
from ..ops import patch_attention as one_process
from ._attend import Block, Reduced, attend
from ._group import Group, check_values, link, wanted
from ._routes import Ring

OP = "distributed.patch_attention"


@torch.compiler.disable
def patch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    patch_size: int | Sequence[int],
    weights: Tensor | None = None,
    group: Group = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""``continuum_ops.patch_attention`` with the patches spread over the ranks of a process group.

    .. math::
        out_p(x) = \sum_j a_{pj} v_j(x), \qquad a_{pj} = \mathrm{softmax}_j \, s_{pj}, \qquad
        s_{pj} = scale \sum_{x} w_p(x) \, q_p(x) \cdot k_j(x)

    where j runs over the patches of all ranks (Calvello, Kovachki, Levine, Stuart, "Continuum Attention for
    Neural Operators", definitions 13 to 18, equations 62 and 63). Every rank holds a grid of whole patches:
    a slab of the full grid, cut along any of its axes, whose order does not matter. Keys and values go round
    a ring; memory per rank is O(points / ranks).

    Args:
        query: (B, \*grid_r, H, D) on this rank's grid of 1, 2 or 3 axes; float64, float32, bfloat16 or
            float16.
        key: (B, \*kgrid_r, H, D), query's dtype.
        value: (B, \*kgrid_r, H, Dv), query's dtype. The grids are each rank's own, without points too
            (a size of 0); the other sizes, the dtype and which of the tensors require a gradient are the
            same on all ranks.
        patch_size: points of a patch along each axis, the same on all ranks; divides the grids of each rank.
        weights: quadrature weights >= 0 and finite on this rank's query grid, (\*grid_r) or (B, \*grid_r); on
            all ranks or on none. They stay where they are.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.
        scale: factor of the scores, the same on all ranks. None: 1 / (points of the query grids of all
            ranks); with weights, 1.
        return_lse: return (out, lse).

    Returns:
        out (B, \*grid_r, H, Dv) in query's dtype; with ``return_lse`` also lse (B, H, P_r), float32 (float64
        for float64 queries). They are what one process gives for the full grid, to rounding; the same number
        of ranks gives the same bits.

    Gradients exist for query, key, value and weights, through out and lse, by the rule of this package (see
    ``continuum_ops.distributed``). The backward pass computes each block once more. There are no second
    derivatives. The other rules are those of ``continuum_ops.patch_attention``, the errors those of
    :func:`continuum_ops.distributed.continuum_attention`.
    """
    at = link(OP, group)
    if isinstance(query, Tensor) and torch.is_autocast_enabled(query.device.type):
        query, key, value = shared.autocast(query, key, value)

    def look() -> Any:
        shared.check_tensor(OP, "query", query)
        checks.check_qkv(query, key, value)
        patch = checks.check_patch_size(patch_size, query, key)
        if weights is not None:
            checks.check_weights(weights, query)
            check_values(OP, "weights", weights)
        if not (scale is None or isinstance(scale, (int, float))):
            raise TypeError(f"{OP}: scale must be None or a number, got {type(scale).__name__}")
        common = (
            (
                "the batch, axes, heads and widths of query, key and value",
                tuple((t.shape[0], t.dim(), *t.shape[-2:]) for t in (query, key, value)),
            ),
            ("patch_size", tuple(patch)),
            ("whether weights are given", weights is not None),
            ("the dtype of query", str(query.dtype)),
            ("the scale", scale),
            (
                "which of query, key, value and weights require a gradient",
                wanted(query, key, value, weights),
            ),
        )
        return [tuple(key.shape), tuple(value.shape)], common, math.prod(query.shape[1:-2])

    seen = at.agree(look)
    for i, (what, _) in enumerate(seen[0][1]):
        at.same(what, [common[i][1] for _, common, _ in seen])
    points = sum(count for _, _, count in seen)
    if scale is None:
        scale = 1.0 / points if weights is None and points > 0 else 1.0
    form = _Patches(list(seen[0][1][1][1]), float(scale))
    local = [query] if weights is None else [query, weights]
    out, lse = attend(form, Ring(at, [sizes for sizes, _, _ in seen], (1, 1)), local, [key, value])
    return (out, lse) if return_lse else out


class _Patches(Reduced):
    value_at = 1

    def __init__(self, patch: list[int], scale: float) -> None:
        self.patch, self.scale = patch, scale
        self.counts: list[int] = []

    def out_shape(self, local: Block, own: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
        query, value = local[0], own[1]
        self.counts = [n // size for n, size in zip(query.shape[1:-2], self.patch, strict=True)]
        rows = (query.shape[0], query.shape[-2], math.prod(self.counts))
        return (*query.shape[:-1], value.shape[-1]), rows

    def empty(self, local: Block, block: Block) -> bool:
        return local[0].shape[:-1].numel() == 0 or block[0].shape[:-1].numel() == 0

    def attend(self, local: Block, block: Block) -> tuple[Tensor, Tensor]:
        query, weights = local[0], local[1] if len(local) > 1 else None
        key, value = block
        out, lse = one_process(query, key, value, self.patch, weights, scale=self.scale, return_lse=True)
        return out, lse

    def spread(self, rows: Tensor) -> Tensor:
        """(B, H, P) -> (B, *grid, H, 1)."""
        at_points = rows.unflatten(-1, self.counts)
        for axis, size in enumerate(self.patch):
            at_points = at_points.repeat_interleave(size, 2 + axis)
        return at_points.movedim(1, -1).unsqueeze(-1)

    def row_sums(self, x: Tensor) -> Tensor:
        """(B, *grid, H, C) -> (B, H, P)."""
        sums = x.sum(-1).movedim(-1, 1)
        for axis, (count, size) in enumerate(zip(self.counts, self.patch, strict=True)):
            sums = sums.unflatten(2 + axis, (count, size)).sum(3 + axis)
        return sums.flatten(2)
