"""Quadrature rules against closed forms: exactness, order of convergence, errors."""

from __future__ import annotations

import builtins
import math

import numpy as np
import pytest
import torch

from continuum_ops import quadrature


def uneven(n: int, seed: int = 0) -> np.ndarray:
    """n nodes from -0.7 to 1.9 whose gaps differ by up to a factor of 1.8."""
    gaps = np.random.default_rng(seed).uniform(1.0, 1.8, n - 1)
    return -0.7 + 2.6 * np.concatenate([[0.0], np.cumsum(gaps)]) / gaps.sum()


def power_integral(degree: int, a: float, b: float) -> float:
    return (b ** (degree + 1) - a ** (degree + 1)) / (degree + 1)


def observed_order(errors: list[float], refinement: float = 2.0) -> float:
    return math.log(errors[-2] / errors[-1]) / math.log(refinement)


def apply(w: torch.Tensor, values: np.ndarray) -> float:
    assert w.dtype == torch.float64
    return float(w.numpy() @ values)


# exp(x) on [0, 1] has no symmetry that would flatter a rule
EXP = math.e - 1


@pytest.mark.parametrize("n", [2, 3, 4, 11])
def test_trapezoid_is_exact_for_degree_one_only(n: int) -> None:
    x = uneven(n)
    w = quadrature.trapezoid(x)
    assert (w > 0).all()
    for degree in (0, 1):
        assert apply(w, x**degree) == pytest.approx(power_integral(degree, x[0], x[-1]), rel=1e-13)
    # the trapezoid error of x^2 is sum h^3 / 6
    excess = (np.diff(x) ** 3).sum() / 6
    assert apply(w, x**2) - power_integral(2, x[0], x[-1]) == pytest.approx(excess, rel=1e-10)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 9, 30])
def test_simpson_is_exact_for_degree_two_on_uneven_nodes(n: int) -> None:
    x = uneven(n)
    w = quadrature.simpson(x)
    for degree in (0, 1, 2):
        assert apply(w, x**degree) == pytest.approx(power_integral(degree, x[0], x[-1]), rel=1e-12)
    assert abs(apply(w, x**4) - power_integral(4, x[0], x[-1])) > 1e-9


def test_simpson_on_even_nodes() -> None:
    w = quadrature.simpson(np.linspace(0, 4, 5))
    np.testing.assert_allclose(w, np.array([1, 4, 2, 4, 1]) / 3, rtol=1e-14)
    x = np.linspace(-1, 2, 7)
    assert apply(quadrature.simpson(x), x**3) == pytest.approx(power_integral(3, -1, 2), rel=1e-13)
    # last interval by the quadratic through three nodes: (-1, 8, 5) / 12
    np.testing.assert_allclose(
        quadrature.simpson([0, 1, 2, 3]), [1 / 3, 4 / 3 - 1 / 12, 1 / 3 + 8 / 12, 5 / 12], rtol=1e-14
    )


def test_simpson_goes_negative_beyond_a_ratio_of_two() -> None:
    assert quadrature.simpson([0.0, 1.0, 2.9])[0] > 0
    assert quadrature.simpson([0.0, 1.0, 3.1])[0] < 0


@pytest.mark.parametrize("n", [1, 2, 9])
def test_midpoint_is_exact_for_degree_one(n: int) -> None:
    edges = uneven(n + 1)
    w, centre = quadrature.midpoint(edges), (edges[1:] + edges[:-1]) / 2
    np.testing.assert_allclose(w, np.diff(edges), rtol=1e-14)
    for degree in (0, 1):
        assert apply(w, centre**degree) == pytest.approx(
            power_integral(degree, edges[0], edges[-1]), rel=1e-13
        )


@pytest.mark.parametrize(
    ("rule", "order"), [("trapezoid", 2), ("simpson", 4), ("simpson_even", 4), ("midpoint", 2), ("uneven", 2)]
)
def test_order_of_convergence(rule: str, order: int) -> None:
    errors = []
    for n in (16, 32, 64, 128):
        x = np.linspace(0, 1, n + 1)
        if rule == "trapezoid":
            w = quadrature.trapezoid(x)
        elif rule == "simpson":
            w = quadrature.simpson(x)
        elif rule == "simpson_even":
            x = np.linspace(0, 1, n)
            w = quadrature.simpson(x)
        elif rule == "midpoint":
            w, x = quadrature.midpoint(x), (x[1:] + x[:-1]) / 2
        else:
            x = (np.exp(x) - 1) / EXP
            w = quadrature.trapezoid(x)
        errors.append(abs(apply(w, np.exp(x)) - EXP))
    assert observed_order(errors) == pytest.approx(order, abs=0.15)


