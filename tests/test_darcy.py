"""Darcy flow against manufactured solutions, a dense solve, and the law of its random field."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import continuum_ops as co
from continuum_ops.data.darcy import gaussian_field, solve_darcy


def manufactured(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a = 2 + sin(3 x) cos(2 y), u = sin(pi x) sin(2 pi y) and f = -div(a grad u), by hand."""
    x, y = np.meshgrid(np.linspace(0, 1, n), np.linspace(0, 1, n), indexing="ij")
    a = 2 + np.sin(3 * x) * np.cos(2 * y)
    ax, ay = 3 * np.cos(3 * x) * np.cos(2 * y), -2 * np.sin(3 * x) * np.sin(2 * y)
    sx, cx, sy, cy = np.sin(np.pi * x), np.cos(np.pi * x), np.sin(2 * np.pi * y), np.cos(2 * np.pi * y)
    u = sx * sy
    f = -(ax * np.pi * cx * sy + ay * sx * 2 * np.pi * cy) + a * (np.pi**2 + 4 * np.pi**2) * u
    return a, u, f


def test_second_order_for_a_smooth_coefficient() -> None:
    errors = []
    for n in (17, 33, 65, 129):
        a, u, f = manufactured(n)
        errors.append(np.abs(solve_darcy(a, f) - u).max())
    assert errors[-1] < 1e-3
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    assert ((orders > 1.95) & (orders < 2.05)).all(), orders


def test_constant_coefficient_against_the_fourier_series() -> None:
    # -6 Laplace u = 1: u = sum over odd k, l of 16 sin(k pi x) sin(l pi y) / (6 pi^4 k l (k^2 + l^2)).
    k = np.arange(1, 400, 2)
    sine = np.sin(np.pi * k / 2)
    centre = np.einsum("k,l,kl", sine / k, sine / k, 16 / (6 * np.pi**4 * (k[:, None] ** 2 + k**2)))
    u = solve_darcy(np.full((129, 129), 6.0))
    assert u[64, 64] == pytest.approx(centre, rel=1e-4)
    np.testing.assert_allclose(u, u.T, rtol=0, atol=1e-12)


def test_two_layers_are_exact_in_one_direction() -> None:
    """A jump midway between nodes: the harmonic mean reproduces the kinked profile of the flux."""
    n, jump = 66, 32.5 / 65
    x = np.linspace(0, 1, n)
    a = np.where(x < jump, 12.0, 3.0)
    # u = p(x) sin(pi y) with p piecewise linear, a p' continuous and p = 0 at both ends needs a source at a
    # point; take p of a unit source at node 20 instead, and let f carry a p pi^2 sin(pi y).
    h, source = 1 / (n - 1), 20
    resistance = np.concatenate([[0], np.cumsum(np.where((x[1:] + x[:-1]) / 2 < jump, 1 / 12, 1 / 3) * h)])
    # The interval that holds the jump is half of each.
    cut = 32
    extra = h * (1 / 24 + 1 / 6) - (resistance[cut + 1] - resistance[cut])
    resistance[cut + 1 :] += extra
    total = resistance[-1]
    p = np.where(
        np.arange(n) <= source,
        resistance * (total - resistance[source]) / total,
        resistance[source] * (total - resistance) / total,
    )
    s = np.sin(np.pi * x)
    # The scheme's own second difference in y, so that nothing but the flux in x is tested.
    decay = 4 * np.sin(np.pi * h / 2) ** 2 / h**2
    f = (a * p * decay)[:, None] * s
    f[source] += s / h
    np.testing.assert_allclose(solve_darcy(np.repeat(a[:, None], n, 1), f), p[:, None] * s, atol=1e-10)


def test_the_linear_system_against_a_dense_solve() -> None:
    n = 9
    a = np.random.default_rng(0).uniform(0.5, 20, (n, n))
    f = np.random.default_rng(1).standard_normal((n, n))
    h2 = 1 / (n - 1) ** 2
    inner = [(i, j) for i in range(1, n - 1) for j in range(1, n - 1)]
    matrix, right = np.zeros((len(inner), len(inner))), np.zeros(len(inner))
    for row, (i, j) in enumerate(inner):
        right[row] = f[i, j]
        for k, m in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
            conductance = 2 * a[i, j] * a[k, m] / (a[i, j] + a[k, m])
            matrix[row, row] += conductance / h2
            if (k, m) in inner:
                matrix[row, inner.index((k, m))] -= conductance / h2
    exact = np.linalg.solve(matrix, right).reshape(n - 2, n - 2)
    found = solve_darcy(a, f)
    np.testing.assert_allclose(found[1:-1, 1:-1], exact, rtol=1e-8)
    for edge in (found[0], found[-1], found[:, 0], found[:, -1]):
        assert (edge == 0).all()


