"""Pointwise normalisation: statistics on the grid of the samples, interpolation elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import continuum_ops as co
from continuum_ops.training import PointwiseNormalizer, ScaleNormalizer


def samples(grid: co.Grid, n: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(n, len(grid), 2, generator=generator, dtype=torch.float64)
    y.view(n, *grid.shape, 2)[:, 0] = 3.0
    return y


def test_statistics_on_their_own_grid() -> None:
    grid = co.Grid.uniform((4, 5))
    y = samples(grid)
    normalizer = PointwiseNormalizer(y, grid)
    mean, std = y.numpy().mean(0), y.numpy().std(0, ddof=1)
    z = normalizer.encode(y, grid).numpy()
    inside = std > 0
    np.testing.assert_allclose(
        z[:, inside], ((y.numpy() - mean) / np.where(inside, std, 1))[:, inside], atol=1e-12
    )
    assert (z[:, ~inside] == 0).all() and (~inside).sum() == 10
    torch.testing.assert_close(normalizer.decode(normalizer.encode(y, grid), grid), y)


def test_where_all_samples_agree_the_value_is_given_back() -> None:
    grid = co.Grid.uniform((4, 5))
    decoded = PointwiseNormalizer(samples(grid), grid).decode(torch.full((1, 20, 2), 9.0).double(), grid)
    assert (decoded.view(4, 5, 2)[0] == 3.0).all()


def test_linear_interpolation_on_another_grid() -> None:
    axes = (torch.tensor([0.0, 0.3, 1.0]).double(), torch.tensor([0.0, 0.5, 0.6, 1.0]).double())
    grid = co.Grid(*axes)
    x, y = grid.points.unbind(1)
    # Bilinear in the cells, so its interpolant is itself; mean f, standard deviation g.
    f, g = 1 + x - 2 * y + 3 * x * y, 2 + x + y * x
    pair = torch.stack([f - g / 2**0.5, f + g / 2**0.5])[..., None]
    normalizer = PointwiseNormalizer(pair, grid)
    fine = co.Grid.uniform((6, 9))
    u, v = fine.points.unbind(1)
    expected = (1 + u - 2 * v + 3 * u * v) + 5 * (2 + u + v * u)
    decoded = normalizer.decode(torch.full((1, 54, 1), 5.0).double(), fine)
    np.testing.assert_allclose(decoded[0, :, 0].numpy(), expected.numpy(), atol=1e-12)
    outside = co.Grid(torch.tensor([-1.0, 2.0]).double(), torch.tensor([0.0, 1.0]).double())
    ends = normalizer.decode(torch.zeros(1, 4, 1).double(), outside)[0, :, 0]
    np.testing.assert_allclose(ends.numpy(), [1, -1, 2, 3], atol=1e-12)


def test_state_and_errors() -> None:
    grid = co.Grid.uniform((4, 5))
    normalizer = PointwiseNormalizer(samples(grid), grid)
    assert sorted(normalizer.state_dict()) == ["axis0", "axis1", "mean", "std"]
    for wrong in (torch.ones(3, 19, 1), torch.ones(1, 20, 1), torch.ones(20, 1)):
        with pytest.raises(ValueError, match=r"samples must have shape \(n, 20, C\) with n >= 2"):
            PointwiseNormalizer(wrong, grid)


def test_linear_interpolation_at_points() -> None:
    """Bilinear in the cells, so its interpolant is itself; beyond the grid the nearest edge's value."""
    axes = (torch.tensor([0.0, 0.3, 1.0]).double(), torch.tensor([0.0, 0.5, 0.6, 1.0]).double())
    grid = co.Grid(*axes)

    def f(p: torch.Tensor) -> torch.Tensor:
        x, y = p.unbind(1)
        return torch.stack([1 + x - 2 * y + 3 * x * y, x * y], 1)

    def g(p: torch.Tensor) -> torch.Tensor:
        return 2 + p.sum(1, keepdim=True)

    at = grid.points
    pair = torch.stack([f(at) - g(at) / 2**0.5, f(at) + g(at) / 2**0.5])
    normalizer = PointwiseNormalizer(pair, grid)
    points = torch.rand(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 0.5
    cloud = co.PointCloud(points)
    inside = points.clamp(0, 1)
    z = torch.randn(3, 50, 2, dtype=torch.float64)
    expected = (f(inside) + g(inside) * z).numpy()
    decoded = normalizer.decode(z, cloud)
    np.testing.assert_allclose(decoded.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(normalizer.encode(decoded, cloud).numpy(), z.numpy(), atol=1e-12)


def test_scales_by_channel() -> None:
    y = torch.randn(4, 9, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1
    flat = y.numpy().reshape(-1, 2)
    low, high = flat.min(0), flat.max(0)
    for kind, shift, scale in (
        ("standard", flat.mean(0), flat.std(0, ddof=1)),
        ("rms", 0.0, np.sqrt((flat**2).mean(0))),
        ("range", (low + high) / 2, (high - low) / 2),
    ):
        normalizer = ScaleNormalizer(y, kind)
        z = normalizer.encode(y)
        np.testing.assert_allclose(z.numpy(), (y.numpy() - shift) / scale, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(normalizer.decode(z), y)
        assert sorted(normalizer.state_dict()) == ["scale", "shift"]
    positive, log = y.exp(), flat
    normalizer = ScaleNormalizer(positive, "log")
    np.testing.assert_allclose(
        normalizer.encode(positive).numpy(), (y.numpy() - log.mean(0)) / log.std(0, ddof=1), atol=1e-12
    )
    torch.testing.assert_close(normalizer.decode(normalizer.encode(positive)), positive)
    np.testing.assert_allclose(normalizer.center().numpy(), np.exp(log.mean(0)), rtol=1e-12)
    with pytest.raises(ValueError, match='samples must be > 0 for "log", got -'):
        ScaleNormalizer(y, "log")
    # A channel that never changes keeps its size.
    constant = ScaleNormalizer(torch.full((2, 3, 1), 5.0), "standard")
    assert constant.encode(torch.full((1, 3, 1), 7.0)).flatten().tolist() == [2.0] * 3
    with pytest.raises(ValueError, match="kind must be standard, rms, range or log, was 'max'"):
        ScaleNormalizer(y, "max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"samples must have shape \(n, N, C\), was \(9, 2\)"):
        ScaleNormalizer(y[0], "rms")
