"""Quadrature rules: weights w_k such that sum_k w_k f(x_k) approximates the integral of f.

Every rule works in float64 and returns float64 unless ``dtype`` says otherwise, on the device of its nodes
unless ``device`` says otherwise. Nodes are tensors, numpy arrays or sequences of numbers; the rules on
given nodes (all but ``voronoi``) are differentiable with respect to them. Weights carry the unit of the
nodes (length, area, volume).

Background: P. J. Davis and P. Rabinowitz, Methods of Numerical Integration (1984). The trapezoid rule is
the one of Continuum Attention (CA), equations 58-59.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ._voronoi import cell_volumes

__all__ = [
    "clenshaw_curtis",
    "gauss_legendre",
    "midpoint",
    "monte_carlo",
    "periodic",
    "simplices",
    "simpson",
    "trapezoid",
    "voronoi",
]

ArrayLike = Tensor | NDArray[Any] | Sequence[Any]
Device = torch.device | str | None


def trapezoid(x: ArrayLike, *, dtype: torch.dtype = torch.float64, device: Device = None) -> Tensor:
    """Composite trapezoid rule on nodes of any spacing.

    w_0 = (x_1 - x_0) / 2, w_k = (x_{k+1} - x_{k-1}) / 2, w_{n-1} = (x_{n-1} - x_{n-2}) / 2. Exact for
    polynomials of degree 1, second order for smooth integrands (CA equations 58-59).

    Args:
        x: (n,) nodes, n >= 2, strictly increasing. One node spans no interval, so it is an error.
        dtype: dtype of the weights.
        device: device of the weights; None for that of x.

    Returns:
        (n,) positive weights that sum to x_{n-1} - x_0.

    Raises:
        ValueError: x is not 1-D, has fewer than 2 nodes, is not finite or not strictly increasing.
    """
    half = torch.diff(_nodes(x, "x", 2)) / 2
    none = half.new_zeros(1)
    return (torch.cat([half, none]) + torch.cat([none, half])).to(device=device, dtype=dtype)


def simpson(x: ArrayLike, *, dtype: torch.dtype = torch.float64, device: Device = None) -> Tensor:
    """Composite Simpson rule on nodes of any spacing.

    Each pair of intervals (a, b) integrates the quadratic through its three nodes: weights
    (a+b)(2 - b/a)/6, (a+b)^3/(6ab), (a+b)(2 - a/b)/6. With an even number of nodes the last interval, which
    has no partner, integrates the quadratic through the last three nodes. Exact for polynomials of degree 2
    (degree 3 on evenly spaced pairs), fourth order for smooth integrands on even spacing. Weights are
    positive on even spacing; an interval more than twice as long as its partner makes one negative, which
    the softmax operators refuse: take :func:`trapezoid` there.

    Args:
        x: (n,) nodes, n >= 3, odd or even, strictly increasing.
        dtype: dtype of the weights.
        device: device of the weights; None for that of x.

    Returns:
        (n,) weights that sum to x_{n-1} - x_0.

    Raises:
        ValueError: x is not 1-D, has fewer than 3 nodes, is not finite or not strictly increasing.
    """
    h = torch.diff(_nodes(x, "x", 3))
    paired = h.numel() // 2 * 2
    a, b = h[0:paired:2], h[1:paired:2]
    w = h.new_zeros(h.numel() + 1)
    w[0:paired:2] += (a + b) * (2 - b / a) / 6
    w[1:paired:2] += (a + b) ** 3 / (6 * a * b)
    w[2 : paired + 1 : 2] += (a + b) * (2 - a / b) / 6
    if paired < h.numel():
        a, b = h[-2], h[-1]
        w[-3:] += (
            torch.stack([-(b**3) / (a * (a + b)), b * (b + 3 * a) / a, b * (2 * b + 3 * a) / (a + b)]) / 6
        )
    return w.to(device=device, dtype=dtype)


def midpoint(edges: ArrayLike, *, dtype: torch.dtype = torch.float64, device: Device = None) -> Tensor:
    """Midpoint rule: the widths of cells, for values at cell centres.

    w_k = e_{k+1} - e_k, to be used with x_k = (e_k + e_{k+1}) / 2. Exact for polynomials of degree 1,
    second order.

    Args:
        edges: (n + 1,) cell edges, n >= 1, strictly increasing.
        dtype: dtype of the weights.
        device: device of the weights; None for that of edges.

    Returns:
        (n,) positive weights that sum to e_n - e_0.

    Raises:
        ValueError: edges is not 1-D, has fewer than 2 entries, is not finite or not strictly increasing.
    """
    return torch.diff(_nodes(edges, "edges", 2)).to(device=device, dtype=dtype)


def periodic(
    x: ArrayLike, length: float, *, dtype: torch.dtype = torch.float64, device: Device = None
) -> Tensor:
    """Rectangle rule on a circle: half of the gap on both sides of each node, the last gap wrapping around.

    w_k = (x_{k+1} - x_{k-1}) / 2 with x_n = x_0 + length. Second order on uneven nodes; on even nodes exact
    for trigonometric polynomials up to degree n - 1, so spectrally accurate for smooth periodic integrands.

    Args:
        x: (n,) nodes, n >= 1, strictly increasing, within one period: x_{n-1} - x_0 < length. The repeated
            end point x_0 + length is left out.
        length: the period, > 0.
        dtype: dtype of the weights.
        device: device of the weights; None for that of x.

    Returns:
        (n,) positive weights that sum to length.

    Raises:
        ValueError: x is not 1-D, empty, not finite or not strictly increasing, or does not fit in one period;
            length is not finite and positive.
    """
    nodes = _nodes(x, "x", 1)
    length = _positive(length, "length")
    span = 0.0 if nodes.is_meta else float(nodes[-1].detach() - nodes[0].detach())
    if not span < length:
        raise ValueError(
            f"x must lie within one period, without its repeated end: x[-1] - x[0] < length = {length:g}, "
            f"got x[-1] - x[0] = {span:g}"
        )
    gap = torch.diff(torch.cat([nodes, nodes[:1] + length]))
    return ((gap + torch.roll(gap, 1)) / 2).to(device=device, dtype=dtype)


def monte_carlo(
    n: int, volume: float = 1.0, *, dtype: torch.dtype = torch.float64, device: Device = None
) -> Tensor:
    """Equal weights volume / n, for points drawn uniformly from a domain of that volume; error O(n^{-1/2}).

    Args:
        n: number of points, >= 1.
        volume: volume of the domain, > 0.
        dtype: dtype of the weights.
        device: device of the weights; None for the CPU.

    Returns:
        (n,) weights.

    Raises:
        TypeError: n is not an integer.
        ValueError: n < 1, or volume is not finite and positive.
    """
    n, volume = _count(n), _positive(volume, "volume")
    return torch.full((n,), volume / n, dtype=dtype, device=device)


def gauss_legendre(
    n: int,
    a: float = -1.0,
    b: float = 1.0,
    *,
    dtype: torch.dtype = torch.float64,
    device: Device = None,
) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre rule on (a, b): exact for polynomials of degree 2n - 1.

    Args:
        n: number of nodes, >= 1; the nodes are eigenvalues of an n x n matrix, O(n^3).
        a: lower end.
        b: upper end, > a.
        dtype: dtype of nodes and weights.
        device: device of nodes and weights; None for the CPU.

    Returns:
        x (n,), increasing and inside (a, b), and w (n,), positive with sum b - a.

    Raises:
        TypeError: n is not an integer.
        ValueError: n < 1, or not a < b, both finite.
    """
    a, b = _interval(a, b)
    x, w = np.polynomial.legendre.leggauss(_count(n))
    return _affine(x, w, a, b, dtype, device)


