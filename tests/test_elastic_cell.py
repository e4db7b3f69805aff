"""The elastic cell: a manufactured solution with its order, Lame's cylinder, forces in balance, meshes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

pytest.importorskip("skfem", reason="the extra fem")

from continuum_ops.data.elastic_cell import _hole, elastic_cell, perforated_square, plane_strain

POISSON = 0.3
LAME, SHEAR = POISSON / ((1 + POISSON) * (1 - 2 * POISSON)), 1 / (2 * (1 + POISSON))


def exact(x: np.ndarray) -> np.ndarray:
    """A displacement: d = (sin 2x cos y, x y^2 + cos 3x)."""
    return np.stack([np.sin(2 * x[0]) * np.cos(x[1]), x[0] * x[1] ** 2 + np.cos(3 * x[0])])


def stress(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Its sigma_xx, sigma_yy, sigma_xy, by hand."""
    xx, yy = 2 * np.cos(2 * x[0]) * np.cos(x[1]), 2 * x[0] * x[1]
    xy = (-np.sin(2 * x[0]) * np.sin(x[1]) + x[1] ** 2 - 3 * np.sin(3 * x[0])) / 2
    return LAME * (xx + yy) + 2 * SHEAR * xx, LAME * (xx + yy) + 2 * SHEAR * yy, 2 * SHEAR * xy


def body(x: np.ndarray) -> np.ndarray:
    """-div sigma = -(lambda + mu) grad div d - mu Laplace d, by hand."""
    trace_x = -4 * np.sin(2 * x[0]) * np.cos(x[1]) + 2 * x[1]
    trace_y = -2 * np.cos(2 * x[0]) * np.sin(x[1]) + 2 * x[0]
    laplace_x = -5 * np.sin(2 * x[0]) * np.cos(x[1])
    laplace_y = 2 * x[0] - 9 * np.cos(3 * x[0])
    return np.stack(
        [-(LAME + SHEAR) * trace_x - SHEAR * laplace_x, -(LAME + SHEAR) * trace_y - SHEAR * laplace_y]
    )


def traction(x: np.ndarray, n: np.ndarray) -> np.ndarray:
    xx, yy, xy = stress(x)
    return np.stack([xx * n[0] + xy * n[1], xy * n[0] + yy * n[1]])


def test_a_manufactured_solution_at_third_order() -> None:
    """On one mesh and its uniform refinements, so that the domain stays the same."""
    from skfem import MeshTri

    points, cells = perforated_square(np.random.default_rng(0), 160)
    errors, stress_errors = [], []
    for level in range(3):
        mesh = MeshTri(points.T.copy(), cells.T.copy()).refined(level)
        x = mesh.p.T
        found, mises = plane_strain(
            x, mesh.t.T, traction=traction, body=body, displacement=exact, poisson=POISSON
        )
        errors.append(np.sqrt(((found.T - exact(x.T)) ** 2).mean()))
        xx, yy, xy = stress(x.T)
        zz = POISSON * (xx + yy)
        true = np.sqrt(((xx - yy) ** 2 + (yy - zz) ** 2 + (zz - xx) ** 2) / 2 + 3 * xy**2)
        stress_errors.append(np.sqrt(((mises - true) ** 2).mean()))
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    assert (orders > 2.8).all() and errors[-1] < 1e-5, errors
    assert (np.log2(np.array(stress_errors[:-1]) / stress_errors[1:]) > 1.4).all(), stress_errors


def test_a_linear_displacement_is_exact() -> None:
    points, cells = perforated_square(np.random.default_rng(1), 160)
    slope = np.array([[0.3, -0.2], [0.1, 0.4]])
    eps = (slope + slope.T) / 2
    sigma = LAME * np.trace(eps) * np.eye(2) + 2 * SHEAR * eps
    found, mises = plane_strain(
        points,
        cells,
        traction=lambda x, n: np.einsum("ij,j...->i...", sigma, n),
        displacement=lambda x: slope @ x,
        poisson=POISSON,
    )
    np.testing.assert_allclose(found, points @ slope.T, rtol=0, atol=1e-11)
    zz = POISSON * np.trace(sigma)
    true = np.sqrt(
        ((sigma[0, 0] - sigma[1, 1]) ** 2 + (sigma[1, 1] - zz) ** 2 + (zz - sigma[0, 0]) ** 2) / 2
        + 3 * sigma[0, 1] ** 2
    )
    np.testing.assert_allclose(mises, true, rtol=1e-10)


