"""Latent meshes: coarse meshes that carry the measure of a fine one (PiT section 2.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..mesh import Grid, Mesh, PointCloud, as_mesh


def pool_mesh(
    mesh: Mesh | Tensor, latent_shape: Sequence[int], *, shape: Sequence[int] | None = None
) -> Mesh:
    """A structured mesh with another number of points along each axis.

    A Grid is pooled along its axes: the range of the index is cut into latent_shape[i] equal parts, a point
    is the coordinate at the middle of its part (linear between the nodes) and its weight the length of the
    part, so graded axes stay graded. Evenly spaced axes on [lo, hi] give the cell centres of [lo, hi],
    whatever their number of points: the latent mesh of a model does not change with the resolution. A
    periodic axis starts at its first node and stays periodic. An axis that has that many points already is
    kept with its weights.

    Points on a curvilinear structured mesh (``shape`` given) are averaged over blocks, as
    ``torch.nn.functional.adaptive_avg_pool2d`` does with an image, and so are the weights, which are then
    scaled to keep their sum.

    Args:
        mesh: a Grid; or with ``shape`` any mesh or tensor of points (N, d) or (B, N, d), N = prod(shape), in
            row-major order.
        latent_shape: points along each axis.
        shape: points along each axis of a mesh that is no Grid, 1 to 3 axes.

    Returns:
        A Grid, or with ``shape`` a PointCloud.

    Raises:
        ValueError: a shape that does not fit.
        TypeError: a mesh that is no Grid, without ``shape``.
    """
    latent = tuple(latent_shape)
    if shape is None:
        if not isinstance(mesh, Grid):
            raise TypeError(f"mesh must be a Grid where shape is None, was {type(mesh).__name__}")
        _check_latent_shape(latent, len(mesh.shape))
        return _pool_grid(mesh, latent)
    fine = as_mesh(mesh)
    full = tuple(shape)
    if not 1 <= len(full) <= 3 or math.prod(full) != len(fine):
        raise ValueError(
            f"shape must be 1 to 3 sizes with product {len(fine)}, the number of points, was {full}"
        )
    _check_latent_shape(latent, len(full))
    pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(full) - 1]

    def pooled(samples: Tensor) -> Tensor:  # (..., N, C) -> (..., n, C)
        channels = samples.transpose(-1, -2)
        batch = channels.reshape(-1, *channels.shape[-2:]).unflatten(-1, full)
        return pool(batch, list(latent)).flatten(2).reshape(*channels.shape[:-1], -1).transpose(-1, -2)

    w = pooled(fine.weights.unsqueeze(-1)).squeeze(-1)
    total, kept = fine.weights.sum(-1, keepdim=True), w.sum(-1, keepdim=True)
    return PointCloud(pooled(fine.points), torch.where(kept > 0, w * (total / kept), w))


def sample_mesh(mesh: Mesh | Tensor, n: int, *, generator: torch.Generator | None = None) -> PointCloud:
    """n points of a mesh, drawn without repetition; each carries the weights of the points nearest to it.

    Args:
        mesh: any mesh, or points (N, d) or (B, N, d); with one mesh per sample each is drawn on its own.
        n: number of points, 1 <= n <= N.
        generator: of the drawing, on the CPU; None: torch's.

    Raises:
        ValueError: n out of range.
    """
    fine = as_mesh(mesh)
    _check_number(n, len(fine))
    points = fine.points
    order = torch.rand(points.shape[:-1], generator=generator).argsort(-1)[..., :n].to(points.device)
    return _coarsen(fine, order, None)


def farthest_point_mesh(mesh: Mesh | Tensor, n: int, *, period: Sequence[float] | None = None) -> PointCloud:
    """n points of a mesh by farthest-point sampling, which keeps the extent of the mesh and spreads evenly.

    Starts with the point nearest to the mean of the points; each next one is the point farthest from all
    before, the first of several. It costs O(n N) time. A point carries the weights of the points of the mesh
    that are nearest to it.

    Args:
        mesh: any mesh, or points (N, d) or (B, N, d), with one mesh per sample.
        n: number of points, 1 <= n <= N.
        period: length of the domain along each axis, inf where it is not periodic; None: not periodic.

    Raises:
        ValueError: n out of range.
    """
    fine = as_mesh(mesh)
    _check_number(n, len(fine))
    points = fine.points.detach()
    batch = points if points.ndim == 3 else points[None]
    index = _nearest(batch.mean(1, keepdim=True), batch, period).squeeze(1)
    chosen = [index]
    distance = batch.new_full(batch.shape[:2], math.inf)
    for _ in range(n - 1):
        at = batch.take_along_dim(index[:, None, None], 1)
        distance = torch.minimum(distance, _squared_distance(batch, at, period))
        index = distance.argmax(1)
        chosen.append(index)
    order = torch.stack(chosen, dim=1)
    return _coarsen(fine, order if points.ndim == 3 else order[0], period)


def _pool_grid(grid: Grid, latent: tuple[int, ...]) -> Grid:
    axes, weights = [], []
    for x, w, kind, period, n in zip(
        grid.axes, grid.axis_weights, grid.kind, grid.period, latent, strict=True
    ):
        if n == len(x):
            axes.append(x)
            weights.append(w)
            continue
        nodes = x.double()
        index = torch.arange(len(x), dtype=torch.float64, device=x.device)
        start, stop = 0.0, len(x) - 1.0
        if kind == "cell":
            # Half a cell beyond the outer centres, whose widths are their weights.
            start, stop = -0.5, len(x) - 0.5
            ends = (w[:1].double() / 2, w[-1:].double() / 2)
            nodes = torch.cat([nodes[:1] - ends[0], nodes, nodes[-1:] + ends[1]])
            index = torch.cat([index.new_tensor([start]), index, index.new_tensor([stop])])
        elif kind == "periodic":
            stop = float(len(x))
            nodes = torch.cat([nodes, nodes[:1] + period])
            index = torch.cat([index, index.new_tensor([stop])])
        edges = torch.linspace(start, stop, n + 1, dtype=torch.float64, device=x.device)
        if kind == "periodic":
            middle = _interpolate(edges[:-1], index, nodes)
            gap = torch.diff(torch.cat([middle, middle[:1] + period]))
            length = (gap + gap.roll(1)) / 2
        else:
            middle = _interpolate((edges[1:] + edges[:-1]) / 2, index, nodes)
            length = torch.diff(_interpolate(edges, index, nodes))
        axes.append(middle.to(x.dtype))
        weights.append(length.to(w.dtype))
    kinds = [
        kind if kind == "periodic" or n == len(x) else "cell"
        for x, kind, n in zip(grid.axes, grid.kind, latent, strict=True)
    ]
    return Grid(*axes, kind=kinds, weights=weights, period=grid.period)


def _interpolate(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Piecewise linear through (x_i, y_i), x increasing, at points within its range."""
    right = torch.searchsorted(x, at).clamp(1, len(x) - 1)
    fraction = (at - x[right - 1]) / (x[right] - x[right - 1])
    return torch.lerp(y[right - 1], y[right], fraction)