def test_the_samples_solve_their_equation() -> None:
    data = co.data.darcy(2, 22, seed=3, dtype=torch.float64)
    assert data.coefficient.shape == data.solution.shape == (2, 22 * 22, 1)
    assert set(data.coefficient.unique().tolist()) <= {3.0, 12.0}
    for a, u in zip(
        data.coefficient.view(2, 22, 22).numpy(), data.solution.view(2, 22, 22).numpy(), strict=True
    ):
        np.testing.assert_array_equal(u, solve_darcy(a))
        assert (u[1:-1, 1:-1] > 0).all()
    assert data.grid.shape == (22, 22) and data.resolution == 22 and len(data) == 2
    np.testing.assert_allclose(data.grid.axes[0].numpy(), np.linspace(0, 1, 22), atol=1e-15)


def test_one_function_on_every_grid() -> None:
    fine = co.data.darcy(2, 61, seed=5)
    for resolution in (31, 21, 13, 61):
        coarse = fine.at(resolution)
        again = co.data.darcy(2, resolution, seed=5)
        assert torch.equal(coarse.coefficient, again.coefficient)
        stride = 60 // (resolution - 1)
        picked = fine.solution.view(2, 61, 61)[:, ::stride, ::stride].reshape(2, -1, 1)
        assert torch.equal(coarse.solution, picked)
        same = co.data.darcy(2, resolution, seed=5, solver_resolution=61)
        assert torch.equal(same.solution, picked) and torch.equal(same.coefficient, coarse.coefficient)
        assert torch.equal(coarse.grid.points, same.grid.points)


def test_the_nested_grids_of_the_paper() -> None:
    grids = {r: np.linspace(0, 1, r) for r in (43, 85, 141, 211, 421)}
    for r, stride in zip((43, 85, 141, 211, 421), (10, 5, 3, 2, 1), strict=True):
        np.testing.assert_allclose(grids[421][::stride], grids[r], atol=1e-15)


def test_seeds() -> None:
    first = co.data.darcy(3, 13, seed=1)
    again, fewer = co.data.darcy(3, 13, seed=1), co.data.darcy(2, 13, seed=1)
    assert torch.equal(first.coefficient, again.coefficient) and torch.equal(first.solution, again.solution)
    assert torch.equal(fewer.solution, first.solution[:2])
    assert torch.equal(first[1:].solution, first.solution[1:])
    assert not torch.equal(first.coefficient, co.data.darcy(3, 13, seed=2).coefficient)


@pytest.mark.parametrize(
    ("constant_mode", "sigma", "tau"), [(True, 1.0, 3.0), (False, 1.0, 3.0), (False, 12.0, 6.0)]
)
def test_the_covariance_of_the_field(constant_mode: bool, sigma: float, tau: float) -> None:
    """Means of products at a few points against the eigenfunction series of sigma^2 (-Laplace + tau^2)^-2."""
    x = np.array([0.0, 0.3, 0.85])
    generator = np.random.default_rng(0)
    law = {"constant_mode": constant_mode, "sigma": sigma, "tau": tau}
    draws = np.stack([gaussian_field(generator, x, **law) for _ in range(400)])
    flat = draws.reshape(len(draws), -1)
    k = np.arange(60)
    phi = np.where(k == 0, 1, np.sqrt(2)) * np.cos(np.pi * np.outer(x, k))
    variance = (sigma / (np.pi**2 * (k[:, None] ** 2 + k**2) + tau**2)) ** 2
    if not constant_mode:
        variance[0, 0] = 0
    exact = np.einsum("ak,bl,kl,ck,dl->abcd", phi, phi, variance, phi, phi).reshape(9, 9)
    found = flat.T @ flat / len(flat)
    deviation = np.sqrt((np.outer(np.diag(exact), np.diag(exact)) + exact**2) / len(flat))
    assert (np.abs(found - exact) < 5 * deviation).all()