def clenshaw_curtis(
    n: int,
    a: float = -1.0,
    b: float = 1.0,
    *,
    dtype: torch.dtype = torch.float64,
    device: Device = None,
) -> tuple[Tensor, Tensor]:
    """Clenshaw-Curtis rule on [a, b]: nodes -cos(pi j / (n - 1)), exact for polynomials of degree n - 1.

    The weights integrate the Chebyshev interpolant: they are the cosine transform of the moments of cos(k t),
    2 / (1 - k^2) for even k and 0 for odd k; O(n log n). n = 2 is the trapezoid rule; n = 1 is the midpoint
    rule, as the constant interpolant has its node in the middle.

    Args:
        n: number of nodes, >= 1.
        a: lower end.
        b: upper end, > a.
        dtype: dtype of nodes and weights.
        device: device of nodes and weights; None for the CPU.

    Returns:
        x (n,), increasing, with both ends if n >= 2, and w (n,), positive with sum b - a.

    Raises:
        TypeError: n is not an integer.
        ValueError: n < 1, or not a < b, both finite.
    """
    n, (a, b) = _count(n), _interval(a, b)
    if n == 1:
        return _affine(np.zeros(1), np.full(1, 2.0), a, b, dtype, device)
    moments = np.zeros(n)
    moments[::2] = 2.0 / (1.0 - np.arange(0, n, 2) ** 2)
    w = np.fft.irfft(moments, 2 * (n - 1))[:n]
    w[1:-1] *= 2
    # The sine of a difference keeps the nodes symmetric about 0 to the last bit, which the cosine does not.
    x = np.sin(np.pi * np.arange(1 - n, n, 2) / (2 * (n - 1)))
    return _affine(x, w, a, b, dtype, device)


