"""Noise of inputs: its size at each point, and what is refused."""

import pytest
import torch

import continuum_ops as co


@pytest.mark.parametrize("level", [0.0, 0.01, 0.1])
def test_noise_has_the_share_of_the_deviation_at_each_point(level):
    g = torch.Generator().manual_seed(0)
    spread = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    values = 5 + spread * torch.randn(20000, 3, generator=g, dtype=torch.float64)
    noise = co.data.with_noise(values, level, seed=1) - values
    # The deviation of a deviation of n normal numbers is 1 / sqrt(2 n) of it: five of them, twice.
    torch.testing.assert_close(noise.std(0), level * spread, rtol=0.05, atol=1e-12)
    assert (noise.mean(0).abs() <= 5 * level * spread / 20000**0.5 + 1e-12).all()


def test_seeds_and_given_deviations():
    values, spread = torch.zeros(4, 2), torch.tensor([1.0, 2.0])
    one = co.data.with_noise(values, 0.5, seed=3, deviation=spread)
    assert torch.equal(one, co.data.with_noise(values, 0.5, seed=3, deviation=spread))
    expected = 0.5 * spread * torch.randn(4, 2, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(one, expected)
    g = torch.Generator().manual_seed(3)
    assert torch.equal(one, co.data.with_noise(values, 0.5, seed=g, deviation=spread))
    assert not torch.equal(one, co.data.with_noise(values, 0.5, seed=g, deviation=spread))


@pytest.mark.parametrize(
    "values, options, error, message",
    [
        (torch.zeros(3, 2).long(), {"level": 0.1}, TypeError, "values must be a floating-point Tensor"),
        (torch.zeros(3, 2), {"level": -0.1}, ValueError, "level must be >= 0 and finite, got -0.1"),
        (torch.zeros(3, 2), {"level": float("nan")}, ValueError, "level must be >= 0 and finite, got nan"),
        (torch.zeros(1, 2), {"level": 0.1}, ValueError, "at least 2 samples"),
        (
            torch.zeros(3, 2),
            {"level": 0.1, "deviation": torch.ones(3)},
            ValueError,
            r"deviation must have shape \(2,\), got \(3,\)",
        ),
    ],
)
def test_errors(values, options, error, message):
    with pytest.raises(error, match=message):
        co.data.with_noise(values, **options, seed=0)
