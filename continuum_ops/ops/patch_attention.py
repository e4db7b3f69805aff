"""Patch attention: attention between the patches of a grid, each a function of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _checks as shared
from . import _direct as direct
from . import _patch_attention_checks as checks
from ._functorch import transforms_active
from ._patch_attention_autograd import apply_plain, forward_op, plain_op
from ._patch_attention_functorch import attend_in_transforms


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
    r"""Softmax attention over the patches of a grid, scored by the L2 inner product of functions on a patch.

    .. math::
        out_p(x) = \sum_j a_{pj} v_j(x), \qquad a_{pj} = \mathrm{softmax}_j \, s_{pj}, \qquad
        s_{pj} = scale \sum_{x} w_p(x) \, q_p(x) \cdot k_j(x)

    :math:`q_p, k_j, v_j` are the query, key and value functions restricted to patches p and j, x runs over
    the points of a patch. With the default scale or with quadrature weights the sum is the quadrature of
    :math:`\int q_p \cdot k_j`, so scores and outputs converge when the patches are sampled more finely, their
    number and extent fixed (Calvello, Kovachki, Levine, Stuart, "Continuum Attention for Neural Operators",
    definitions 13 to 18, equations 62 and 63). Between two grids it is cross-attention of patches.

    P patches of queries meet Pk of keys: cost O(P * points * H * (D + Dv)), memory O(points). The grid layout
    is read in place, without rearranged copies, by the CPU kernel.

    Args:
        query: (B, \*grid, H, D) on a grid of 1, 2 or 3 axes; float64, float32, bfloat16 or float16.
        key: (B, \*kgrid, H, D), query's dtype; kgrid has as many axes as grid and may be another one.
        value: (B, \*kgrid, H, Dv), query's dtype. Strides of all three are free.
        patch_size: points of a patch along each axis, one int or one for each axis; divides both grids.
        weights: quadrature weights >= 0 and finite on the query grid, (\*grid) or (B, \*grid); any floating
            dtype, used as float32 (float64 for float64 queries). They enter the inner product only: a point
            of weight 0 does not enter it, and its value is mixed all the same. All weights 0 give equal
            attention; a constant factor of the weights is one of the scores. Flat weights of a
            :class:`continuum_ops.Grid` are passed as ``grid.weights.view(grid.shape)``. None: ones.
        scale: factor of the scores. None: 1 / (points of the query grid), the volume of a cell of the unit
            domain; with weights, 1.
        return_lse: return (out, lse).

    Returns:
        out (B, \*grid, H, Dv) in query's dtype; with ``return_lse`` also lse (B, H, P), the logarithm of
        :math:`\sum_j e^{s_{pj}}`, float32 (float64 for float64 queries), patches in row-major order.

    Without keys out is 0 and lse -inf. NaN comes out, but for query at points of weight 0 and for key at
    points whose weight is 0 in the query's patch: they are not looked at, and the gradients of query and
    weights at points of weight 0 are 0. Computation is in float64 for float64 inputs, else in float32, and
    rounds to a 16-bit dtype once.

    Gradients exist for query, key, value and weights, through out and lse, and so do second derivatives;
    third derivatives in reverse mode raise. Forward mode (``torch.func.jvp``, ``jacfwd``,
    ``torch.autograd.forward_ad``) has derivatives of any order, in PyTorch. Under ``torch.func.vmap`` the
    batch joins that of the tensors. Under autocast query, key and value take the autocast dtype (unless they
    are float64); weights and lse stay float32.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape or device, a patch_size that does not divide a grid; on the CPU also a
            negative, NaN or infinite weight (elsewhere, where a look at the values would wait for the
            device, the affected patches become NaN).

    Example:
        >>> q, k, v = torch.randn(3, 1, 64, 64, 8, 16)  # batch 1, grid 64 x 64, heads 8
        >>> co.patch_attention(q, k, v, 16).shape  # 16 patches of 16 x 16 points
        torch.Size([1, 64, 64, 8, 16])
    """
    if not return_lse:
        plain = _plain(query, key, value, patch_size, weights, scale)
        if plain is not None:
            return plain
    op = checks.OP
    shared.check_tensor(op, "query", query)
    query, key, value = shared.autocast(query, key, value)
    checks.check_qkv(query, key, value)
    sizes = checks.check_patch_size(patch_size, query, key)
    if scale is not None and not isinstance(scale, (int, float)):
        raise TypeError(f"{op}: scale must be None or a number, got {type(scale).__name__}")
    if weights is not None:
        weights = checks.check_weights(weights, query).to(torch.promote_types(query.dtype, torch.float32))
        scale = 1.0 if scale is None else scale
    inputs = (query, key, value, weights, sizes, None if scale is None else float(scale))
    out, lse = attend_in_transforms(*inputs) if transforms_active() else forward_op(*inputs)[:2]
    return (out, lse) if return_lse else out


def _plain(query: Any, key: Any, value: Any, patch_size: Any, weights: Any, scale: Any) -> Tensor | None:
    """The kernel's own answer where nothing has to be prepared; None where it refuses, or something has."""
    recorded = direct.plain(query, key, value, weights)
    if (
        recorded is None
        or (scale is not None and type(scale) is not float)
        or (weights is not None and weights.dtype is not query.dtype)
    ):
        return None
    others: Sequence[int] = ()
    if type(patch_size) is not int:
        if type(patch_size) not in (tuple, list) or len(patch_size) != query.dim() - 3:
            return None
        if set(map(type, patch_size)) != {int} or min(patch_size) < 1:
            return None
        patch_size, *others = patch_size
    run = apply_plain if recorded else plain_op
    try:
        if weights is scale is None and not others:
            return run(query, key, value, patch_size)  # type: ignore[no-any-return]
        return run(query, key, value, patch_size, weights, scale, *others)  # type: ignore[no-any-return]
    except direct.REFUSALS:  # the checks of the ordinary way say what is wrong
        return None