def simplices(
    points: ArrayLike, cells: ArrayLike, *, dtype: torch.dtype = torch.float64, device: Device = None
) -> Tensor:
    """Vertex weights of a simplicial mesh (intervals, triangles, tetrahedra).

    Each cell gives volume / (d + 1) to each of its vertices: the integral of the piecewise linear
    interpolant, so exact for functions that are linear in every cell, second order for smooth integrands.

    Args:
        points: (n, d) vertices, d = 1, 2 or 3; (n,) counts as d = 1.
        cells: (n_cells, d + 1) integers, the vertices of each cell, in either orientation. Cells without
            volume add nothing; a vertex in no cell has weight 0.
        dtype: dtype of the weights.
        device: device of the weights; None for that of points.

    Returns:
        (n,) weights >= 0 that sum to the volume of the mesh.

    Raises:
        TypeError: cells are not integers.
        ValueError: wrong shape, points not finite, or an index outside 0..n-1.
    """
    given = _points(points)
    vertices = given.cpu()  # index_add on a GPU adds in no fixed order; a mesh must be the same every time
    n, d = vertices.shape
    index = _tensor(cells, "cells").cpu()
    if index.is_floating_point():
        raise TypeError(f"cells must be integers, got {index.dtype}")
    if index.ndim != 2 or index.shape[1] != d + 1:
        raise ValueError(
            f"cells must have shape (n_cells, {d + 1}) for points in {d}-D, got {tuple(index.shape)}"
        )
    index = index.long()
    bad = index[(index < 0) | (index >= n)]
    if bad.numel():
        raise ValueError(f"cells must index points, 0 to {n - 1}, got {bad[0].item()}")
    corner = vertices[index]
    volume = torch.linalg.det(corner[:, 1:] - corner[:, :1]).abs() / math.factorial(d)
    share = (volume / (d + 1)).repeat_interleave(d + 1)
    w = vertices.new_zeros(n).index_add(0, index.flatten(), share)
    return w.to(device=given.device if device is None else device, dtype=dtype)


def voronoi(
    points: ArrayLike,
    bounds: ArrayLike | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    device: Device = None,
) -> Tensor:
    """Volumes of the Voronoi cells of scattered points, clipped to a box.

    w_k = volume of {x in the box : |x - x_k| <= |x - x_j| for all j}: every place of the box counts for its
    nearest point. Points that coincide (to 1e-9 of the longest side where d > 1) share their cell equally.
    On a tensor-product grid with its end points in the box these are the trapezoid weights. First order in
    general, as the points are not the centroids of their cells.

    d = 1 needs only numpy; d = 2 and 3 use scipy.spatial.Voronoi. The cells at the sides of the box are
    bounded by the mirror images of their points, and volumes are sums of pyramids over the facets, without
    a loop over points. Nearly all time is Qhull's: about 8 s for 10^5 points in 2-D, 7 s for 2 * 10^4
    points in 3-D on one busy core. Not differentiable.

    Args:
        points: (n, d) points, n >= 1, d = 1, 2 or 3, inside bounds or on them (up to rounding in the dtype
            of points); (n,) counts as d = 1.
        bounds: (lo, hi) for each axis of the box; None for the bounding box of points.
        dtype: dtype of the weights.
        device: device of the weights; None for that of points.

    Returns:
        (n,) weights >= 0 that sum to the volume of the box to a relative 1e-8.

    Raises:
        ValueError: wrong shape, no points, points not finite or outside bounds, or a box without volume.
        ImportError: d > 1 and scipy is missing (``pip install "continuum_ops[train]"``).
        ArithmeticError: the cells found do not fill the box to a relative 1e-8.
    """
    original = _tensor(points, "points")
    given = _points(original)
    p = given.detach().cpu().numpy()
    if not len(p):
        raise ValueError("points must hold at least 1 point, got 0")
    box = _box(p, bounds)
    eps = torch.finfo(original.dtype if original.is_floating_point() else torch.float64).eps
    slack = 4 * eps * np.abs(box).max(axis=1)
    outside = np.flatnonzero(((p < box[:, 0] - slack) | (p > box[:, 1] + slack)).any(axis=1))
    if outside.size:
        first = outside[0]
        raise ValueError(
            f"points must lie inside bounds {box.tolist()}, got {p[first].tolist()} at index {first}"
        )
    w = torch.from_numpy(cell_volumes(p, box))
    return w.to(device=given.device if device is None else device, dtype=dtype)


