"""Grids and point clouds against independent computations, and attention that integrates over them."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch

import continuum_ops as co
from continuum_ops.mesh import Mesh, as_mesh

X = [0.0, 0.1, 0.4, 1.0]
X_TRAPEZOID = [0.05, 0.2, 0.45, 0.3]


def float64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_grid_points_and_weights_in_c_order() -> None:
    y, z = [-1.0, 2.0, 2.5], [3.0, 5.0]
    grid = co.Grid(float64(X), np.array(y), z)
    assert isinstance(grid, Mesh)
    assert grid.shape == (4, 3, 2) and grid.ndim == 3 and len(grid) == 24
    np.testing.assert_array_equal(grid.points, list(itertools.product(X, y, z)))
    expected = [a * b * c for a, b, c in itertools.product(X_TRAPEZOID, [1.5, 1.75, 0.25], [1.0, 1.0])]
    np.testing.assert_allclose(grid.weights, expected, rtol=1e-14)
    assert grid.volume.item() == pytest.approx(7.0, rel=1e-14)
    for axis, nodes in zip(grid.axes, (X, y, z), strict=True):
        np.testing.assert_array_equal(axis, nodes)
    np.testing.assert_allclose(grid.axis_weights[0], X_TRAPEZOID, rtol=1e-14)
    assert grid.kind == ("endpoint",) * 3 and grid.period == (math.inf,) * 3
    assert grid.dtype == torch.float64 and grid.device == torch.device("cpu")
    assert (
        repr(grid)
        == "Grid(shape=(4, 3, 2), kind=('endpoint', 'endpoint', 'endpoint'), dtype=torch.float64, device=cpu)"
    )


def test_kinds() -> None:
    even = torch.arange(4, dtype=torch.float64) / 4
    grid = co.Grid(X, even, [0.1, 0.3, 0.9], kind=("endpoint", "periodic", "cell"))
    np.testing.assert_allclose(grid.axis_weights[0], X_TRAPEZOID, rtol=1e-14)
    np.testing.assert_allclose(grid.axis_weights[1], [0.25] * 4, rtol=1e-14)
    # edges 0, 0.2, 0.6, 1.2
    np.testing.assert_allclose(grid.axis_weights[2], [0.2, 0.4, 0.6], rtol=1e-14)
    assert grid.period == (math.inf, 1.0, math.inf)


def test_periodic_axes() -> None:
    uneven = [0.1, 0.2, 0.6]
    for period in (1.0, [1.0], (1,)):
        grid = co.Grid(uneven, kind="periodic", period=period)
        np.testing.assert_allclose(grid.weights, [0.3, 0.25, 0.45], rtol=1e-14)
        assert grid.period == (1.0,)
    grid = co.Grid(uneven, X, uneven, kind=("periodic", "endpoint", "periodic"), period=(1.0, None, 2.0))
    assert grid.period == (1.0, math.inf, 2.0)
    assert co.Grid(uneven, X, uneven, kind=("periodic", "endpoint", "periodic"), period=3).period == (
        3,
        math.inf,
        3,
    )
    # even up to rounding in float32
    angle = torch.linspace(0, 2 * math.pi, 101)[:-1]
    grid = co.Grid(angle, kind="periodic")
    assert grid.dtype == torch.float32
    assert grid.period[0] == pytest.approx(2 * math.pi, rel=1e-6)
    np.testing.assert_allclose(grid.weights, 2 * math.pi / 100, rtol=1e-5)
    np.testing.assert_allclose(co.Grid([0.3], kind="periodic", period=2.0).weights, [2.0])


@pytest.mark.parametrize("kind", ["endpoint", "periodic", "cell"])
def test_uniform(kind: str) -> None:
    grid = co.Grid.uniform((5, 4), [(-1, 1), (2, 4)], kind)
    x = {
        "endpoint": [-1, -0.5, 0, 0.5, 1],
        "periodic": [-1, -0.6, -0.2, 0.2, 0.6],
        "cell": [-0.8, -0.4, 0, 0.4, 0.8],
    }[kind]
    w = [0.25, 0.5, 0.5, 0.5, 0.25] if kind == "endpoint" else [0.4] * 5
    np.testing.assert_allclose(grid.axes[0], x, atol=1e-15)
    np.testing.assert_allclose(grid.axis_weights[0], w, rtol=1e-14)
    assert grid.volume.item() == pytest.approx(4, rel=1e-14)
    assert grid.period == ((2.0, 2.0) if kind == "periodic" else (math.inf, math.inf))
    line = co.Grid.uniform(3, kind=kind, dtype=torch.float32)
    assert line.shape == (3,) and line.points.dtype == line.weights.dtype == torch.float32
    assert line.volume.item() == pytest.approx(1, rel=1e-6)
    if kind != "endpoint":
        assert co.Grid.uniform(1, kind=kind).weights.tolist() == [1.0]


def test_uniform_weights_integrate() -> None:
    def integral(kind: str) -> float:
        grid = co.Grid.uniform((40, 50), [(0, 1), (0, 2 * math.pi)], (kind, "periodic"))
        x, t = grid.points.unbind(-1)
        return (grid.weights * x.exp() * t.cos().exp()).sum().item()

    exact = (math.e - 1) * 2 * math.pi * sum(0.25**k / math.factorial(k) ** 2 for k in range(20))
    # the composite errors are h^2 / 12 and -h^2 / 24 times f'(1) - f'(0)
    assert integral("endpoint") / exact - 1 == pytest.approx(1 / (12 * 39**2), rel=1e-2)
    assert integral("cell") / exact - 1 == pytest.approx(-1 / (24 * 40**2), rel=1e-2)


def test_grid_weights_can_be_given() -> None:
    x = torch.linspace(0, 1, 5, dtype=torch.float64)
    simpson = np.array([1, 4, 2, 4, 1]) / 12
    for weights in (
        co.quadrature.simpson,
        [co.quadrature.simpson],
        (float64(simpson),),
        float64(simpson),
        simpson,
    ):
        np.testing.assert_allclose(co.Grid(x, weights=weights).weights, simpson, rtol=1e-14)
    grid = co.Grid(x, X, weights=(co.quadrature.simpson, None))
    np.testing.assert_allclose(grid.weights.view(5, 4), np.outer(simpson, X_TRAPEZOID), rtol=1e-14)
    edges = [0.0, 0.3, 0.4, 1.0]
    grid = co.Grid([0.15, 0.35, 0.7], kind="cell", weights=(co.quadrature.midpoint(edges),))
    np.testing.assert_allclose(grid.weights, [0.3, 0.1, 0.6], rtol=1e-14)
    nodes, w = co.quadrature.gauss_legendre(3, 0, 1)
    grid = co.Grid(nodes, nodes, weights=(w, w))
    assert (grid.weights * (grid.points**5).prod(-1)).sum().item() == pytest.approx(1 / 36, rel=1e-13)
    assert co.Grid([2.0], weights=[[1.0]]).volume.item() == 1.0


def test_grid_dtypes() -> None:
    x32 = torch.tensor(X, dtype=torch.float32)
    grid = co.Grid(x32)
    assert grid.points.dtype == grid.weights.dtype == torch.float32
    assert co.Grid(x32, X).points.dtype == torch.float64
    assert co.Grid(torch.arange(3)).points.dtype == torch.float64
    # weights are computed in float64: here float32 differences of the sums would lose them
    big = torch.arange(2**23, 2**23 + 4, dtype=torch.float32)
    assert co.Grid(big).weights.tolist() == [0.5, 1, 1, 0.5]
    half = co.Grid(x32).to(dtype=torch.bfloat16)
    assert half.points.dtype == torch.bfloat16 and half.weights.dtype == torch.float32
    np.testing.assert_allclose(half.weights, X_TRAPEZOID, rtol=1e-6)


def test_grid_to_keeps_weights_and_period() -> None:
    grid = co.Grid(
        [0.1, 0.2, 0.6], X, kind=("periodic", "endpoint"), period=1.0, weights=(None, [1.0, 2, 3, 4])
    )
    moved = grid.to("cpu", torch.float32)
    assert moved.points.dtype == moved.weights.dtype == torch.float32
    assert moved.period == grid.period and moved.kind == grid.kind
    np.testing.assert_allclose(moved.weights, grid.weights, rtol=1e-6)
    assert grid.to().points.dtype == torch.float64
    np.testing.assert_array_equal(copy.deepcopy(grid).points, grid.points)
    with pytest.raises(TypeError, match=r"dtype must be a real float dtype, got torch.int64"):
        grid.to(dtype=torch.int64)
    with pytest.raises(ValueError, match=r"axes\[0\] must be strictly increasing"):
        co.Grid.uniform(1000).to(dtype=torch.bfloat16)
    shapes = co.Grid.uniform((3, 4), kind=("endpoint", "periodic")).to("meta")
    assert shapes.points.shape == (12, 2) and shapes.weights.shape == (12,)
    assert shapes.points.is_meta and shapes.period == (math.inf, 1.0)


def test_grid_errors() -> None:
    with pytest.raises(ValueError, match="axes must be at least one 1-D tensor of coordinates, got none"):
        co.Grid()
    with pytest.raises(
        ValueError, match=r"axes\[1\] must be strictly increasing, got axes\[1\]\[0\] = 1 before"
    ):
        co.Grid(X, [1.0, 1.0])
    with pytest.raises(ValueError, match=r"axes\[0\] must be 1-D, got shape \(2, 2\)"):
        co.Grid(torch.eye(2))
    with pytest.raises(ValueError, match=r"axes\[0\] must be 1-D .* got the number 32; .*Grid.uniform"):
        co.Grid(32, 32)
    with pytest.raises(ValueError, match=r"axes\[0\] must be finite, got nan at index 1"):
        co.Grid([0.0, math.nan])
    with pytest.raises(ValueError, match=r"axes\[0\] must have at least 1 entries, got 0"):
        co.Grid([])
    with pytest.raises(ValueError, match=r'axes\[0\] must have at least 2 entries for kind "cell", got 1'):
        co.Grid([0.5], kind="cell")
    with pytest.raises(TypeError, match=r"axes\[0\] must be real numbers, got torch.bool"):
        co.Grid(torch.tensor([False, True]))
    with pytest.raises(ValueError, match="axes must be on one device, got cpu, meta"):
        co.Grid(X, torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match="kind must be one of endpoint, periodic, cell, got 'node'"):
        co.Grid(X, kind="node")
    with pytest.raises(ValueError, match=r"kind must be one name or one per axis \(2\), got 1"):
        co.Grid(X, X, kind=("cell",))


def test_period_errors() -> None:
    with pytest.raises(
        ValueError, match=r"period\[0\] must be given for an unevenly spaced periodic axis, got None"
    ):
        co.Grid(X, kind="periodic")
    with pytest.raises(
        ValueError, match=r"period\[0\] must be given for a periodic axis of 1 point, got None"
    ):
        co.Grid([0.0], kind="periodic")
    with pytest.raises(ValueError, match="x must lie within one period"):
        co.Grid(X, kind="periodic", period=1.0)
    with pytest.raises(ValueError, match="x must lie within one period"):
        co.Grid(X, kind="periodic", period=1.0, weights=(float64([1, 1, 1, 1]),))
    with pytest.raises(ValueError, match=r"period must be None without a periodic axis, got 1.0"):
        co.Grid(X, period=1.0)
    with pytest.raises(
        ValueError, match=r'period\[0\] must be None or inf on an axis of kind "endpoint", got 1\.0'
    ):
        co.Grid(X, [0.0, 0.5], kind=("endpoint", "periodic"), period=(1.0, 1.0))
    with pytest.raises(ValueError, match=r"period must be one number or one per axis \(1\), got 2"):
        co.Grid(X, kind="periodic", period=(2.0, 2.0))
    with pytest.raises(ValueError, match=r"length must be finite and positive, got 0.0"):
        co.Grid(X, kind="periodic", period=0.0)


def test_grid_weights_errors() -> None:
    with pytest.raises(ValueError, match=r"weights\[0\] must have shape \(4,\) like axes\[0\], got \(3,\)"):
        co.Grid(X, weights=[torch.ones(3)])
    with pytest.raises(ValueError, match=r"weights must be one entry per axis \(2\), got a Tensor"):
        co.Grid(X, X, weights=torch.ones(16))
    with pytest.raises(ValueError, match=r"weights must be one entry per axis \(2\), got 1"):
        co.Grid(X, X, weights=[None])
    with pytest.raises(ValueError, match=r"weights\[0\] must be >= 0, got -1"):
        co.Grid(X, weights=[float64([1, -1, 0, 1])])
    with pytest.raises(ValueError, match=r"weights\[0\] must be finite, got nan at index 2"):
        co.Grid(X, weights=[float64([1, 1, math.nan, 1])])
    with pytest.raises(ValueError, match=r"weights\[0\] must be >= 0, got -"):
        co.Grid([0.0, 1.0, 3.5], weights=co.quadrature.simpson)
    with pytest.raises(
        ValueError, match=r'shape\[1\] must be at least 2 on an axis of kind "endpoint", got 1'
    ):
        co.Grid.uniform((3, 1))
    with pytest.raises(ValueError, match=r"bounds must be \(lo, hi\) for each of 2 axes, got 1"):
        co.Grid.uniform((3, 3), [(0, 1)])
    with pytest.raises(ValueError, match=r"bounds\[0\] must be finite with lo < hi, got \(1\.0, 1\.0\)"):
        co.Grid.uniform(3, [(1, 1)])


def test_point_cloud() -> None:
    points = np.random.default_rng(0).random((6, 2))
    cloud = co.PointCloud(points)
    assert isinstance(cloud, Mesh) and len(cloud) == 6 and cloud.ndim == 2
    np.testing.assert_array_equal(cloud.points, points)
    np.testing.assert_allclose(cloud.weights, 1 / 6, rtol=1e-15)
    assert cloud.volume.item() == pytest.approx(1, rel=1e-14)
    assert repr(cloud) == "PointCloud(points=(6, 2), weights=(6,), dtype=torch.float64, device=cpu)"
    weights = np.arange(6.0)
    assert co.PointCloud(points, weights).weights.tolist() == weights.tolist()
    line = co.PointCloud([0.0, 2.0, 1.0])
    assert line.points.tolist() == [[0.0], [2.0], [1.0]] and line.ndim == 1


def test_point_cloud_per_sample() -> None:
    points = torch.rand(3, 5, 2, generator=torch.Generator().manual_seed(0))
    for weights, shape in ((None, (5,)), (torch.ones(5), (5,)), (torch.arange(15.0).view(3, 5), (3, 5))):
        cloud = co.PointCloud(points, weights)
        assert len(cloud) == 5 and cloud.ndim == 2 and cloud.weights.shape == shape
        assert cloud.volume.shape == shape[:-1]
        assert cloud.points.dtype == cloud.weights.dtype == torch.float32
    assert cloud.volume.tolist() == [10.0, 35.0, 60.0]


def test_point_cloud_to() -> None:
    cloud = co.PointCloud(torch.rand(4, 3), torch.rand(4, dtype=torch.float64))
    assert cloud.weights.dtype == torch.float32
    wide = cloud.to(dtype=torch.float64)
    assert wide.points.dtype == wide.weights.dtype == torch.float64
    half = cloud.to("cpu", torch.float16)
    assert half.points.dtype == torch.float16 and half.weights.dtype == torch.float32
    assert cloud.to("meta").points.device.type == "meta"
    with pytest.raises(TypeError, match=r"dtype must be a real float dtype, got torch.complex64"):
        cloud.to(dtype=torch.complex64)


def test_point_cloud_keeps_the_graph() -> None:
    weights = torch.rand(4, dtype=torch.float64, requires_grad=True)
    points = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    cloud = co.PointCloud(points, weights)
    (cloud.weights * cloud.points.sum(-1)).sum().backward()
    torch.testing.assert_close(weights.grad, points.detach().sum(-1))
    torch.testing.assert_close(points.grad, weights.detach()[:, None].expand(4, 2))


def test_point_cloud_from_rules() -> None:
    points = np.random.default_rng(3).random((50, 2))
    cloud = co.PointCloud.voronoi(points.astype(np.float32), [(0, 1), (0, 1)])
    assert cloud.weights.dtype == cloud.points.dtype == torch.float32
    assert cloud.volume.item() == pytest.approx(1, rel=1e-6)
    line = co.PointCloud.voronoi([1.0, 0.0, 0.25])
    assert line.weights.tolist() == [0.375, 0.125, 0.5]
    # two triangles of areas 1/2 and 1
    cloud = co.PointCloud.from_simplices([[0.0, 0], [1, 0], [0, 1], [1, 3]], [[0, 1, 2], [1, 2, 3]])
    np.testing.assert_allclose(cloud.weights, np.array([1, 4, 4, 3]) / 6, rtol=1e-14)


def test_point_cloud_errors() -> None:
    points = torch.rand(4, 2)
    with pytest.raises(
        ValueError, match=r"points must have shape \(N,\), \(N, d\) or \(B, N, d\), got \(1, 1, 1, 1\)"
    ):
        co.PointCloud(torch.zeros(1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"points must be finite, got inf at index \(1, 0\)"):
        co.PointCloud([[0.0], [math.inf]])
    with pytest.raises(ValueError, match=r"weights must have shape \(4,\) for points \(4, 2\), got \(3,\)"):
        co.PointCloud(points, torch.ones(3))
    with pytest.raises(
        ValueError, match=r"weights must have shape \(4,\) or \(2, 4\) for points \(2, 4, 2\), got \(4, 2\)"
    ):
        co.PointCloud(points.expand(2, 4, 2), torch.ones(4, 2))
    with pytest.raises(ValueError, match="weights must be >= 0, got -1"):
        co.PointCloud(points, -torch.ones(4))
    with pytest.raises(ValueError, match="weights must be finite, got nan at index 0"):
        co.PointCloud(points, torch.full((4,), math.nan))
    with pytest.raises(ValueError, match="points and weights must be on one device, got cpu, meta"):
        co.PointCloud(points, torch.ones(4, device="meta"))
    with pytest.raises(TypeError, match=r"weights must be real numbers, got torch.complex64"):
        co.PointCloud(points, torch.ones(4, dtype=torch.complex64))
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        co.PointCloud(torch.zeros(0, 2))


def test_as_mesh() -> None:
    grid = co.Grid(X)
    assert as_mesh(grid) is grid
    cloud = as_mesh(torch.rand(5, 3))
    assert isinstance(cloud, co.PointCloud) and cloud.ndim == 3
    np.testing.assert_allclose(cloud.weights, 0.2, rtol=1e-6)
    assert as_mesh([0.0, 1.0]).points.shape == (2, 1)


def features(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Smooth query, key and value functions on [0, 1], as (1, N, channels): one head."""
    query = torch.stack([1 + x, (3 * x).cos()], -1)
    key = torch.stack([(5 * x).sin(), x.square()], -1)
    value = torch.stack([(6 * x).sin(), x.exp()], -1)
    return query[None], key[None], value[None]


