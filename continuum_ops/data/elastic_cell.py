"""A stretched elastic cell with a random hole on unstructured meshes: a stand-in for the data of PiT A.5."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..quadrature import simplices
from .functions import ScatteredPairs, sample_generator, with_progress
from .trajectories import check_dtype, check_int, check_positive, check_real

# The hole is r(t) = 0.2 + 0.2 / (1 + exp(g(t))), g Gaussian with covariance 12^2 (-d^2/dt^2 + 9)^-2, cut to
# these modes: the shortest wave of the boundary is a few mesh widths.
MODES = 8
SMOOTHINGS = 40
ATTEMPTS = 10


def elastic_cell(
    n: int,
    points: int = 972,
    *,
    seed: int,
    start: int = 0,
    poisson: float = 0.3,
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> ScatteredPairs:
    """n unit cells of a linearly elastic material with a random hole, stretched, each on its own mesh.

    This is a stand-in for the hyper-elastic cells of PiT section A.5: another material law, other holes and
    other meshes, made to have irregular geometry. Its errors are not comparable with published ones. The
    operator to learn maps the points to displacement and stress.

    ::

        div sigma = 0 in [0, 1]^2 without the hole,
        sigma = lambda tr(eps) I + 2 mu eps,   eps = (grad d + grad d^T) / 2,
        d = 0 at y = 0,   sigma n = (0, 1) at y = 1,   sigma n = 0 on the other sides and on the hole,

    plane strain, Young's modulus 1 (so displacements and stresses are in units of the traction). The hole is
    at the centre, r(t) = 0.2 + 0.2 / (1 + exp(g(t))) at the angle t, g a periodic Gaussian of covariance
    12^2 (-d^2/dt^2 + 9)^-2 of which the modes 0 to 8 are taken.

    Each mesh has exactly `points` vertices, evenly spaced on the sides and the hole and random inside:
    a Delaunay triangulation (scipy) smoothed by moving inner points to the middle of their triangles. The
    equations are solved with quadratic elements on it (:func:`plane_strain`), and the vertices are kept. The
    weights are areas, a third of each triangle at each of its vertices.

    Sample i of a seed depends on seed, start + i, points and poisson alone, so ``start`` continues a data
    set. The same arguments give the same bytes on one machine.

    Args:
        n: number of samples, >= 1.
        points: N of each sample, >= 150; the published set has 972.
        seed: >= 0; use different seeds for training and test data.
        start: number of the first sample, >= 0.
        poisson: Poisson's ratio, in [0, 0.45].
        dtype: torch.float32 or torch.float64, of everything that is returned.
        progress: show a progress bar (tqdm) on stderr.

    Returns:
        ScatteredPairs: mesh of points (n, N, 2) with weights (n, N); target (n, N, 3) with the displacement
        d_x, d_y and the von Mises stress; on the CPU.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument out of range.
        ImportError: without scipy or scikit-fem, or with progress=True without tqdm.
        RuntimeError: no valid mesh was found.
    """
    n = check_int("n", n, minimum=1)
    points = check_int("points", points, minimum=150)
    seed = check_int("seed", seed, minimum=0)
    start = check_int("start", start, minimum=0)
    poisson = check_real("poisson", poisson)
    if not 0 <= poisson <= 0.45:
        raise ValueError(f"poisson must lie in [0, 0.45], got {poisson}")
    dtype = check_dtype(dtype)

    places, weights, target = np.empty((n, points, 2)), np.empty((n, points)), np.empty((n, points, 3))
    for row in with_progress(range(n), progress, "elastic_cell"):
        places[row], cells = perforated_square(sample_generator(seed, start + row), points)
        weights[row] = simplices(places[row], cells).numpy()
        displacement, stress = plane_strain(places[row], cells, traction=_pull, poisson=poisson)
        target[row] = np.concatenate([displacement, stress[:, None]], 1)
    return ScatteredPairs.of(places, weights, target, dtype)


def hole_radii(
    n: int, count: int = 42, *, seed: int, start: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The holes of :func:`elastic_cell` with the same seed: radii r(t) at t = 2 pi j / count, (n, count).

    Args:
        n: number of samples, >= 1.
        count: radii of each, >= 1; the published set has 42.
        seed, start, dtype: as of :func:`elastic_cell`.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument out of range.
    """
    n, count = check_int("n", n, minimum=1), check_int("count", count, minimum=1)
    seed, start = check_int("seed", seed, minimum=0), check_int("start", start, minimum=0)
    angles = 2 * np.pi * np.arange(count) / count
    # A mesh takes its hole first from the generator of its sample.
    radii = np.stack([_radius(sample_generator(seed, start + row), angles) for row in range(n)])
    return torch.from_numpy(radii).to(check_dtype(dtype))