def test_meshes() -> None:
    for seed in range(4):
        points, cells = perforated_square(np.random.default_rng(seed), 400)
        hole = _hole(np.random.default_rng(seed))
        assert points.shape == (400, 2) and len(np.unique(cells)) == 400
        a, b = points[cells[:, 1]] - points[cells[:, 0]], points[cells[:, 2]] - points[cells[:, 0]]
        area = np.abs(a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]) / 2
        y = np.roll(hole, -1, 0)
        true = 1 - abs((hole[:, 0] * y[:, 1] - hole[:, 1] * y[:, 0]).sum()) / 2
        assert area.sum() == pytest.approx(true, rel=5e-3)  # a polygon for the hole
        # Angles: twice the area over the product of two sides is the sine.
        sides = [
            np.linalg.norm(points[cells[:, i]] - points[cells[:, j]], axis=1)
            for i, j in ((0, 1), (1, 2), (2, 0))
        ]
        sines = [2 * area / (sides[i] * sides[i - 1]) for i in range(3)]
        assert np.min(sines) > np.sin(np.radians(15))
        radius = np.linalg.norm(points - 0.5, axis=1)
        assert radius.min() >= 0.2 - 1e-3
        # Unstructured: the number of neighbours varies.
        assert len(np.unique(np.bincount(cells.ravel()))) >= 4


def test_samples() -> None:
    data = elastic_cell(2, 300, seed=1, dtype=torch.float64)
    x, d = data.mesh.points, data.target
    assert x.shape == (2, 300, 2) and d.shape == (2, 300, 3) and d.isfinite().all()
    assert (d[x[..., 1] == 0][:, :2] == 0).all()
    top = d[x[..., 1] == 1]
    assert (top[:, 1] > 0.5).all()  # a full square would give about 1 - poisson^2
    assert (d[..., 2] > -0.2).all() and d[..., 2].max() > 2  # the stress concentrates at the hole
    hole = [1 - w.sum().item() for w in data.mesh.weights]
    assert all(np.pi * 0.2**2 < area < np.pi * 0.4**2 for area in hole)
    again = elastic_cell(1, 300, seed=1, start=1, dtype=torch.float64)
    assert torch.equal(again.mesh.points[0], x[1]) and torch.equal(again.target[0], d[1])
    single = elastic_cell(1, 150, seed=2)
    assert single.target.dtype == single.mesh.dtype == torch.float32


def test_the_law_of_the_hole() -> None:
    """g = log((0.4 - r) / (r - 0.2)) has covariance (1 / 2 pi) sum_k 144 cos(k s) / (k^2 + 9)^2, |k| <= 8."""
    draws = np.stack(
        [np.linalg.norm(_hole(np.random.default_rng(i))[::256] - 0.5, axis=1) for i in range(600)]
    )
    g = np.log((0.4 - draws) / (draws - 0.2))
    k = np.arange(-8, 9)
    lag = 2 * np.pi * np.subtract.outer(np.arange(8), np.arange(8)) / 8
    true = (144 * np.cos(np.multiply.outer(lag, k)) / (k**2 + 9) ** 2).sum(-1) / (2 * np.pi)
    found = g.T @ g / len(g)
    assert (np.abs(found - true) < 5 * np.sqrt((true[0, 0] ** 2 + true**2) / len(g))).all()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"n": 0}, ValueError, "n must be at least 1, got 0"),
        ({"points": 100}, ValueError, "points must be at least 150, got 100"),
        ({"poisson": 0.5}, ValueError, r"poisson must lie in \[0, 0.45\], got 0.5"),
        ({"dtype": torch.float16}, TypeError, "dtype must be torch.float32"),
    ],
)
def test_errors(change, error, message) -> None:
    with pytest.raises(error, match=message):
        elastic_cell(**{"n": 1, "points": 150, "seed": 0, **change})


def test_without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="progress=True needs tqdm"):
        elastic_cell(1, 150, seed=0, progress=True)
    monkeypatch.setitem(sys.modules, "skfem", None)
    with pytest.raises(ImportError, match=r"continuum_ops\[fem\]"):
        elastic_cell(1, 150, seed=0)