def test_periodic_is_spectral_on_even_nodes() -> None:
    # (1 / 2 pi) int exp(cos t) dt = I_0(1); the error is 2 I_n(1), about 2 (1/2)^n / n!
    bessel = sum(0.25**k / math.factorial(k) ** 2 for k in range(20))
    for n in (2, 4, 6, 8):
        t = 2 * math.pi * np.arange(n) / n
        w = quadrature.periodic(t, 2 * math.pi)
        np.testing.assert_allclose(w, 2 * math.pi / n, rtol=1e-14)
        error = abs(apply(w, np.exp(np.cos(t))) / (2 * math.pi) - bessel)
        assert error == pytest.approx(2 * 0.5**n / math.factorial(n), rel=0.15)
    t = 2 * math.pi * np.arange(16) / 16
    w = quadrature.periodic(t, 2 * math.pi)
    for degree in range(1, 16):
        assert abs(apply(w, np.cos(degree * t + 0.3))) < 1e-13
    assert abs(apply(w, np.cos(16 * t))) > 1


def test_periodic_on_uneven_nodes() -> None:
    w = quadrature.periodic([0.1, 0.2, 0.6], 1.0)
    np.testing.assert_allclose(w, [0.3, 0.25, 0.45], rtol=1e-14)
    np.testing.assert_allclose(quadrature.periodic([0.3], 2.5), [2.5])
    errors = []
    for n in (32, 64, 128, 256):
        t = np.arange(n) / n
        x = t + 0.1 * np.sin(2 * math.pi * t) / (2 * math.pi) + 0.02 * (np.arange(n) % 2) / n
        w = quadrature.periodic(x, 1.0)
        assert w.sum().item() == pytest.approx(1, rel=1e-14)
        errors.append(abs(apply(w, np.sin(2 * math.pi * x) ** 2) - 0.5))
    assert observed_order(errors) > 1.85


def test_monte_carlo() -> None:
    w = quadrature.monte_carlo(8, 4.0)
    assert w.tolist() == [0.5] * 8
    assert quadrature.monte_carlo(5).sum().item() == pytest.approx(1)
    rng = np.random.default_rng(7)
    rms = []
    for n in (64, 1024):
        w = quadrature.monte_carlo(n, 1.0).numpy()
        rms.append(math.sqrt(np.mean((np.exp(rng.random((2000, n))) @ w - EXP) ** 2)))
    # the variance of exp(U) is (e^2 - 1) / 2 - (e - 1)^2; 2000 draws know its root to 1.6 %
    sigma = math.sqrt((math.e**2 - 1) / 2 - EXP**2)
    np.testing.assert_allclose(rms, [sigma / 8, sigma / 32], rtol=0.08)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 20])
def test_gauss_legendre(n: int) -> None:
    x, w = quadrature.gauss_legendre(n, -0.5, 1.5)
    assert x.shape == w.shape == (n,)
    assert (w > 0).all() and (x > -0.5).all() and (x < 1.5).all() and (x.diff() > 0).all()
    for degree in range(2 * n):
        expected = power_integral(degree, -0.5, 1.5)
        assert apply(w, x.numpy() ** degree) == pytest.approx(expected, rel=1e-13)
    # error on x^{2n}: (b - a)^{2n+1} n!^4 / ((2n + 1) (2n)!^2)
    gap = 2.0 ** (2 * n + 1) * math.factorial(n) ** 4 / ((2 * n + 1) * math.factorial(2 * n) ** 2)
    if n <= 7:
        missing = power_integral(2 * n, -0.5, 1.5) - apply(w, x.numpy() ** (2 * n))
        assert missing == pytest.approx(gap, rel=1e-4)