def _box(p: NDArray[np.float64], bounds: ArrayLike | None) -> NDArray[np.float64]:
    d = p.shape[1]
    if bounds is None:
        box = np.stack([p.min(axis=0), p.max(axis=0)], axis=1)
        if not (box[:, 0] < box[:, 1]).all():
            raise ValueError(
                f"bounds must be given where points span no volume, got bounding box {box.tolist()}"
            )
        return box
    box = np.asarray(bounds.detach().cpu() if isinstance(bounds, Tensor) else bounds, dtype=np.float64)
    if d == 1 and box.shape == (2,):
        box = box[None]
    if box.shape != (d, 2):
        raise ValueError(f"bounds must be (lo, hi) for each of {d} axes, got shape {box.shape}")
    if not (np.isfinite(box).all() and (box[:, 0] < box[:, 1]).all()):
        raise ValueError(f"bounds must be finite with lo < hi on every axis, got {box.tolist()}")
    return box


def _tensor(x: ArrayLike, name: str) -> Tensor:
    """x as a real tensor; sequences by way of numpy, which keeps Python floats in float64."""
    t = x if isinstance(x, Tensor) else torch.from_numpy(np.array(x))
    if t.is_complex() or t.dtype == torch.bool:
        raise TypeError(f"{name} must be real numbers, got {t.dtype}")
    return t


def _float64(x: ArrayLike, name: str) -> Tensor:
    return _tensor(x, name).to(torch.float64)


def _nodes(x: ArrayLike, name: str, least: int) -> Tensor:
    """x as a float64 tensor of at least ``least`` strictly increasing nodes."""
    t = _float64(x, name)
    if t.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got shape {tuple(t.shape)}")
    if t.numel() < least:
        raise ValueError(f"{name} must have at least {least} entries, got {t.numel()}")
    values = t.detach()
    if values.is_meta:
        return t
    _require_finite(values, name)
    flat = torch.nonzero(torch.diff(values) <= 0)
    if flat.numel():
        k = int(flat[0])
        raise ValueError(
            f"{name} must be strictly increasing, got {name}[{k}] = {values[k].item():g} "
            f"before {name}[{k + 1}] = {values[k + 1].item():g}"
        )
    return t


def _points(points: ArrayLike) -> Tensor:
    t = _float64(points, "points")
    if t.ndim == 1:
        t = t[:, None]
    if t.ndim != 2 or not 1 <= t.shape[1] <= 3:
        raise ValueError(f"points must have shape (n,) or (n, d) with d = 1, 2 or 3, got {tuple(t.shape)}")
    _require_finite(t.detach(), "points")
    return t


def _require_finite(values: Tensor, name: str) -> None:
    bad = torch.nonzero(~torch.isfinite(values))
    if bad.numel():
        at = tuple(bad[0].tolist())
        raise ValueError(
            f"{name} must be finite, got {values[at].item()} at index {at[0] if len(at) == 1 else at}"
        )


def _count(n: int) -> int:
    n = operator.index(n)
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    return n


def _positive(value: float, name: str) -> float:
    value = float(value)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and positive, got {value}")
    return value


def _interval(a: float, b: float) -> tuple[float, float]:
    a, b = float(a), float(b)
    if not (math.isfinite(a) and math.isfinite(b) and a < b):
        raise ValueError(f"a and b must be finite with a < b, got a = {a}, b = {b}")
    return a, b


def _affine(
    x: NDArray[np.float64], w: NDArray[np.float64], a: float, b: float, dtype: torch.dtype, device: Device
) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [-1, 1] moved to [a, b], -1 to a and 1 to b without rounding."""
    nodes = (1 - x) / 2 * a + (1 + x) / 2 * b
    return (
        torch.from_numpy(nodes).to(device=device, dtype=dtype),
        torch.from_numpy((b - a) / 2 * w).to(device=device, dtype=dtype),
    )
