"""Position attention between two tensor grids: axis by axis, or within a radius the window of neighbours.

exp(-rate |x - y|^2) is the product of its factors along the axes, and so are the weights of a grid. The
normaliser is then a product too, and the attention matrix a Kronecker product of one softmax matrix per axis,
which is applied axis by axis: O(N * sum n_i) work, and no more memory than the values and the axis matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..mesh import Grid, scaled_product_weights
from ._grid_product import grid_product
from ._position_attention_window import window_attention

# Axis matrices are held whole. An axis matrix is no larger than a few fields, or than this many numbers.
AXIS_ENTRIES = 2**22
AXIS_FIELDS = 4


def serves(query_pos: Any, key_pos: Any, weights: Any, *, radius: Tensor | float | None) -> bool:
    """Whether :func:`grid_attention` takes the call; if not, the points of the grids are used one by one.

    It takes two grids with weights that are None, one tensor for each axis, the key grid's own ``weights``
    or, on one axis or within a radius, (M,). Not: weights or radius for each sample of a batch; a grid so
    elongated that the matrix of an axis would be larger than the fields (without radius).
    """
    if not (isinstance(query_pos, Grid) and isinstance(key_pos, Grid)):
        return False
    if query_pos.ndim != key_pos.ndim:
        return False  # an error, which the caller words
    if isinstance(radius, Tensor) and radius.dim() > 1:
        return False
    if isinstance(weights, Tensor):
        flat = weights.dim() == 1 and (radius is not None or key_pos.ndim == 1)
        if not (flat or _is_own(weights, key_pos)):
            return False
    if radius is not None:
        return True
    entries = max(m * n for m, n in zip(query_pos.shape, key_pos.shape, strict=True))
    return entries <= max(AXIS_ENTRIES, AXIS_FIELDS * max(len(query_pos), len(key_pos)))


def _is_own(weights: Tensor, grid: Grid) -> bool:
    """Whether these are the grid's weights, which are products, and no gradient is wanted for them."""
    return not weights.requires_grad and weights is grid.weights


def grid_attention(
    query_grid: Grid,
    key_grid: Grid,
    value: Tensor,
    rate: Tensor,
    weights: Sequence[Tensor] | Tensor | None = None,
    *,
    radius: Tensor | float | None = None,
    period: Sequence[float] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Position attention for what :func:`serves` admits; the contract is that of ``position_attention``.

    Args:
        query_grid: grid of N points.
        key_grid: grid of M points, of as many axes.
        value: (B, H, M, C), or (B, 1, M, C) shared by the heads; float64, float32, bfloat16 or float16.
        rate: (H,) >= 0.
        weights: see :func:`serves`.
        radius: None, a number or (N,).
        period: None or d numbers.
        return_lse: return (out, lse).

    Returns:
        out (B, H, N, C) in value's dtype, computed in float32 or wider and rounded once; lse (B, H, N),
        float32 (float64 for float64 values).

    Raises:
        TypeError: weights that are not floating-point tensors.
        ValueError: weights of another number, shape or device; on the CPU also weights that are negative,
            NaN or infinite, and rates or radii that are negative or NaN.
    """
    axis_weights = _axis_weights(weights, key_grid, radius)
    if radius is not None:
        if weights is None or isinstance(weights, Tensor):
            out, lse = window_attention(query_grid, key_grid, value, rate, weights, radius, period)
        else:
            flat, log_scale = scaled_product_weights(weights)
            flat = flat.to(torch.promote_types(value.dtype, torch.float32))
            out, lse = window_attention(query_grid, key_grid, value, rate, flat, radius, period)
            lse = lse + log_scale.to(lse)
        return (out, lse) if return_lse else out
    dtype = torch.promote_types(value.dtype, torch.float32)
    lengths = [math.inf] * key_grid.ndim if period is None else period
    matrices, sums = [], []
    for i, (x, y) in enumerate(zip(query_grid.axes, key_grid.axes, strict=True)):
        w = None if axis_weights is None else axis_weights[i]
        matrix, axis_lse = axis_softmax(x, y, rate, w, lengths[i])
        matrices.append(matrix.to(dtype))
        sums.append(axis_lse)
    out = grid_product(value, matrices, rate, axis_weights)
    if not return_lse:
        return out
    lse = sums[0]
    for axis_lse in sums[1:]:
        lse = (lse[:, :, None] + axis_lse[:, None, :]).flatten(1)
    lse = lse.masked_fill(
        lse == -math.inf, -math.inf
    )  # without keys on one axis, 0 for the others' gradients
    return out, lse.to(dtype).expand(value.shape[0], *lse.shape).contiguous()


def axis_softmax(
    x: Tensor, y: Tensor, rate: Tensor, weights: Tensor | None, period: float
) -> tuple[Tensor, Tensor]:
    """Attention matrix (H, m, n) and lse (H, m) of one axis, in float64.

    An axis is small beside the grid, so float64 costs nothing here, and the errors of d axes do not add up.
    """
    difference = x.double()[:, None] - y.double()
    if math.isfinite(period):
        difference = difference - period * (difference / period).round()
    rate = torch.where(rate >= 0, rate, math.nan).double()
    logits = -rate[:, None, None] * difference.square()
    if weights is None:
        return logits.softmax(-1), logits.logsumexp(-1)
    w = weights.double()
    dead = w == 0
    empty = dead.all()
    scale = w.detach().amax().masked_fill(empty, 1.0)  # so that the logarithms are no larger than they must
    logits = (logits + torch.where(dead, 1.0, w / scale).log()).masked_fill(dead, -math.inf)
    logits = logits.masked_fill(empty, 0.0)  # finite, so that derivatives are 0 and not NaN
    matrix = logits.softmax(-1).masked_fill(empty, 0.0)
    lse = logits.logsumexp(-1) + scale.log()
    return matrix, lse.masked_fill(empty, -math.inf)


def _axis_weights(
    weights: Sequence[Tensor] | Tensor | None, grid: Grid, radius: Tensor | float | None
) -> list[Tensor] | None:
    """One (n_i,) tensor for each axis, checked; None for weights that are None or one flat tensor."""
    if weights is None:
        return None
    if isinstance(weights, Tensor):
        if grid.ndim == 1:
            weights = (weights,)
        elif _is_own(weights, grid):
            weights = grid.axis_weights
        elif radius is not None:
            _check_axis_weight("weights", weights, len(grid), grid.device)
            return None
        else:
            raise ValueError(f"weights must be one tensor for each of {grid.ndim} axes, got a Tensor")
    if len(weights) != grid.ndim:
        raise ValueError(f"weights must be one tensor for each of {grid.ndim} axes, got {len(weights)}")
    for i, (w, n) in enumerate(zip(weights, grid.shape, strict=True)):
        _check_axis_weight(f"weights[{i}]", w, n, grid.device)
    return list(weights)


def _check_axis_weight(name: str, w: Any, n: int, device: torch.device) -> None:
    if not isinstance(w, Tensor) or not w.is_floating_point():
        what = w.dtype if isinstance(w, Tensor) else type(w).__name__
        raise TypeError(f"position_attention: {name} must be a floating-point Tensor, got {what}")
    if tuple(w.shape) != (n,):
        raise ValueError(f"position_attention: {name} must have shape {(n,)}, got {tuple(w.shape)}")
    if w.device != device:
        raise ValueError(f"position_attention: {name} must be on key_pos's device {device}, got {w.device}")