def test_gauss_legendre_closed_forms() -> None:
    x, w = quadrature.gauss_legendre(2, -1, 1)
    np.testing.assert_allclose(x, [-1 / math.sqrt(3), 1 / math.sqrt(3)], rtol=1e-15)
    np.testing.assert_allclose(w, [1, 1], rtol=1e-15)
    x, w = quadrature.gauss_legendre(1, 2, 5)
    assert (x.tolist(), w.tolist()) == ([3.5], [3.0])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9, 32, 33])
def test_clenshaw_curtis(n: int) -> None:
    x, w = quadrature.clenshaw_curtis(n, -0.5, 1.5)
    assert x.shape == w.shape == (n,)
    assert (w > 0).all() and (x.diff() > 0).all()
    if n > 1:
        assert (x[0].item(), x[-1].item()) == (-0.5, 1.5)
        np.testing.assert_allclose(x, 0.5 - np.cos(math.pi * np.arange(n) / (n - 1)), atol=1e-15)
    for degree in range(n):
        expected = power_integral(degree, -0.5, 1.5)
        assert apply(w, x.numpy() ** degree) == pytest.approx(expected, rel=1e-13)


def test_clenshaw_curtis_closed_forms() -> None:
    for n, nodes, weights in [(1, [0], [2]), (2, [-1, 1], [1, 1]), (3, [-1, 0, 1], [1 / 3, 4 / 3, 1 / 3])]:
        x, w = quadrature.clenshaw_curtis(n, -1, 1)
        np.testing.assert_allclose(x, nodes, atol=1e-15)
        np.testing.assert_allclose(w, weights, rtol=1e-14)
    # spectral: the Chebyshev coefficients of exp are 2 I_k(1)
    x, w = quadrature.clenshaw_curtis(14, 0, 1)
    assert apply(w, np.exp(x.numpy())) == pytest.approx(EXP, rel=1e-14)


def square_mesh(n: int) -> tuple[np.ndarray, np.ndarray]:
    """The unit square as 2 n^2 triangles, of both orientations, with the inner vertices displaced."""
    t = np.linspace(0, 1, n + 1)
    points = np.stack(np.meshgrid(t, t, indexing="ij"), -1)
    points[1:-1, 1:-1] += np.random.default_rng(n).uniform(-0.2, 0.2, (n - 1, n - 1, 2)) / n
    i = np.arange((n + 1) ** 2).reshape(n + 1, n + 1)
    low = np.stack([i[:-1, :-1], i[1:, :-1], i[1:, 1:]], -1).reshape(-1, 3)
    high = np.stack([i[:-1, :-1], i[1:, 1:], i[:-1, 1:]], -1).reshape(-1, 3)
    return points.reshape(-1, 2), np.concatenate([low, high[:, ::-1]])


def test_simplices_are_exact_for_linear_functions() -> None:
    points, cells = square_mesh(6)
    w = quadrature.simplices(points, cells)
    assert apply(w, 2.0 + 3 * points[:, 0] - points[:, 1]) == pytest.approx(3.0, rel=1e-13)
    x = uneven(9)
    pairs = np.stack([np.arange(8), np.arange(1, 9)], 1)
    pairs[::2] = pairs[::2, ::-1]
    np.testing.assert_allclose(quadrature.simplices(x, pairs), quadrature.trapezoid(x), rtol=1e-13)
    # the unit cube in six tetrahedra along the diagonal; linear functions by their value at the centre
    cube = np.array([[i >> 2 & 1, i >> 1 & 1, i & 1] for i in range(8)], dtype=float)
    paths = [(0, a, a | b, 7) for a in (1, 2, 4) for b in (1, 2, 4) if a != b]
    w = quadrature.simplices(cube, paths)
    assert apply(w, 1 + cube @ [1.0, -2.0, 4.0]) == pytest.approx(2.5, rel=1e-14)
    np.testing.assert_allclose(w, np.array([6, 2, 2, 2, 2, 2, 2, 6]) / 24, rtol=1e-14)


def test_simplices_order_and_unused_vertices() -> None:
    errors = []
    for n in (8, 16, 32):
        points, cells = square_mesh(n)
        errors.append(abs(apply(quadrature.simplices(points, cells), np.exp(points.sum(1))) - EXP**2))
    assert observed_order(errors) == pytest.approx(2, abs=0.2)
    w = quadrature.simplices([[0.0, 0], [1, 0], [0, 1], [5, 5]], [[0, 1, 2], [0, 0, 1]])
    np.testing.assert_allclose(w, [1 / 6, 1 / 6, 1 / 6, 0], rtol=1e-15)