def _coarsen(fine: Mesh, order: Tensor, period: Sequence[float] | None) -> PointCloud:
    """The points `order` ((n,) or (B, n)) of a mesh, with the weights of what is nearest to each."""
    points = fine.points
    chosen = points.take_along_dim(order.unsqueeze(-1), -2)
    batch, few = (t.detach() if t.ndim == 3 else t.detach()[None] for t in (points, chosen))
    nearest = _nearest(batch, few, period)
    w = fine.weights.expand(nearest.shape)
    total = w.new_zeros(few.shape[:2]).scatter_add(1, nearest, w)
    return PointCloud(chosen, total if points.ndim == 3 else total[0])


def _nearest(queries: Tensor, points: Tensor, period: Sequence[float] | None) -> Tensor:
    """Index (B, Q) of the point (B, N, d) nearest to each query (B, Q, d), in bounded memory."""
    rows = max(1, 4_000_000 // points.shape[1])
    parts = [
        _squared_distance(points[:, None], part[:, :, None], period).argmin(-1)
        for part in queries.split(rows, dim=1)
    ]
    return torch.cat(parts, dim=1)


def _squared_distance(x: Tensor, y: Tensor, period: Sequence[float] | None) -> Tensor:
    difference = x - y
    if period is not None:
        length = difference.new_tensor([float(p) for p in period])
        finite = torch.where(length.isinf(), 1.0, length)
        images = torch.where(length.isinf(), 0.0, (difference / finite).round())
        difference = difference - images * finite
    return difference.square().sum(-1)


def _check_latent_shape(latent: tuple[int, ...], axes: int) -> None:
    if len(latent) != axes or not all(isinstance(n, int) and n >= 1 for n in latent):
        raise ValueError(f"latent_shape must be {axes} sizes of at least 1, was {latent}")


def _check_number(n: int, points: int) -> None:
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"n must be an int, was {type(n).__name__}")
    if not 1 <= n <= points:
        raise ValueError(f"n must be between 1 and the number of points, {points}, was {n}")
