"""Volumes of Voronoi cells clipped to a box; the geometry behind ``quadrature.voronoi``."""

from __future__ import annotations

from itertools import chain
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Points closer than this part of the longest side of the box coincide; below it Qhull loses cells.
_MERGE = 1e-9


def cell_volumes(points: Floats, box: Floats) -> Floats:
    """Volumes (n,) of the cells of points (n, d), d = 1, 2 or 3, in the box (d, 2).

    Points lie in the box up to rounding; points that coincide share their cell equally.

    Raises:
        ImportError: d > 1 and scipy is missing.
        ArithmeticError: the cells do not fill the box to a relative 1e-8.
    """
    # One scale for all axes keeps the cells and takes large offsets out of the arithmetic.
    scale = float((box[:, 1] - box[:, 0]).max())
    side = (box[:, 1] - box[:, 0]) / scale
    p, owner = np.unique(np.clip((points - box[:, 0]) / scale, 0.0, side), axis=0, return_inverse=True)
    owner = owner.reshape(-1)
    if len(side) == 1:
        cell = np.diff(np.concatenate([[0.0], (p[1:, 0] + p[:-1, 0]) / 2, side]))
    else:
        scipy = _scipy()
        p = np.where(p <= _MERGE, 0.0, np.where(side - p <= _MERGE, side, p))
        near = scipy.spatial.cKDTree(p).query_pairs(_MERGE, output_type="ndarray")
        if len(near):
            link = scipy.sparse.coo_array((np.ones(len(near)), near.T), shape=(len(p), len(p)))
            group = scipy.sparse.csgraph.connected_components(link, directed=False)[1]
            p, owner = p[np.unique(group, return_index=True)[1]], group[owner]
        cell = _clipped_cells(p, side, scipy.spatial)
    error = abs(cell.sum() / side.prod() - 1)
    if not error <= 1e-8:
        raise ArithmeticError(f"Voronoi cells must fill the box to a relative 1e-8, got {error:.1e}")
    return (cell / np.bincount(owner))[owner] * scale ** len(side)


def _clipped_cells(p: Floats, side: Floats, spatial: ModuleType) -> Floats:
    """Volumes of the cells of distinct points p (n, d), clipped to the box [0, side] with max(side) = 1."""
    n, d = p.shape
    # Points too far out to be nearest to any place of the box. They bound every cell and keep the outermost
    # points from lying in one plane, where Qhull drops cells.
    uneven = np.linspace(0.01, 0.02, 2 * d * d).reshape(2 * d, d)
    far = side / 2 + 2.5 * np.concatenate([np.eye(d), -np.eye(d)]) + uneven
    reach = _reached_sides(spatial.Voronoi(np.concatenate([p, far])), n, side)

    # A mirror image ends the cell of its own point at the side and takes nothing of the box from any other
    # point. A point on the side is its own image: a stand-in one spacing outside keeps its cell short, and
    # the part of the cell that sticks out is cut off below.
    owner, s = np.nonzero(reach)
    axis, upper = s % d, s >= d
    at, outward = np.where(upper, side[axis], 0.0), np.where(upper, 1.0, -1.0)
    image, rows = p[owner], np.arange(len(owner))
    on_side = image[rows, axis] == at
    image[rows, axis] = np.where(on_side, at + outward * n ** (-1 / d), 2 * at - image[rows, axis])
    vor = spatial.Voronoi(np.concatenate([p, image, far]))
    owner = np.concatenate([np.arange(n), owner, np.full(2 * d, -1)])
    on_side = np.concatenate([np.zeros(n, dtype=bool), on_side, np.zeros(2 * d, dtype=bool)])

    # Facets between two points, or between a point and its own image at a side that the point is not on.
    a, b = np.sort(vor.ridge_points, axis=1).T
    used = (b < n) | ((a < n) & (owner[a] == owner[b]) & ~on_side[b])
    a, b = a[used], b[used]
    size, vertex = _flatten([vor.ridge_vertices[i] for i in np.flatnonzero(used)])
    # Only cells of points on a side stick out of it. They are symmetric about it, so facets cross it at a
    # right angle or at one of their vertices, and moving what is outside onto the side cuts it off exactly.
    area = _facet_areas(np.clip(vor.vertices, 0.0, side)[vertex], size)
    pyramid = area * np.linalg.norm(vor.points[a] - vor.points[b], axis=1) / (2 * d)
    both = b < n
    volume = np.zeros(n)
    np.add.at(volume, a, pyramid)
    np.add.at(volume, b[both], pyramid[both])
    return volume


def _reached_sides(vor: Any, n: int, side: Floats) -> NDArray[np.bool_]:
    """(n, 2d): whether the unclipped cell of a point reaches the lower (first d) and upper (last d) sides."""
    size, vertex = _flatten(vor.ridge_vertices)
    beyond = np.concatenate([vor.vertices <= _MERGE, vor.vertices >= side - _MERGE], axis=1)
    beyond = np.concatenate([beyond, np.ones_like(beyond[:1])])  # vertex -1 is at infinity
    facet = np.logical_or.reduceat(beyond[vertex], np.cumsum(size) - size, axis=0)
    reach = np.zeros((len(vor.points), 2 * len(side)), dtype=bool)
    for end in vor.ridge_points.T:
        np.logical_or.at(reach, end, facet)
    return reach[:n]


def _flatten(facets: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    size = np.fromiter(map(len, facets), np.int64, len(facets))
    return size, np.fromiter(chain.from_iterable(facets), np.int64, int(size.sum()))


def _facet_areas(corner: Floats, size: NDArray[np.int64]) -> Floats:
    """Lengths of segments (2-D) or areas of polygons (3-D), of size[i] corners each, in order."""
    if corner.shape[1] == 2:
        ends = corner.reshape(-1, 2, 2)
        return np.linalg.norm(ends[:, 1] - ends[:, 0], axis=1)
    first = np.cumsum(size) - size
    following = np.arange(1, len(corner) + 1)
    following[first + size - 1] = first
    origin = np.repeat(corner[first], size, axis=0)
    fan = np.cross(corner - origin, corner[following] - origin)
    return np.linalg.norm(np.add.reduceat(fan, first, axis=0), axis=1) / 2


def _scipy() -> ModuleType:
    try:
        import scipy
        import scipy.sparse.csgraph
        import scipy.spatial
    except ImportError as error:
        raise ImportError(
            'voronoi in 2-D and 3-D needs scipy: pip install "continuum_ops[train]"', name="scipy"
        ) from error
    return scipy