def nearest_cell_shares(points: np.ndarray, n: int) -> np.ndarray:
    """Cell volumes in the unit box by counting midpoints of n^d voxels, all distances by brute force."""
    d = points.shape[1]
    t = (np.arange(n) + 0.5) / n
    voxels = np.stack(np.meshgrid(*[t] * d, indexing="ij"), -1).reshape(-1, d)
    distance = ((voxels[:, None] - points) ** 2).sum(-1)
    return np.bincount(distance.argmin(1), minlength=len(points)) / n**d


@pytest.mark.parametrize(("d", "n", "voxels"), [(2, 12, 200), (3, 9, 40)])
def test_voronoi_against_brute_force(d: int, n: int, voxels: int) -> None:
    points = np.random.default_rng(d).random((n, d))
    points[0, 0], points[1, 1], points[2, 0] = 0.0, 1.0, 1.0  # on sides of the box
    points[3] = 0.0  # in a corner
    w = quadrature.voronoi(points, [(0, 1)] * d)
    # counting errs by a part of the voxels that a boundary of the cell cuts
    np.testing.assert_allclose(w, nearest_cell_shares(points, voxels), atol=0.5 / voxels)
    assert w.sum().item() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(("d", "n"), [(1, 1), (1, 50), (2, 1), (2, 2), (2, 700), (3, 1), (3, 5), (3, 400)])
def test_voronoi_sums_to_the_box(d: int, n: int) -> None:
    box = np.array([(-3.0, 5.0), (100.0, 100.5), (0.0, 2.0)])[:d]
    points = box[:, 0] + np.random.default_rng(n).random((n, d)) * (box[:, 1] - box[:, 0])
    w = quadrature.voronoi(points, box)
    assert (w > 0).all()
    assert w.sum().item() == pytest.approx(np.prod(box[:, 1] - box[:, 0]), rel=1e-8)


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("ends", [True, False])
def test_voronoi_of_a_tensor_grid_is_the_product_of_axis_cells(d: int, ends: bool) -> None:
    inner = np.array([0.1, 0.13, 0.4, 0.75, 0.9])
    x = np.concatenate([[0.0], inner, [1.0]]) if ends else inner
    cell = np.diff(np.concatenate([[0.0], (x[1:] + x[:-1]) / 2, [1.0]]))
    points = np.stack(np.meshgrid(*[x] * d, indexing="ij"), -1).reshape(-1, d)
    expected = cell
    for _ in range(d - 1):
        expected = np.multiply.outer(expected, cell)
    offset = 1e5
    w = quadrature.voronoi(points, [(0, 1)] * d)
    np.testing.assert_allclose(w, expected.ravel(), rtol=1e-11)
    w = quadrature.voronoi(points + offset, [(offset, offset + 1)] * d)
    np.testing.assert_allclose(w, expected.ravel(), rtol=1e-8)


def test_voronoi_error_decreases_on_a_smooth_function() -> None:
    rms = []
    for n in (100, 400, 1600):
        square = []
        for seed in range(6):
            points = np.random.default_rng(seed).random((n, 2)) ** 1.5  # denser towards the corner
            w = quadrature.voronoi(points, [(0, 1), (0, 1)])
            square.append((apply(w, np.exp(points.sum(1))) - EXP**2) ** 2)
        rms.append(math.sqrt(np.mean(square)))
    # first order in the spacing, so a half at least each time the points are four times as many
    assert rms[1] < rms[0] / 2 and rms[2] < rms[1] / 2
    assert rms[2] < 2e-3 * EXP**2


@pytest.mark.parametrize("d", [1, 2, 3])
def test_voronoi_coincident_points_share_a_cell(d: int) -> None:
    points = np.random.default_rng(1).random((30, d))
    alone = quadrature.voronoi(points, [(0, 1)] * d)
    w = quadrature.voronoi(np.concatenate([points, points[:4], points[:2]]), [(0, 1)] * d)
    share = np.array([3.0] * 2 + [2.0] * 2 + [1.0] * 26)
    np.testing.assert_allclose(w[:30], alone.numpy() / share, rtol=1e-11)
    np.testing.assert_allclose(w[30:34], w[:4], rtol=1e-14)
    # neighbours at the rounding limit must not lose a cell either
    for distance in (1e-15, 1e-12, 1e-9, 1e-7):
        close = np.concatenate([points, points[:4] + distance])
        assert quadrature.voronoi(close, [(0, 1.1)] * d).sum().item() == pytest.approx(1.1**d, rel=1e-8)


