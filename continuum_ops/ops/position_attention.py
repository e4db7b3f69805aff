"""Position attention: Gaussian attention between two meshes, whose sum over keys is a quadrature rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..mesh import Grid, scaled_product_weights
from . import _checks as shared
from . import _direct as direct
from . import _position_attention_checks as checks
from . import _position_attention_grid as grids
from ._continuum_attention_chunked import accumulation_dtype
from ._functorch import transforms_active
from ._position_attention_autograd import apply_plain, forward_op, plain_op
from ._position_attention_functorch import attend_in_transforms


def position_attention(
    query_pos: Tensor | Grid,
    key_pos: Tensor | Grid,
    value: Tensor,
    rate: Tensor,
    weights: Tensor | Sequence[Tensor] | None = None,
    *,
    radius: Tensor | float | None = None,
    period: Sequence[float] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Softmax attention whose scores fall with the squared distance between query and key points.

    .. math::
        out_i = \frac{\sum_k w_k e^{s_{ik}} v_k}{\sum_k w_k e^{s_{ik}}}, \qquad
        s_{ik} = -rate_h \, |x_i - y_k|^2

    With equal weights this is the position-attention of Chen, Wu, "Positional Knowledge is All You Need",
    equation (5); between two meshes its cross form (9), with a radius its local form (10), with several rates
    its heads (22). With quadrature weights :math:`w_k` the sums converge to the integrals of its theorem 2.1
    whatever the mesh, uneven ones too. The N x M scores are never held at once: memory is O(N + M) in a
    kernel, O(N * chunk) in PyTorch.

    Where positions, weights and radius are shared by the batch, each probability is computed once and applied
    to all batch entries and channels. Parts of the meshes that are outside every radius, or so far away that
    they change nothing beyond rounding, are skipped. On the CPU many points in up to three dimensions, where
    the Gaussians are wide compared to the spacing, are summed through a grid of Chebyshev nodes in O(N + M)
    time, to the accuracy of the sum over pairs.

    Args:
        query_pos: points x, (N, d) for the whole batch or (B, N, d), d >= 1, or a Grid.
        key_pos: points y, (M, d) or (B, M, d), or a Grid. Positions are used in float32 or wider; float64
            positions beside a narrower value keep their differences accurate, which matters for points that
            are close together far from the origin.
        value: (B, M, C), shared by the heads, or (B, H, M, C); float64, float32, bfloat16 or float16.
        rate: (H,), >= 0, one for each head, in units of 1 / length^2: most attention of a query goes to keys
            nearer than 1 / sqrt(rate).
        weights: quadrature weights >= 0 and finite, (M,) or (B, M); with a Grid of keys also one tensor
            (n_i,) for each axis, whose outer product they are. A weight of 0 removes its key. A constant
            factor leaves the output as it is. None: ones.
        radius: a number, (N,) or (B, N), >= 0: keys farther than radius from query i do not count. A key
            counts if d^2 <= r^2 (1 + 8 eps), so that equidistant neighbours are in or out together. None:
            all count. Not differentiable.
        period: d numbers, the lengths of a periodic domain (inf: not periodic along that axis); distances
            are those of the nearest images. None: not periodic, also for a Grid with periodic axes.
        return_lse: return (out, lse).

    Returns:
        out (B, H, N, C) in value's dtype; with ``return_lse`` also lse (B, H, N), the logarithm of
        :math:`\sum_k w_k e^{s_{ik}}`, float32 (float64 for a float64 value).

    A query with nothing to attend to (M = 0, all weights 0, no key within radius) gives 0, lse -inf and zero
    gradients. A key of weight 0 has no effect even if its row is NaN; its position, value and weight
    gradients are 0. NaN in a live row comes out. Distances are sums of squared differences, never expanded
    products. Computation is in float64 for a float64 value, else in float32, and rounds to a 16-bit dtype
    once.

    Gradients exist for query_pos, key_pos, value, rate and weights, through out and lse, and so do second
    derivatives; third derivatives in reverse mode raise. Forward mode (``torch.func.jvp``, ``jacfwd``,
    ``torch.autograd.forward_ad``) has derivatives of any order, in PyTorch with O(N * chunk) memory where all
    are forward ones. Under ``torch.func.vmap`` the batch joins that of value, or the heads where rate has it;
    where both have it, entries are computed one by one. Under autocast, value takes the autocast dtype
    (unless it is float64) and nothing else does.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value; on the CPU also a negative, NaN or infinite weight or rate
            and a negative or NaN radius (elsewhere, where a look at the values would wait for the device,
            the affected rows become NaN).

    Example:
        >>> x = co.Grid.uniform((32, 32), dtype=torch.float32)
        >>> v, rate = torch.randn(8, 1024, 64), torch.tensor([10.0, 100.0])  # batch 8, heads 2
        >>> co.position_attention(x, x, v, rate, x.axis_weights).shape
        torch.Size([8, 2, 1024, 64])
    """
    if radius is period is None and not return_lse:
        plain = _plain(query_pos, key_pos, value, rate, weights)
        if plain is not None:
            return plain
    checks.check_value(value)
    (value,) = shared.autocast(value)
    checks.check_rate(rate, value)
    given = weights  # one tensor for each axis where the grid form takes it
    log_scale: Tensor | None = None
    if weights is not None and not isinstance(weights, Tensor) and isinstance(key_pos, Grid):
        checks.check_axis_weights(weights, key_pos, value)
        weights, log_scale = scaled_product_weights(weights)
    x = query_pos.points if isinstance(query_pos, Grid) else query_pos
    y = key_pos.points if isinstance(key_pos, Grid) else key_pos
    checks.check_positions(x, y, value)
    dtype = accumulation_dtype(value.dtype)
    if radius is not None:
        checks.check_radius(radius, value, x.shape[-2])
    if period is not None:
        period = shared.check_period(checks.OP, period, x.shape[-1])
    # Within a radius the point kernel skips what is out of reach and is about three times as fast as windows.
    # Windows are found by a look at the coordinates, which torch.func's transforms hide.
    transformed = transforms_active()
    point_kernel = radius is not None and (transformed or (direct.KERNELS and value.device.type == "cpu"))
    two_grids = isinstance(query_pos, Grid) and isinstance(key_pos, Grid) and not point_kernel
    if two_grids and grids.serves(query_pos, key_pos, given, radius=radius):
        assert isinstance(query_pos, Grid) and isinstance(key_pos, Grid)
        heads = value if value.dim() == 4 else value.unsqueeze(1)
        options: dict[str, Any] = {"radius": radius, "period": period, "return_lse": return_lse}
        return grids.grid_attention(query_pos, key_pos, heads, rate, given, **options)
    if weights is not None:
        weights = checks.check_weights(weights, value).to(dtype)
        weights = weights if weights.dim() == 2 else weights.unsqueeze(0)
    if radius is not None:
        radius = _radius_rows(radius, x.shape[-2], value, dtype)
    x, y = _position_rows(x, y, value.shape[0], dtype)
    value = value if value.dim() == 4 else value.unsqueeze(1)
    attend = attend_in_transforms if transformed else _attend
    out, lse = attend(x, y, value, rate.to(dtype), weights, radius, period)
    if return_lse and log_scale is not None:
        lse = lse + log_scale.to(lse)
    return (out, lse.expand(out.shape[:-1])) if return_lse else out


