"""Losses between functions on a mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from ..mesh import Grid


def relative_l2(pred: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Relative L2 error of each sample, its integrals by the quadrature of the mesh (CA equation 39).

    .. math::
        \frac{\|pred - target\|}{\|target\|}, \qquad
        \|f\|^2 = \int |f|^2 \approx \sum_i w_i \sum_c f_c(x_i)^2

    The norms belong to the functions, not to the samples: on a mesh that is denser in one place, errors there
    count by the length they cover. A constant factor of the weights cancels. The mean over the batch is the
    loss of CA (39). Where the two are equal the gradient is 0.

    Args:
        pred: (B, N, C), any floating dtype; sums are taken in float32 or wider.
        target: (B, N, C), pred's dtype and device.
        weights: (N,) or (B, N) quadrature weights >= 0 of the mesh, any floating dtype; None: equal.

    Returns:
        (B,), float32 (float64 for float64 inputs). A target that is 0 gives inf, or NaN if pred is 0 too.

    Raises:
        TypeError: an argument that is no tensor of a floating dtype, or pred and target of different dtypes.
        ValueError: a shape or device that does not fit.
    """
    dtype = _check_pair(pred, target, weights)
    difference, reference = pred.to(dtype) - target.to(dtype), target.to(dtype)
    if weights is not None:
        root = weights.to(dtype).sqrt().unsqueeze(-1)
        difference, reference = difference * root, reference * root
    # vector_norm, unlike a square root of a sum, has the gradient 0 at 0.
    norm = torch.linalg.vector_norm
    return norm(difference, dim=(1, 2)) / norm(reference, dim=(1, 2))