def test_the_two_coefficients_of_continuum_attention() -> None:
    """CA 6.2.2: exp(m) and the threshold of the same m, of mean 0; the first is of log deviation 0.5."""
    law = {"seed": 8, "constant_mode": False, "sigma": 12.0, "tau": 6.0, "dtype": torch.float64}
    lognormal = co.data.darcy(40, 22, coefficient="lognormal", **law)
    piecewise = co.data.darcy(40, 22, **law)
    m = lognormal.coefficient.log()
    assert torch.equal(piecewise.coefficient, torch.where(m >= 0, 12.0, 3.0).double())
    # The variance of m at a point, averaged over the square: the sum of the variances of the modes.
    k = np.arange(256)
    variance = (12.0 / (np.pi**2 * (k[:, None] ** 2 + k**2) + 36.0)) ** 2
    variance[0, 0] = 0.0
    w = lognormal.grid.weights
    assert ((m[..., 0] ** 2) @ w).mean().item() == pytest.approx(variance.sum(), rel=0.1)
    for data in (lognormal, piecewise):
        a, u = (part[0].view(22, 22).numpy() for part in (data.coefficient, data.solution))
        np.testing.assert_allclose(u, solve_darcy(a), rtol=1e-9)


def test_a_lognormal_solution_converges() -> None:
    """To the solution on a finer grid: the coefficient is continuous, where the piecewise one is not."""
    law = {"seed": 9, "coefficient": "lognormal", "sigma": 12.0, "tau": 6.0, "dtype": torch.float64}
    truth = co.data.darcy(1, 13, solver_resolution=385, **law).solution
    errors = [
        (co.data.darcy(1, 13, solver_resolution=n, **law).solution - truth).norm().item()
        for n in (13, 25, 49, 97)
    ]
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    # m has just short of one derivative: the order lies between those of a jump and of a smooth function.
    assert (orders > 1.0).all() and (orders < 2.6).all(), orders
    assert errors[-1] < 3e-3 * truth.norm()


def test_without_the_constant_mode_the_field_has_mean_zero() -> None:
    x = np.linspace(0, 1, 257)
    w = np.full(257, 1 / 256)
    w[[0, -1]] /= 2
    # The trapezoid rule integrates cos(pi k x) exactly for k < 512, k even; the odd ones by symmetry.
    field = gaussian_field(np.random.default_rng(3), x, constant_mode=False)
    assert abs(w @ field @ w) < 1e-14
    with_it = gaussian_field(np.random.default_rng(3), x)
    np.testing.assert_allclose(with_it - field, (with_it - field)[0, 0], atol=1e-12)
    assert abs(w @ with_it @ w) > 1e-3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: co.data.darcy(0, 13, seed=0), ValueError, "n must be at least 1, got 0"),
        (lambda: co.data.darcy(1, 2, seed=0), ValueError, "resolution must be at least 3, got 2"),
        (lambda: co.data.darcy(1, 13, seed=-1), ValueError, "seed must be at least 0"),
        (lambda: co.data.darcy(1.5, 13, seed=0), TypeError, "n must be an int, got float"),
        (
            lambda: co.data.darcy(1, 13, seed=0, solver_resolution=20),
            ValueError,
            "resolution - 1 must divide solver_resolution - 1 = 19, got resolution = 13",
        ),
        (lambda: co.data.darcy(1, 13, seed=0, dtype=torch.float16), TypeError, "dtype must be torch.float32"),
        (lambda: co.data.darcy(1, 13, seed=0, constant_mode=1), TypeError, "constant_mode must be a bool"),
        (
            lambda: co.data.darcy(1, 13, seed=0, coefficient="normal"),
            ValueError,
            r"coefficient must be one of \('piecewise', 'lognormal'\), got 'normal'",
        ),
        (
            lambda: co.data.darcy(1, 13, seed=0, sigma=0.0),
            ValueError,
            "sigma must be finite and positive, got 0.0",
        ),
        (
            lambda: co.data.darcy(1, 13, seed=0, tau=-1.0),
            ValueError,
            "tau must be finite and positive, got -1.0",
        ),
        (
            lambda: co.data.darcy(1, 13, seed=0).at(6),
            ValueError,
            "resolution - 1 must divide this resolution - 1 = 12, got resolution = 6",
        ),
        (lambda: solve_darcy(np.ones((4, 5))), ValueError, r"coefficient must have shape \(n, n\)"),
        (lambda: solve_darcy(np.zeros((4, 4))), ValueError, "coefficient must be finite and positive"),
        (lambda: solve_darcy(np.ones((4, 4)), np.ones(4)), ValueError, "forcing must be a number or have"),
        (lambda: solve_darcy(np.ones((4, 4)), rtol=0.0), ValueError, "rtol must be finite and positive"),
    ],
)
def test_errors(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.fft", None)
    with pytest.raises(ImportError, match=r"continuum_ops\[train\]"):
        co.data.darcy(1, 13, seed=0)


def test_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"progress=True needs tqdm"):
        co.data.darcy(1, 13, seed=0, progress=True)