def _plain(query_pos: Any, key_pos: Any, value: Any, rate: Any, weights: Any) -> Tensor | None:
    """The kernel's own answer where nothing has to be prepared; None where it refuses, or something has."""
    recorded = direct.plain(value, query_pos, key_pos, rate, weights)
    if recorded is None:
        return None
    run = apply_plain if recorded else plain_op
    try:
        return run(query_pos, key_pos, value, rate, weights)  # type: ignore[no-any-return]
    except direct.REFUSALS:  # the checks of the ordinary way say what is wrong
        return None


def _attend(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse, _ = forward_op(*args)
    return out, lse


def _position_rows(x: Tensor, y: Tensor, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(P, N, d) and (P, M, d) of one dtype, P = 1 if the batch shares both."""
    dtype = torch.promote_types(dtype, torch.promote_types(x.dtype, y.dtype))
    x, y = x.to(dtype), y.to(dtype)
    if x.dim() == 2 and y.dim() == 2:
        return x.unsqueeze(0), y.unsqueeze(0)
    return x.expand(batch, *x.shape[-2:]), y.expand(batch, *y.shape[-2:])


def _radius_rows(radius: Tensor | float, queries: int, value: Tensor, dtype: torch.dtype) -> Tensor:
    """(1, N) or (B, N)."""
    if not isinstance(radius, Tensor):
        return torch.full((1, 1), radius, dtype=dtype, device=value.device).expand(1, queries)
    radius = radius.detach().to(dtype)
    return radius if radius.dim() == 2 else radius.expand(1, queries)