def exact_attention(at: torch.Tensor) -> torch.Tensor:
    """Softmax attention over [0, 1] in the points ``at``, its integrals by 2,000 Simpson panels."""
    x = torch.linspace(0, 1, 4001, dtype=torch.float64)
    w = torch.full((4001,), 2.0, dtype=torch.float64)
    w[1::2] = 4
    w[0] = w[-1] = 1
    query, _, _ = features(at)
    _, key, value = features(x)
    density = w * (query[0] @ key[0].T / math.sqrt(2)).exp()
    return density @ value[0] / density.sum(-1, keepdim=True)


def test_attention_with_mesh_weights_does_not_see_the_sampling() -> None:
    errors = {}
    for n in (8, 16):
        # seven times denser on the left half
        x = torch.cat([torch.linspace(0, 0.5, 7 * n + 1), torch.linspace(0.5, 1, n + 1)[1:]]).double()
        mesh = co.Grid(x)
        query, key, value = features(x)
        exact = exact_attention(x)
        for name, weights in (("mesh", mesh.weights), ("equal", None)):
            out = co.continuum_attention(query, key, value, weights)
            errors[name, n] = (out[0] - exact).abs().max().item()
    assert errors["mesh", 16] < 2e-3
    assert errors["mesh", 8] / errors["mesh", 16] == pytest.approx(
        4, rel=0.1
    )  # the order of the trapezoid rule
    assert min(errors["equal", 8], errors["equal", 16]) > 0.3  # finer sampling does not help