def test_voronoi_of_points_on_a_line_and_default_bounds() -> None:
    t = np.linspace(0.25, 0.75, 101)
    w = quadrature.voronoi(np.stack([t, np.full(101, 0.3)], 1), [(0, 1), (0, 1)])
    expected = np.full(101, 0.005)
    expected[[0, -1]] = 0.2525
    np.testing.assert_allclose(w, expected, rtol=1e-11)
    points = np.random.default_rng(0).random((40, 2))
    box = np.stack([points.min(0), points.max(0)], 1)
    assert quadrature.voronoi(points).sum().item() == pytest.approx(np.prod(box[:, 1] - box[:, 0]), rel=1e-12)
    torch.testing.assert_close(quadrature.voronoi(points), quadrature.voronoi(points, box))
    torch.testing.assert_close(
        quadrature.voronoi([0.0, 0.5, 2.0], (0, 2)), quadrature.trapezoid([0.0, 0.5, 2.0])
    )


def test_voronoi_takes_rounded_ends_as_on_the_side() -> None:
    x = torch.linspace(0, 2 * math.pi, 5, dtype=torch.float32)  # its end is 1.7e-7 beyond 2 pi
    w = quadrature.voronoi(x, (0, 2 * math.pi))
    assert w.dtype == torch.float64
    np.testing.assert_allclose(w / math.pi, [0.25, 0.5, 0.5, 0.5, 0.25], rtol=1e-6)


def test_voronoi_of_many_points() -> None:
    points = np.random.default_rng(0).random((20_000, 2))
    w = quadrature.voronoi(points, [(0, 1), (0, 1)])
    assert abs(w.sum().item() - 1) < 1e-8
    assert apply(w, np.exp(points.sum(1))) == pytest.approx(EXP**2, rel=1e-4)


def test_voronoi_names_the_extra_when_scipy_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_scipy(name: str, *args, **kwargs):
        if name.split(".")[0] == "scipy":
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    with pytest.raises(ImportError, match=r'pip install "continuum_ops\[train\]"'):
        quadrature.voronoi(np.random.default_rng(0).random((5, 2)))
    assert quadrature.voronoi([0.0, 1.0]).tolist() == [0.5, 0.5]


def test_inputs_dtypes_and_gradients() -> None:
    x = [0.0, 0.1, 0.5]
    for given in (x, tuple(x), np.array(x), torch.tensor(x, dtype=torch.float64)):
        assert quadrature.trapezoid(given).tolist() == [0.05, 0.25, 0.2]
    assert quadrature.trapezoid(torch.tensor(x, dtype=torch.float32)).dtype == torch.float64
    assert quadrature.trapezoid([0, 1, 2]).tolist() == [0.5, 1, 0.5]
    for w in (
        quadrature.trapezoid(x, dtype=torch.float32),
        quadrature.simpson(x, dtype=torch.float32),
        quadrature.midpoint(x, dtype=torch.float32),
        quadrature.periodic(x, 1, dtype=torch.float32),
        quadrature.monte_carlo(3, dtype=torch.float32),
        *quadrature.gauss_legendre(3, dtype=torch.float32),
        *quadrature.clenshaw_curtis(3, dtype=torch.float32),
        quadrature.simplices(x, [[0, 1], [1, 2]], dtype=torch.float32),
        quadrature.voronoi(x, dtype=torch.float32),
    ):
        assert w.dtype == torch.float32 and w.shape[0] in (2, 3)
    nodes = torch.tensor(uneven(6), requires_grad=True)
    for rule in (quadrature.trapezoid, quadrature.simpson, lambda t: quadrature.periodic(t, 4.0)):
        assert torch.autograd.gradcheck(rule, nodes)
    points, cells = square_mesh(2)
    vertices = torch.tensor(points, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: quadrature.simplices(p, cells), vertices)


