"""Latent meshes: what pooling, sampling and farthest-point sampling promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import continuum_ops as co
from continuum_ops.models import farthest_point_mesh, pool_mesh, sample_mesh


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["endpoint", "cell"])
@pytest.mark.parametrize("n", [11, 43, 64, 421])
def test_an_even_axis_becomes_its_cell_centres_whatever_its_resolution(kind: str, n: int) -> None:
    grid = pool_mesh(co.Grid.uniform((n, 7), bounds=((0, 2), (-1, 1)), kind=kind), (8, 7))
    np.testing.assert_allclose(grid.axes[0].numpy(), (np.arange(8) + 0.5) / 4, atol=1e-12)
    np.testing.assert_allclose(grid.axis_weights[0].numpy(), 0.25, atol=1e-12)
    assert grid.kind == ("cell", kind)
    assert torch.equal(grid.axes[1], co.Grid.uniform((n, 7), ((0, 2), (-1, 1)), kind=kind).axes[1])
    assert grid.volume.item() == pytest.approx(4.0)


@pytest.mark.parametrize("n", [8, 12, 21])
def test_a_periodic_axis_stays_periodic(n: int) -> None:
    grid = pool_mesh(co.Grid.uniform(n, (0, 3), kind="periodic"), (6,))
    np.testing.assert_allclose(grid.axes[0].numpy(), np.arange(6) / 2, atol=1e-12)
    np.testing.assert_allclose(grid.weights.numpy(), 0.5, atol=1e-12)
    assert grid.kind == ("periodic",) and grid.period == (3.0,)


def test_a_graded_axis_stays_graded() -> None:
    x = torch.linspace(0, 1, 401, dtype=torch.float64) ** 2
    grid = pool_mesh(co.Grid(x), (10,))
    # Ten equal parts of the index: edges at (i / 10)^2.
    edges = (np.arange(11) / 10) ** 2
    np.testing.assert_allclose(grid.weights.numpy(), np.diff(edges), atol=1e-12)
    np.testing.assert_allclose(grid.axes[0].numpy(), ((np.arange(10) + 0.5) / 10) ** 2, atol=1e-5)


def test_more_points_than_there_are() -> None:
    grid = pool_mesh(co.Grid.uniform(3), (5,))
    np.testing.assert_allclose(grid.axes[0].numpy(), (np.arange(5) + 0.5) / 5, atol=1e-12)


def test_structured_points_are_averaged_over_blocks() -> None:
    points, w = rand(2, 6, 4, 2, seed=1), rand(2, 6, 4, seed=2)
    mesh = co.PointCloud(points.flatten(1, 2), w.flatten(1))
    pooled = pool_mesh(mesh, (3, 2), shape=(6, 4))
    blocks = points.numpy().reshape(2, 3, 2, 2, 2, 2).mean((2, 4)).reshape(2, 6, 2)
    np.testing.assert_allclose(pooled.points.numpy(), blocks, atol=1e-14)
    sums = w.numpy().reshape(2, 3, 2, 2, 2).sum((2, 4)).reshape(2, 6)
    np.testing.assert_allclose(pooled.weights.numpy(), sums, atol=1e-14)
    odd = pool_mesh(rand(221 * 51, 2), (111, 26), shape=(221, 51))
    assert odd.points.shape == (111 * 26, 2) and odd.volume.item() == pytest.approx(1.0)
    line = pool_mesh(torch.arange(6.0)[:, None], (2,), shape=(6,))
    assert line.points[:, 0].tolist() == [1.0, 4.0]


def farthest(points: np.ndarray, n: int, period: float | None = None) -> list[int]:
    def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        difference = np.abs(a - b)
        if period is not None:
            difference = np.minimum(difference, period - difference)
        return (difference**2).sum(-1)

    chosen = [int(distance(points, points.mean(0)).argmin())]
    while len(chosen) < n:
        nearest = np.min([distance(points, points[i]) for i in chosen], axis=0)
        chosen.append(int(nearest.argmax()))
    return chosen


@pytest.mark.parametrize("period", [None, 1.0])
def test_farthest_points_and_their_weights(period: float | None) -> None:
    points, w = rand(40, 2, seed=1), rand(40, seed=2)
    chosen = farthest(points.numpy(), 9, period)
    mesh = farthest_point_mesh(co.PointCloud(points, w), 9, period=None if period is None else (1.0, 1.0))
    assert torch.equal(mesh.points, points[chosen])
    difference = np.abs(points.numpy()[:, None] - points.numpy()[chosen])
    if period is not None:
        difference = np.minimum(difference, period - difference)
    owner = (difference**2).sum(-1).argmin(1)
    np.testing.assert_allclose(mesh.weights.numpy(), np.bincount(owner, w.numpy(), 9), atol=1e-14)
    assert mesh.volume.item() == pytest.approx(w.sum().item())


def test_one_mesh_per_sample() -> None:
    points = rand(3, 30, 2, seed=1)
    together = farthest_point_mesh(points, 7)
    assert together.points.shape == (3, 7, 2)
    for b in range(3):
        alone = farthest_point_mesh(points[b], 7)
        assert torch.equal(together.points[b], alone.points)
        torch.testing.assert_close(together.weights[b], alone.weights)


def test_all_points_are_the_mesh_itself() -> None:
    mesh = co.PointCloud(rand(12, 2, seed=1), rand(12, seed=2))
    for latent in (farthest_point_mesh(mesh, 12), sample_mesh(mesh, 12)):
        order = latent.points[:, 0].argsort()
        known = mesh.points[:, 0].argsort()
        assert torch.equal(latent.points[order], mesh.points[known])
        torch.testing.assert_close(latent.weights[order], mesh.weights[known])


def test_sampling_is_seeded_and_without_repetition() -> None:
    mesh = co.PointCloud(rand(50, 2, seed=1))
    first, again, other = (
        sample_mesh(mesh, 20, generator=torch.Generator().manual_seed(s)).points for s in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len(first.unique(dim=0)) == 20
    per_sample = sample_mesh(rand(2, 50, 2), 20)
    assert per_sample.points.shape == (2, 20, 2) and per_sample.volume.tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: pool_mesh(rand(8, 2), (2, 2)),
            TypeError,
            "mesh must be a Grid where shape is None, was Tensor",
        ),
        (
            lambda: pool_mesh(co.Grid.uniform((4, 4)), (2,)),
            ValueError,
            "latent_shape must be 2 sizes of at least 1",
        ),
        (
            lambda: pool_mesh(co.Grid.uniform(4), (0,)),
            ValueError,
            r"latent_shape must be 1 sizes .*, was \(0,\)",
        ),
        (
            lambda: pool_mesh(rand(8, 2), (2, 2), shape=(3, 3)),
            ValueError,
            r"shape must be 1 to 3 sizes with product 8, the number of points, was \(3, 3\)",
        ),
        (lambda: farthest_point_mesh(rand(8, 2), 9), ValueError, "n must be between 1 and .* 8, was 9"),
        (lambda: sample_mesh(rand(8, 2), 0), ValueError, "n must be between 1 and .* 8, was 0"),
        (lambda: sample_mesh(rand(8, 2), 2.0), TypeError, "n must be an int, was float"),
    ],
)
def test_errors(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_periods_of_infinity_are_none() -> None:
    points = rand(20, 2, seed=1)
    free = farthest_point_mesh(points, 5)
    assert torch.equal(farthest_point_mesh(points, 5, period=(math.inf, math.inf)).points, free.points)