def relative_l1(pred: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Relative L1 error of each sample, its integrals by the quadrature of the mesh (PiT appendix E.1).

    .. math::
        \frac{\|pred - target\|_1}{\|target\|_1}, \qquad
        \|f\|_1 = \int |f| \approx \sum_i w_i \sum_c |f_c(x_i)|

    Arguments, result and errors as of :func:`relative_l2`. Where the two are equal the gradient is 0.
    """
    dtype = _check_pair(pred, target, weights)
    difference, reference = (pred.to(dtype) - target.to(dtype)).abs(), target.to(dtype).abs()
    if weights is not None:
        w = weights.to(dtype).unsqueeze(-1)
        difference, reference = difference * w, reference * w
    return difference.sum(dim=(1, 2)) / reference.sum(dim=(1, 2))


def _check_pair(pred: Tensor, target: Tensor, weights: Tensor | None) -> torch.dtype:
    """The dtype of the sums of two functions on a mesh."""
    named = {"pred": pred, "target": target}
    if weights is not None:
        named["weights"] = weights
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, was {type(value).__name__}")
        if not value.is_floating_point():
            raise TypeError(f"{name} must have a floating dtype, was {value.dtype}")
        if value.device != pred.device:
            raise ValueError(f"{name} must be on the device of pred, {pred.device}, was on {value.device}")
    if pred.ndim != 3:
        raise ValueError(f"pred must have shape (B, N, C), was {tuple(pred.shape)}")
    if target.shape != pred.shape:
        raise ValueError(
            f"target must have the shape of pred, {tuple(pred.shape)}, was {tuple(target.shape)}"
        )
    if target.dtype != pred.dtype:
        raise TypeError(f"target must have the dtype of pred, {pred.dtype}, was {target.dtype}")
    batch, n = pred.shape[:2]
    if weights is not None and tuple(weights.shape) not in ((n,), (batch, n)):
        raise ValueError(f"weights must have shape {(n,)} or {(batch, n)}, was {tuple(weights.shape)}")
    return torch.promote_types(pred.dtype, torch.float32)


def h1_seminorm(f: Tensor, grid: Grid, coefficient: Tensor | None = None) -> Tensor:
    r"""Seminorm |a grad f| of each sample by finite differences with the true spacing of the grid.

    .. math::
        \|a \nabla f\|^2 = \int a^2 |\nabla f|^2 \approx \sum_i w_i a_i^2 \sum_{c, j} (\partial_j f_c(x_i))^2

    Derivatives are second order: central differences, at the ends of an axis that is not periodic one-sided
    ones; axes may be uneven. The seminorm belongs to the function: as the grid is refined it converges, which
    a difference of neighbours without the spacing does not.

    Args:
        f: (B, N, C) at the points of the grid, any floating dtype; computed in float32 or wider.
        grid: with at least 3 points per axis, on the device of f.
        coefficient: a, (N,), (B, N) or (B, N, 1); None: 1. For Darcy flow the flux a grad f is what is
            smooth, not grad f (GT section 3).

    Returns:
        (B,), float32 (float64 for float64 inputs). Where f is constant the gradient is 0.

    Raises:
        TypeError: a grid that is no Grid.
        ValueError: a shape that does not fit; an axis of fewer than 3 points.
    """
    return torch.linalg.vector_norm(_weighted_gradient(f, grid, coefficient), dim=(1, 2))


def relative_l2_h1(
    pred: Tensor, target: Tensor, grid: Grid, gamma: float, coefficient: Tensor | None = None
) -> Tensor:
    r"""Relative L2 error of each sample with the H1 seminorm regulariser of GT (section 3, eq. 1, 2).

    .. math::
        \sqrt{\|pred - target\|^2 + \gamma \|a \nabla (pred - target)\|^2} \; / \; \|target\|

    GT takes gamma = 0.1 h for Burgers' equation and 0.5 h for Darcy flow, h being the spacing of the grid,
    and a the diffusion coefficient for Darcy flow. gamma = 0 gives :func:`relative_l2`.

    Args:
        pred, target: (B, N, C), as in :func:`relative_l2`.
        grid, coefficient: as in :func:`h1_seminorm`; the grid's weights serve both norms.
        gamma: >= 0, in units of length squared where a has none.

    Returns:
        (B,), float32 (float64 for float64 inputs). Where the two are equal the gradient is 0.

    Raises:
        TypeError, ValueError: as :func:`relative_l2` and :func:`h1_seminorm`; a negative gamma.
    """
    if not gamma >= 0:
        raise ValueError(f"gamma must be >= 0, was {gamma}")
    weights = grid.weights if isinstance(grid, Grid) else None
    plain = relative_l2(pred, target, weights)
    if gamma == 0:
        return plain
    dtype = torch.promote_types(pred.dtype, torch.float32)
    root = grid.weights.to(dtype).sqrt().unsqueeze(-1)
    error = _h1_norm(pred.to(dtype) - target.to(dtype), grid, gamma, coefficient)
    return error / torch.linalg.vector_norm(target.to(dtype) * root, dim=(1, 2))


def relative_h1(pred: Tensor, target: Tensor, grid: Grid) -> Tensor:
    r"""Relative H1 error of each sample (CA section 6.2), derivatives as in :func:`h1_seminorm`.

    .. math::
        \frac{\|pred - target\|_{H^1}}{\|target\|_{H^1}}, \qquad \|f\|_{H^1}^2 = \|f\|^2 + \|\nabla f\|^2

    Args:
        pred, target: (B, N, C), as in :func:`relative_l2`.
        grid: as in :func:`h1_seminorm`; its spacing counts, so the value belongs to the functions.

    Returns:
        (B,), float32 (float64 for float64 inputs). Where the two are equal the gradient is 0.

    Raises:
        TypeError, ValueError: as :func:`relative_l2` and :func:`h1_seminorm`.
    """
    weights = grid.weights if isinstance(grid, Grid) else None
    dtype = _check_pair(pred, target, weights)
    exact = target.to(dtype)
    return _h1_norm(pred.to(dtype) - exact, grid, 1.0, None) / _h1_norm(exact, grid, 1.0, None)


def _h1_norm(f: Tensor, grid: Grid, gamma: float, coefficient: Tensor | None) -> Tensor:
    """(B,): the square root of |f|^2 + gamma |a grad f|^2."""
    slopes = _weighted_gradient(f, grid, coefficient)
    root = grid.weights.to(f.dtype).sqrt().unsqueeze(-1)
    # One norm of both parts: its gradient at 0 is 0, which that of a root of a sum is not.
    both = torch.cat([f * root, gamma**0.5 * slopes], dim=2)
    return torch.linalg.vector_norm(both, dim=(1, 2))


def _weighted_gradient(f: Tensor, grid: Grid, coefficient: Tensor | None) -> Tensor:
    """(B, N, d C): sqrt(w) a times the derivatives along each axis."""
    if not isinstance(grid, Grid):
        raise TypeError(f"grid must be a Grid, was {type(grid).__name__}")
    if f.ndim != 3 or f.shape[1] != len(grid):
        raise ValueError(f"f must have shape (B, {len(grid)}, C) for this grid, was {tuple(f.shape)}")
    if min(grid.shape) < 3:
        raise ValueError(f"grid must have at least 3 points per axis, was {grid.shape}")
    batch, n = f.shape[:2]
    dtype = torch.promote_types(f.dtype, torch.float32)
    field = f.to(dtype).unflatten(1, grid.shape)
    parts = [
        _derivative(field, axis.to(torch.float64), i + 1, period if kind == "periodic" else None)
        for i, (axis, kind, period) in enumerate(zip(grid.axes, grid.kind, grid.period, strict=True))
    ]
    slopes = torch.cat(parts, dim=-1).flatten(1, -2) * grid.weights.to(dtype).sqrt().unsqueeze(-1)
    if coefficient is None:
        return slopes
    shapes = ((n,), (batch, n), (batch, n, 1))
    if tuple(coefficient.shape) not in shapes:
        raise ValueError(
            f"coefficient must have shape {', '.join(map(str, shapes))}, was {tuple(coefficient.shape)}"
        )
    a = coefficient.to(dtype)
    return slopes * (a if a.ndim == 3 else a.unsqueeze(-1))


def _derivative(field: Tensor, axis: Tensor, dim: int, period: float | None) -> Tensor:
    """Second-order differences along `dim`, wrapped around a period."""
    if period is not None:
        axis = torch.cat([axis[-1:] - period, axis, axis[:1] + period])
        size = field.shape[dim]
        field = torch.cat([field.narrow(dim, size - 1, 1), field, field.narrow(dim, 0, 1)], dim)
    size = field.shape[dim]
    before, after = axis[1:-1] - axis[:-2], axis[2:] - axis[1:-1]
    low, mid, high = (field.narrow(dim, i, size - 2) for i in range(3))

    def shaped(x: Tensor) -> Tensor:
        return x.to(field.dtype).view(-1, *(1,) * (field.ndim - dim - 1))

    left, right = after / (before * (before + after)), before / (after * (before + after))
    inner = (mid - low) * shaped(left) + (high - mid) * shaped(right)
    if period is not None:
        return inner
    # At an end: the slope there of the parabola through the three points next to it.
    ends = []
    for i, j, k in ((0, 1, 2), (size - 1, size - 2, size - 3)):
        h1, h2 = axis[j] - axis[i], axis[k] - axis[i]
        u, v, w = (field.narrow(dim, x, 1) for x in (i, j, k))
        near, far = h2 / (h1 * (h2 - h1)), h1 / (h2 * (h2 - h1))
        ends.append((v - u) * near.to(field.dtype) - (w - u) * far.to(field.dtype))
    return torch.cat([ends[0], inner, ends[1]], dim)