def test_attention_on_scattered_points_in_2d() -> None:
    points = torch.from_numpy(np.random.default_rng(2).random((900, 2)) ** 2)  # denser towards the corner
    fine = co.Grid.uniform((60, 60), kind="cell")

    def attend(mesh: Mesh, weights: torch.Tensor | None) -> torch.Tensor:
        at = torch.tensor([[0.2, 0.3], [0.8, 0.5]], dtype=torch.float64)
        value = mesh.points.sum(-1, keepdim=True).sin()
        return co.continuum_attention(at[None], mesh.points[None], value[None], weights)[0]

    exact = attend(fine, fine.weights)
    cloud = co.PointCloud.voronoi(points, [(0, 1), (0, 1)])
    assert (attend(cloud, cloud.weights) - exact).abs().max() < 5e-3
    assert (attend(cloud, None) - exact).abs().max() > 0.1


def test_bounds_of_one_axis_and_bounds_that_are_none():
    assert torch.equal(co.Grid.uniform(3, (2.0, 4.0)).axes[0], torch.tensor([2.0, 3.0, 4.0]).double())
    assert torch.equal(co.Grid.uniform(3, [(2.0, 4.0)]).axes[0], torch.tensor([2.0, 3.0, 4.0]).double())
    with pytest.raises(TypeError, match=r"bounds must be \(lo, hi\) for each axis, got 8"):
        co.Grid.uniform(8, 8)
    with pytest.raises(ValueError, match=r"bounds must be \(lo, hi\) for each axis, got \(1, 2, 3\)"):
        co.Grid.uniform((4, 4, 4), (1, 2, 3))


def test_a_grid_of_differentiable_axes_has_a_graph_for_each_use():
    x = torch.linspace(0, 1, 5, dtype=torch.float64).requires_grad_()
    grid = co.Grid(x, torch.linspace(0, 1, 4, dtype=torch.float64))
    with torch.no_grad():
        assert not grid.points.requires_grad and not grid.weights.requires_grad
    for _ in range(2):
        (grad,) = torch.autograd.grad((grid.weights * grid.points[:, 0] ** 2).sum(), x)
        # f = x^2: d/dx_i of sum_i w_i x_i^2 with w_i = (x_{i+1} - x_{i-1}) / 2, at a step of 1/4.
        y = x.detach()
        inner = y[1:-1] * (y[2:] - y[:-2]) + 0.5 * (y[:-2] ** 2 - y[2:] ** 2)
        torch.testing.assert_close(grad[1:-1], inner, rtol=0, atol=1e-14)


def test_a_grid_computes_its_points_once():
    grid = co.Grid.uniform((4, 3))
    assert grid.points is grid.points and grid.weights is grid.weights