def _pull(x: np.ndarray, normal: np.ndarray) -> np.ndarray:
    return np.stack([0 * x[0], 1.0 * (x[1] > 1 - 1e-9)])


def plane_strain(
    points: np.ndarray,
    cells: np.ndarray,
    *,
    traction: Callable[[np.ndarray, np.ndarray], np.ndarray],
    body: Callable[[np.ndarray], np.ndarray] | None = None,
    displacement: Callable[[np.ndarray], np.ndarray] | None = None,
    young: float = 1.0,
    poisson: float = 0.3,
) -> tuple[np.ndarray, np.ndarray]:
    """Displacement and von Mises stress of plane-strain elasticity, by quadratic triangles (scikit-fem).

    -div sigma = body; the displacement is given on y = 0 and the traction sigma n elsewhere on the boundary.

    Args:
        points: (N, 2) vertices of the mesh.
        cells: (T, 3), its triangles.
        traction: of coordinates and outer normals, both (2, ...), at the points of the boundary beyond y = 0.
        body: force of coordinates (2, ...), None for 0.
        displacement: of coordinates (2, M) at y = 0, None for 0.
        young, poisson: of the material.

    Returns:
        (N, 2) displacements at the vertices, of third order in the mesh width for a smooth solution, and (N,)
        von Mises stresses there, the L2 projection on linear elements.

    Raises:
        ImportError: without scikit-fem.
    """
    try:
        from skfem import (
            Basis,
            ElementTriP1,
            ElementTriP2,
            ElementVector,
            FacetBasis,
            LinearForm,
            MeshTri,
            condense,
            solve,
        )
        from skfem.models.elasticity import lame_parameters, linear_elasticity
    except ImportError as error:
        raise ImportError('elastic_cell needs scikit-fem: pip install "continuum_ops[fem]"') from error
    first, second = lame_parameters(check_positive("young", young), poisson)
    mesh = MeshTri(np.ascontiguousarray(points.T), np.ascontiguousarray(cells.T))
    basis = Basis(mesh, ElementVector(ElementTriP2()), intorder=5)
    stiffness = linear_elasticity(first, second).assemble(basis)

    clamped = mesh.facets_satisfying(lambda x: x[1] < 1e-9, boundaries_only=True)
    free = np.setdiff1d(mesh.boundary_facets(), clamped)
    edge = FacetBasis(mesh, basis.elem, facets=free, intorder=5)

    def work(v: Any, w: Any) -> Any:
        force = traction(w.x, w.n)
        return force[0] * v[0] + force[1] * v[1]

    load = LinearForm(work).assemble(edge)
    if body is not None:

        def push(v: Any, w: Any) -> Any:
            force = body(w.x)
            return force[0] * v[0] + force[1] * v[1]

        load = load + LinearForm(push).assemble(basis)
    held = basis.get_dofs(clamped).all()
    given = basis.zeros()
    if displacement is not None:
        # All degrees of freedom of the element are values at points: even ones of x, odd ones of y.
        at = displacement(basis.doflocs[:, held])
        component = np.isin(held, np.concatenate([basis.nodal_dofs[1], basis.facet_dofs[1]])).astype(int)
        given[held] = at[component, np.arange(len(held))]
    found = solve(*condense(stiffness, load, x=given, D=held))

    strain = basis.interpolate(found).grad
    xx, yy, xy = strain[0, 0], strain[1, 1], (strain[0, 1] + strain[1, 0]) / 2
    trace = first * (xx + yy)
    sx, sy, sz, shear = trace + 2 * second * xx, trace + 2 * second * yy, trace, 2 * second * xy
    mises = np.sqrt(((sx - sy) ** 2 + (sy - sz) ** 2 + (sz - sx) ** 2) / 2 + 3 * shear**2)
    stress = basis.with_element(ElementTriP1()).project(mises)
    return found[basis.nodal_dofs].T, stress