RULES_ON_NODES = [
    ("x", quadrature.trapezoid, 2),
    ("x", quadrature.simpson, 3),
    ("edges", quadrature.midpoint, 2),
    ("x", lambda x: quadrature.periodic(x, 10.0), 1),
]


@pytest.mark.parametrize(("name", "rule", "least"), RULES_ON_NODES)
def test_bad_nodes(name, rule, least: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} must have at least {least} entries, got {least - 1}"):
        rule(torch.arange(least - 1.0))
    with pytest.raises(ValueError, match=rf"{name} must be 1-D, got shape \(3, 1\)"):
        rule(torch.arange(3.0)[:, None])
    with pytest.raises(ValueError, match=rf"{name} must be finite, got nan at index 1"):
        rule([0.0, math.nan, 1.0])
    with pytest.raises(ValueError, match=rf"{name} must be strictly increasing, got {name}\[1\] = 2 before"):
        rule([0.0, 2.0, 1.0])
    with pytest.raises(ValueError, match=rf"{name} must be strictly increasing, got {name}\[0\] = 1 before"):
        rule([1.0, 1.0, 2.0])
    with pytest.raises(TypeError, match=rf"{name} must be real numbers, got torch.complex64"):
        rule(torch.ones(3, dtype=torch.complex64))


def test_bad_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"x must lie within one period.*length = 1, got x\[-1\] - x\[0\] = 1"
    ):
        quadrature.periodic([0.0, 0.5, 1.0], 1.0)
    for length in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"length must be finite and positive, got {length}"):
            quadrature.periodic([0.0], length)
    with pytest.raises(ValueError, match=r"volume must be finite and positive, got 0\.0"):
        quadrature.monte_carlo(3, 0.0)
    for rule in (quadrature.monte_carlo, quadrature.gauss_legendre, quadrature.clenshaw_curtis):
        with pytest.raises(ValueError, match="n must be at least 1, got 0"):
            rule(0)
        with pytest.raises(TypeError, match="float"):
            rule(2.5)
    for rule in (quadrature.gauss_legendre, quadrature.clenshaw_curtis):
        for a, b in ((1, 1), (2, 1), (0, math.inf), (math.nan, 1)):
            with pytest.raises(ValueError, match="a and b must be finite with a < b, got a = "):
                rule(3, a, b)


def test_bad_points() -> None:
    triangle = [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    for bad in (3, -1):
        with pytest.raises(ValueError, match=f"cells must index points, 0 to 2, got {bad}"):
            quadrature.simplices(triangle, [[0, 1, bad]])
    with pytest.raises(
        ValueError, match=r"cells must have shape \(n_cells, 3\) for points in 2-D, got \(1, 2\)"
    ):
        quadrature.simplices(triangle, [[0, 1]])
    with pytest.raises(TypeError, match=r"cells must be integers, got torch.float64"):
        quadrature.simplices(triangle, [[0.0, 1.0, 2.0]])
    box = [(0, 1), (0, 1)]
    for call in (lambda p: quadrature.simplices(p, [[0, 1, 2]]), lambda p: quadrature.voronoi(p, box)):
        with pytest.raises(ValueError, match=r"points must have shape \(n,\) or \(n, d\).*got \(2, 4\)"):
            call(torch.zeros(2, 4))
        with pytest.raises(ValueError, match=r"points must be finite, got inf at index \(0, 1\)"):
            call([[0.0, math.inf], [1.0, 0.0], [0.0, 1.0]])
    with pytest.raises(
        ValueError, match=r"points must lie inside bounds .*, got \[0\.5, 1\.001\] at index 1"
    ):
        quadrature.voronoi([[0.5, 0.5], [0.5, 1.001]], box)
    with pytest.raises(ValueError, match="points must hold at least 1 point, got 0"):
        quadrature.voronoi(torch.zeros(0, 2), box)
    with pytest.raises(ValueError, match=r"bounds must be \(lo, hi\) for each of 2 axes, got shape \(1, 2\)"):
        quadrature.voronoi(triangle, box[:1])
    with pytest.raises(ValueError, match="bounds must be finite with lo < hi on every axis, got"):
        quadrature.voronoi(triangle, [(0, 1), (1, 0)])
    with pytest.raises(ValueError, match="bounds must be given where points span no volume"):
        quadrature.voronoi([[0.0, 1.0], [1.0, 1.0]])
