"""Burgers data: against an exponential integrator, the energy law, the distribution, the sub-sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import continuum_ops as co
from continuum_ops.data import burgers

NU = 0.1 / (2 * math.pi)


def etdrk4(u0: np.ndarray, nu: float, T: float, steps: int) -> np.ndarray:
    """Exponential Runge-Kutta method of Cox and Matthews, its coefficients by contour integrals."""
    n, h = len(u0), T / steps
    k = np.arange(n // 2 + 1)
    wave, lin = 2j * np.pi * k * (k < n / 2), -nu * (2 * np.pi * k) ** 2
    keep = k < n / 3
    roots = np.exp(1j * np.pi * (np.arange(1, 33) - 0.5) / 32)
    z = h * lin[:, None] + roots
    e, e2 = np.exp(h * lin), np.exp(h * lin / 2)
    q = h * np.mean((np.exp(z / 2) - 1) / z, 1).real
    f1 = h * np.mean((-4 - z + np.exp(z) * (4 - 3 * z + z**2)) / z**3, 1).real
    f2 = h * np.mean((2 + z + np.exp(z) * (z - 2)) / z**3, 1).real
    f3 = h * np.mean((-4 - 3 * z - z**2 + np.exp(z) * (4 - z)) / z**3, 1).real

    def slope(v):
        return -0.5 * wave * np.fft.rfft(np.fft.irfft(v * keep, n) ** 2)

    v = np.fft.rfft(u0)
    for _ in range(steps):
        a = slope(v)
        va = e2 * v + q * a
        b = slope(va)
        vb = e2 * v + q * b
        c = slope(vb)
        d = slope(e2 * va + q * (2 * c - a))
        v = e * v + f1 * a + 2 * f2 * (b + c) + f3 * d
    return np.fft.irfft(v, n)


def test_agrees_with_an_exponential_integrator():
    data = burgers(3, 512, seed=1, resolution=512, dtype=torch.float64)
    for u0, u1 in zip(data.input[..., 0].numpy(), data.target[..., 0].numpy(), strict=True):
        error = np.abs(etdrk4(u0, NU, 1.0, 2000) - u1).max()
        assert error <= 1e-6 * np.abs(u1).max()


def test_converges_to_it_at_fourth_order_for_smooth_data():
    data = burgers(1, 256, seed=2, resolution=256, T=0.2, dtype=torch.float64)
    later = burgers(1, 256, seed=2, resolution=256, T=0.3, dtype=torch.float64).target[0, :, 0].numpy()
    smooth = data.target[0, :, 0].numpy()  # by now the rough initial condition is analytic
    errors = [np.abs(etdrk4(smooth, NU, 0.1, steps) - later).max() for steps in (10, 20, 40)]
    assert errors[0] > 12 * errors[1] > 12 * 12 * errors[2] and errors[2] < 1e-8


def test_energy_law():
    """d/dt |u|^2 / 2 = -nu |u_x|^2 (GT eq. 19 with its factors), by a central difference in T."""
    step = 1e-4
    before, at, after = (
        burgers(4, 1024, seed=3, resolution=1024, T=t, dtype=torch.float64).target[..., 0].numpy()
        for t in (0.5 - step, 0.5, 0.5 + step)
    )
    rate = ((after**2).mean(1) - (before**2).mean(1)) / (4 * step)
    wave = 2j * np.pi * np.arange(513)
    slopes = np.fft.irfft(wave * np.fft.rfft(at), 1024)
    np.testing.assert_allclose(rate, -NU * (slopes**2).mean(1), rtol=1e-6)


def test_distribution_of_the_initial_conditions():
    """Variance of each Fourier mode: E |u_k|^2 = (25 / ((2 pi k)^2 + 25))^2, the mean 0."""
    data = burgers(400, 64, seed=4, resolution=64, dtype=torch.float64)
    spectrum = np.fft.rfft(data.input[..., 0].numpy(), axis=1, norm="forward")
    power = (np.abs(spectrum) ** 2).mean(0)
    k = np.arange(1, 32)
    true = (25 / ((2 * np.pi * k) ** 2 + 25)) ** 2
    assert power[0] < 1e-30
    # An exponential distribution per mode: relative deviation 1 / sqrt(400) of the mean, 5 of them allowed.
    assert (np.abs(power[1:32] / true - 1) < 0.25).all()
    assert np.abs((power[1:32] / true).mean() - 1) < 0.05


def test_sub_sampling_and_prefixes():
    fine = burgers(3, 2048, seed=5, resolution=2048)
    coarse = burgers(2, 512, seed=5, resolution=2048)
    assert torch.equal(fine.input[:2, ::4], coarse.input) and torch.equal(fine.target[:2, ::4], coarse.target)
    assert torch.equal(fine.grid.points[::4], coarse.grid.points)
    assert coarse.grid.kind == ("periodic",) and coarse.input.shape == (2, 512, 1)
    assert coarse.input.dtype == torch.float32 == coarse.grid.dtype
    assert not torch.equal(burgers(1, 512, seed=6, resolution=2048).input, coarse.input[:1])


def test_resolution_of_the_paper_is_converged():
    """The same modes on twice the points: sub-sampled solutions agree far below float32."""
    for n in (2048, 8192):
        data = burgers(1, 512, seed=7, resolution=n, dtype=torch.float64)
        spectrum = np.fft.rfft(data.target[0, :, 0].numpy(), norm="forward")
        assert np.abs(spectrum[200:]).max() < 1e-12 * np.abs(spectrum).max()


def test_small_viscosity_is_refused():
    with pytest.raises(ValueError, match=r"nu \* T must be large enough .* got nu = 0.0005, T = 1"):
        burgers(1, seed=0, nu=5e-4)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"n": 0}, ValueError, "n must be at least 1, got 0"),
        ({"points": 500}, ValueError, "points must divide resolution, got points = 500, resolution = 8192"),
        ({"resolution": 511, "points": 7}, ValueError, "resolution must be even, got 511"),
        ({"nu": 0.0}, ValueError, "nu must be finite and positive, got 0.0"),
        ({"dtype": torch.float16}, TypeError, "dtype must be torch.float32 or torch.float64"),
    ],
)
def test_errors(change, error, message):
    with pytest.raises(error, match=message):
        co.data.burgers(**{"n": 1, "seed": 0, **change})