def perforated_square(generator: np.random.Generator, points: int) -> tuple[np.ndarray, np.ndarray]:
    """A random mesh of the unit square without a random hole: (points, 2) vertices, (T, 3) triangles.

    Vertices on the sides come first, those on the hole next.
    """
    hole = _hole(generator)
    length = np.linalg.norm(np.diff(hole, axis=0, append=hole[:1]), axis=1)
    along = np.concatenate([[0.0], np.cumsum(length)])
    area = 1 - _polygon(hole)
    width = math.sqrt(2 * area / (math.sqrt(3) * points))  # side of equal triangles of that area
    side, around = round(1 / width), round(along[-1] / width)
    at = np.arange(around) / around * along[-1]
    closed = np.concatenate([hole, hole[:1]])
    rim = np.stack([np.interp(at, along, closed[:, axis]) for axis in (0, 1)], 1)
    t, zero, one = np.arange(side) / side, np.zeros(side), np.ones(side)
    square = np.concatenate(
        [np.stack(pair, 1) for pair in ((t, zero), (one, t), (1 - t, one), (zero, 1 - t))]
    )
    fixed = np.concatenate([square, rim])
    domain = 1 - _polygon(rim)
    for _ in range(ATTEMPTS):
        inner = _scatter(generator, rim, points - len(fixed), width / 2)
        vertices, cells = _smooth(fixed, inner, rim)
        # As large as the domain: no edge of the hole is missing, no triangle reaches into it.
        if abs(_areas(vertices[cells]).sum() - domain) < 1e-9 and len(np.unique(cells)) == points:
            return vertices, cells
    raise RuntimeError(f"no valid mesh with {points} points was found in {ATTEMPTS} attempts")


def _hole(generator: np.random.Generator) -> np.ndarray:
    t = 2 * np.pi * np.arange(2048) / 2048
    return 0.5 + _radius(generator, t)[:, None] * np.stack([np.cos(t), np.sin(t)], 1)


def _radius(generator: np.random.Generator, t: np.ndarray) -> np.ndarray:
    k = np.arange(MODES + 1)
    deviation = 12 / (k**2 + 9) * np.sqrt(np.where(k == 0, 1, 2) / (2 * np.pi))
    cosine, sine = deviation * generator.standard_normal((2, MODES + 1))
    g = np.cos(np.outer(t, k)) @ cosine + np.sin(np.outer(t, k)) @ sine
    return 0.2 + 0.2 / (1 + np.exp(g))


def _polygon(x: np.ndarray) -> float:
    """Area of a polygon (M, 2)."""
    y = np.roll(x, -1, 0)
    return float(abs((x[:, 0] * y[:, 1] - x[:, 1] * y[:, 0]).sum()) / 2)


def _areas(corners: np.ndarray) -> np.ndarray:
    a, b = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    return np.abs(a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]) / 2


def _outside(rim: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Whether points (M, 2) are outside the hole, whose rim goes once around the centre of the square."""
    around = rim - 0.5
    order = np.argsort(np.arctan2(around[:, 1], around[:, 0]))
    turn = np.arctan2(around[order, 1], around[order, 0])
    after = np.searchsorted(turn, np.arctan2(x[:, 1] - 0.5, x[:, 0] - 0.5)) % len(rim)
    a, b = rim[order][after - 1], rim[order][after]
    return (b[:, 0] - a[:, 0]) * (x[:, 1] - a[:, 1]) - (b[:, 1] - a[:, 1]) * (x[:, 0] - a[:, 0]) < 0


def _scatter(generator: np.random.Generator, rim: np.ndarray, number: int, margin: float) -> np.ndarray:
    """Uniform random points of the square outside the hole, a margin away from the sides."""
    kept = np.empty((0, 2))
    while len(kept) < number:
        x = margin + (1 - 2 * margin) * generator.random((2 * number, 2))
        kept = np.concatenate([kept, x[_outside(rim, x)]])
    return kept[:number]


def _smooth(fixed: np.ndarray, inner: np.ndarray, rim: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Delaunay triangulations whose inner points move to the centre of mass of their triangles."""
    try:
        from scipy.spatial import Delaunay
    except ImportError as error:
        raise ImportError('elastic_cell needs scipy: pip install "continuum_ops[train]"') from error
    vertices = np.concatenate([fixed, inner])
    for step in range(SMOOTHINGS + 1):
        cells = Delaunay(vertices).simplices
        corners = vertices[cells]
        middle, area = corners.mean(1), _areas(corners)
        keep = _outside(rim, middle) & (area > 1e-12)
        cells, middle, area = cells[keep], middle[keep], area[keep]
        if step == SMOOTHINGS:
            break
        mass = np.bincount(cells.ravel(), np.repeat(area, 3), len(vertices))
        moved = np.stack(
            [
                np.bincount(cells.ravel(), np.repeat(area * middle[:, axis], 3), len(vertices))
                for axis in (0, 1)
            ],
            1,
        )
        target = moved[len(fixed) :] / np.maximum(mass[len(fixed) :, None], 1e-300)
        valid = _outside(rim, target) & (mass[len(fixed) :] > 0)
        vertices[len(fixed) :][valid] = target[valid]
    return vertices, cells
