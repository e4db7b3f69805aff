"""Galerkin attention over a mesh that is spread over ranks: one all-reduce of a D x Dv matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import _checks as checks
from ..ops import galerkin_attention as one_process
from ._group import Group, check_values, link, sum_over, wanted


@torch.compiler.disable
def galerkin_attention(
    query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None = None, group: Group = None
) -> Tensor:
    r"""``continuum_ops.galerkin_attention`` with the points spread over the ranks of a process group.

    .. math::
        out = q \, (k^T W v), \qquad W = \mathrm{diag}(w)

    (Cao, "Choose a Transformer: Fourier or Galerkin", equation 6.) Each rank sums :math:`k^T W v` over its
    points; one all-reduce of these D x Dv matrices (for each head and batch entry) makes it the sum over all.
    Nothing that is sent grows with the number of points.

    Args:
        query: (..., H, N_r, D), the queries of this rank; float64, float32, bfloat16 or float16.
        key: (..., H, M_r, D), query's dtype.
        value: (..., H, M_r, Dv), query's dtype. N_r and M_r are each rank's own, 0 too; the other sizes, the
            dtype and which of the tensors require a gradient are the same on all ranks.
        weights: quadrature weights >= 0 and finite, broadcastable to (..., H, M_r); on all ranks or on none.
            None: 1 / M, M being the number of keys of all ranks.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.

    Returns:
        (..., H, N_r, Dv) in query's dtype: what one process gives, to rounding.

    Derivatives of any order exist, by the rule of this package (see ``continuum_ops.distributed``). Errors
    are those of :func:`continuum_ops.distributed.continuum_attention`; the other rules those of
    ``continuum_ops.galerkin_attention``.
    """
    return linear_attention("distributed.galerkin_attention", query, key, value, weights, group)


def linear_attention(
    op: str, query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None, group: Group
) -> Tensor:
    """Both names of q (k^T W v)."""
    at = link(op, group)

    def look() -> Any:
        checks.check_tensor(op, "query", query)
        leads = checks.check_qkv(op, *checks.autocast(query, key, value))
        if weights is not None:
            checks.check_weights(op, weights, query, (*leads, key.shape[-2]))
            check_values(op, "weights", weights)
        common = (
            (
                "the leading dimensions and widths of query, key and value",
                tuple((*t.shape[:-2], t.shape[-1]) for t in (query, key, value)),
            ),
            ("the leading dimensions of weights", None if weights is None else tuple(weights.shape[:-1])),
            ("the dtype of query", str(query.dtype)),
            (
                "which of query, key, value and weights require a gradient",
                wanted(query, key, value, weights),
            ),
        )
        return key.shape[-2], common

    seen = at.agree(look)
    for i, (what, _) in enumerate(seen[0][1]):
        at.same(what, [common[i][1] for _, common in seen])
    query, key, value = checks.autocast(query, key, value)
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        k, v = key.to(dtype), value.to(dtype)
        if weights is None:
            keys = sum(count for count, _ in seen)
            weights = k.new_full((k.shape[-2],), 1.0 / keys if keys else 0.0)
        # The operator for the queries 1: 1 (k^T W v), whatever it does about weights of 0.
        identity = torch.eye(k.shape[-1], dtype=dtype, device=k.device)
        leads = torch.broadcast_shapes(k.shape[:-2], v.shape[:-2])
        gram = one_process(identity.expand(*leads, *identity.shape), k, v, weights)
        return (query.to(dtype) @ sum_over(gram, at)).to(query.dtype)
