"""Periodic flow: exact and manufactured solutions, orders, an independent solver, the random field."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

import continuum_ops as co
from continuum_ops.data import kolmogorov, solve_vorticity, vorticity


def square(size: int, length: float = 2 * math.pi) -> tuple[np.ndarray, np.ndarray]:
    x = length * np.arange(size) / size
    return tuple(np.meshgrid(x, x, indexing="ij"))


def smooth(size: int) -> np.ndarray:
    """A vorticity of mean 0 whose Fourier series decays exponentially."""
    x, y = square(size)
    w = np.exp(np.sin(x + 0.3) + 0.5 * np.cos(y)) * np.sin(x - y) + np.cos(2 * x + y)
    return w - w.mean()


@pytest.mark.parametrize("size", [10, 16, 26])
@pytest.mark.parametrize("length", [1.0, 2 * math.pi])
def test_one_shell_decays(size: int, length: float) -> None:
    """On modes of one |k| the nonlinear term is 0: w(t) = exp(-nu k^2 t) w(0) (Taylor and Green)."""
    x, y = (2 * math.pi / length * part for part in square(size, length))
    w = np.cos(x) * np.cos(y) + 0.4 * np.sin(x + y + 0.3)
    nu = 0.05 * length**2
    found = solve_vorticity(
        torch.from_numpy(w), [0.0, 0.3, 1.0], nu=nu, dt=0.05 if length > 1 else 0.02, length=length
    )
    rate = 2 * (2 * math.pi / length) ** 2 * nu
    for frame, t in zip(found.numpy(), (0.0, 0.3, 1.0), strict=True):
        np.testing.assert_allclose(frame, math.exp(-rate * t) * w, rtol=0, atol=1e-13)


def manufactured(size: int, nu: float) -> tuple[np.ndarray, np.ndarray]:
    """psi = sin x sin 2y + 0.5 cos(2x + y), w = -Laplace psi, f = u . grad w - nu Laplace w, by hand."""
    x, y = square(size)
    s, c = np.sin(2 * x + y), np.cos(2 * x + y)
    w = 5 * np.sin(x) * np.sin(2 * y) + 2.5 * c  # 5 psi
    u = 2 * np.sin(x) * np.cos(2 * y) - 0.5 * s
    v = -np.cos(x) * np.sin(2 * y) + s
    wx, wy = 5 * np.cos(x) * np.sin(2 * y) - 5 * s, 10 * np.sin(x) * np.cos(2 * y) - 2.5 * s
    laplace = -5 * w
    # And another shell, psi + cos 3x / 9: w + cos 3x, v + sin 3x / 3.
    w, laplace = w + np.cos(3 * x), laplace - 9 * np.cos(3 * x)
    v, wx = v + np.sin(3 * x) / 3, wx - 3 * np.sin(3 * x)
    return w, u * wx + v * wy - nu * laplace


def test_a_manufactured_steady_flow_at_fourth_order() -> None:
    w, force = manufactured(24, 0.3)
    errors = []
    for dt in (0.05, 0.025, 0.0125):
        found = solve_vorticity(
            torch.from_numpy(w), [0.4], nu=0.3, dt=dt, forcing=torch.from_numpy(force)
        ).numpy()
        errors.append(np.abs(found[0] - w).max())
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    assert ((orders > 3.7) & (orders < 4.3)).all(), errors
    assert errors[-1] < 1e-3


def padded_galerkin(w: np.ndarray, T: float, nu: float, force: np.ndarray) -> np.ndarray:
    """The same modes by another road: full complex FFTs, u dw/dx + v dw/dy on twice the points, DOP853."""
    size = len(w)
    k = np.fft.fftfreq(size, 1 / size)
    keep = (np.abs(k) < size / 3)[:, None] & (np.abs(k) < size / 3)
    kx, ky = np.meshgrid(k, k, indexing="ij")
    square = np.where(keep & (kx**2 + ky**2 > 0), kx**2 + ky**2, 1)
    fine = np.flatnonzero(np.abs(np.fft.fftfreq(2 * size, 1 / (2 * size))) < size / 3)
    coarse = np.flatnonzero(np.abs(k) < size / 3)
    f = np.fft.fft2(force, norm="forward") * keep

    def at_points(spectrum: np.ndarray) -> np.ndarray:
        padded = np.zeros((2 * size, 2 * size), dtype=complex)
        padded[np.ix_(fine, fine)] = spectrum[np.ix_(coarse, coarse)]
        return np.fft.ifft2(padded, norm="forward").real

    def slope(_: float, flat: np.ndarray) -> np.ndarray:
        v = flat.reshape(size, size)
        psi = v / square
        product = at_points(1j * ky * psi) * at_points(1j * kx * v) - at_points(1j * kx * psi) * at_points(
            1j * ky * v
        )
        advection = np.zeros_like(v)
        advection[np.ix_(coarse, coarse)] = np.fft.fft2(product, norm="forward")[np.ix_(fine, fine)]
        return (f - advection - nu * square * v).ravel()

    start = (np.fft.fft2(w, norm="forward") * keep).ravel()
    end = solve_ivp(slope, (0, T), start, method="DOP853", rtol=1e-11, atol=1e-13).y[:, -1]
    return np.fft.ifft2(end.reshape(size, size), norm="forward").real


def test_another_solver_and_the_order_in_time() -> None:
    w = smooth(24) * 2
    x, y = square(24)
    force = np.sin(x) - 4 * np.cos(4 * y)
    exact = padded_galerkin(w, 0.6, 0.02, force)
    assert np.abs(exact - w).max() > 1  # not a small change
    errors = []
    for dt in (0.02, 0.01, 0.005):
        found = solve_vorticity(torch.from_numpy(w), [0.6], nu=0.02, dt=dt, forcing=torch.from_numpy(force))
        errors.append(np.abs(found[0].numpy() - exact).max())
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    assert ((orders > 3.7) & (orders < 4.4)).all(), errors
    assert errors[-1] < 1e-6


def test_spectral_convergence_in_space() -> None:
    fine = solve_vorticity(torch.from_numpy(smooth(96)), [0.3], nu=0.1, dt=0.01)[0]
    errors = []
    for size in (12, 24, 48):
        found = solve_vorticity(torch.from_numpy(smooth(size)), [0.3], nu=0.1, dt=0.01)[0]
        errors.append((found - fine[:: 96 // size, :: 96 // size]).abs().max().item())
    # The number of digits about doubles with the points.
    assert errors[0] > 30 * errors[1] and errors[1] > 1000 * errors[2] and errors[2] < 1e-6, errors


def test_batches_and_shapes() -> None:
    w = torch.from_numpy(np.stack([smooth(12), 2 * smooth(12).T]))
    together = solve_vorticity(w[:, None], [0.1, 0.2], nu=0.1, dt=0.05)
    assert together.shape == (2, 1, 2, 12, 12) and together.dtype == torch.float64
    for one, pair in zip(w, together, strict=True):
        torch.testing.assert_close(
            solve_vorticity(one, [0.1, 0.2], nu=0.1, dt=0.05), pair[0], rtol=0, atol=1e-13
        )


def test_kolmogorov_laminar_flow() -> None:
    """From rest w = -m cos(m y) (1 - exp(-nu m^2 t)) / (nu m^2): u . grad w stays 0."""
    data = kolmogorov(1, 24, seed=0, T=2.0, lag=0.5, wave=3, nu=0.5, sigma=1e-13, dtype=torch.float64)
    y = 2 * math.pi * np.arange(24) / 24
    for found, t in ((data.input, 2.0), (data.target, 2.5)):
        exact = -3 * np.cos(3 * y) * (1 - math.exp(-4.5 * t)) / 4.5
        np.testing.assert_allclose(
            found[0, :, 0].view(24, 24).numpy(), np.tile(exact, (24, 1)), rtol=0, atol=1e-5
        )


def test_vorticity_from_rest() -> None:
    """The force is one shell, k^2 = 8 pi^2: w = f (1 - exp(-8 pi^2 nu t)) / (8 pi^2 nu)."""
    data = vorticity(
        1, 12, seed=0, solver_resolution=24, times=[0.5, 3.0], sigma=1e-13, nu=0.01, dtype=torch.float64
    )
    x, y = (part.ravel() for part in square(12, 1.0))
    f = 0.1 * (np.sin(2 * math.pi * (x + y)) + np.cos(2 * math.pi * (x + y)))
    rate = 8 * math.pi**2 * 0.01
    for frame, t in zip(data.vorticity[0, ..., 0].numpy(), (0.5, 3.0), strict=True):
        np.testing.assert_allclose(frame, f * (1 - math.exp(-rate * t)) / rate, rtol=0, atol=1e-8)
    np.testing.assert_array_equal(data.grid.points.numpy(), np.stack([x, y], 1))
    assert data.times.tolist() == [0.5, 3.0]


def test_samples_follow_the_equation_from_their_initial_vorticity() -> None:
    data = vorticity(2, 16, seed=3, solver_resolution=None, times=[0, 1], sigma=7**1.5, dtype=torch.float64)
    x, y = square(16, 1.0)
    phase = 2 * math.pi * (x + y)
    force = torch.from_numpy(0.1 * (np.sin(phase) + np.cos(phase)))
    first, second = data.vorticity.view(2, 2, 16, 16).unbind(1)
    again = solve_vorticity(first, [1.0], nu=1e-4, dt=0.01, forcing=force, length=1.0)[:, 0]
    torch.testing.assert_close(again, second, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["vorticity", "kolmogorov"])
def test_the_law_of_the_initial_vorticity(name: str) -> None:
    """E |w_k|^2 = sigma^2 (|k|^2 + tau^2)^-alpha / area, k in radians per length, and 0 for the mean."""
    n, size = 500, 16
    if name == "vorticity":
        frames = vorticity(
            n, size, seed=1, solver_resolution=None, times=[0.0], dtype=torch.float64
        ).vorticity[:, 0]
        unit, scale, alpha, area = 2 * math.pi, 7**1.5, 2.5, 1.0
    else:
        law = {"T": 1e-9, "lag": 1e-9, "nu": 1e-9}
        frames = kolmogorov(n, size, seed=1, dtype=torch.float64, **law).input
        unit, scale, alpha, area = 1.0, 7**3, 5.0, 4 * math.pi**2
    w = frames.view(n, size, size).numpy()
    power = (np.abs(np.fft.fft2(w, norm="forward")) ** 2).mean(0)
    k = np.fft.fftfreq(size, 1 / size)
    kept = (np.abs(k) < size / 3)[:, None] & (np.abs(k) < size / 3)
    true = scale * (unit**2 * (k[:, None] ** 2 + k**2) + 49) ** -alpha / area
    assert power[0, 0] < 1e-30 and (power[~kept] < 1e-30).all()
    kept[0, 0] = False
    # An exponential law per mode: 5 deviations of its mean.
    assert (np.abs(power[kept] / true[kept] - 1) < 5 / np.sqrt(n)).all()
    assert abs((power[kept] / true[kept]).mean() - 1) < 0.02
    # The real and the imaginary part, and different modes, are independent.
    spectrum = np.fft.fft2(w, norm="forward")
    a, b = spectrum[:, 1, 2] / np.sqrt(true[1, 2]), spectrum[:, -1, 2] / np.sqrt(true[1, 2])
    for product in (a * a, a * b, a * b.conj()):
        assert abs(product.mean()) < 5 / np.sqrt(n)


def test_one_function_on_every_grid_and_seeds() -> None:
    options = {"solver_resolution": 24, "times": [0.0, 0.5], "seed": 5}
    fine = vorticity(3, 24, **options)
    coarse = vorticity(2, 8, start=1, **options)
    picked = fine.vorticity[1:].view(2, 2, 24, 24)[..., ::3, ::3].reshape(2, 2, 64, 1)
    assert torch.equal(coarse.vorticity, picked)
    assert torch.equal(fine.vorticity, vorticity(3, 24, **options).vorticity)
    assert not torch.equal(fine.vorticity, vorticity(3, 24, **{**options, "seed": 6}).vorticity)
    assert fine.vorticity.dtype == fine.times.dtype == fine.grid.dtype == torch.float32
    assert fine.grid.kind == ("periodic", "periodic") and fine.grid.period == (1.0, 1.0)
    # The initial vorticity on a larger grid has the same modes and more: the low ones agree.
    big = vorticity(1, 48, seed=5, solver_resolution=None, times=[0.0], dtype=torch.float64)
    low = np.fft.fft2(big.vorticity[0, 0, :, 0].view(48, 48).numpy(), norm="forward")[:8, :8]
    same = np.fft.fft2(fine.vorticity[0, 0, :, 0].double().view(24, 24).numpy(), norm="forward")[:8, :8]
    np.testing.assert_allclose(low, same, rtol=0, atol=1e-8)


def test_samples_solved_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As devices other than the CPU do."""
    options = {"seed": 2, "T": 0.2, "dtype": torch.float64}
    alone = kolmogorov(3, 16, **options)
    monkeypatch.setattr(sys.modules["continuum_ops.data.navier_stokes"], "_batch", lambda device: 2)
    together = kolmogorov(3, 16, **options)
    torch.testing.assert_close(together.target, alone.target, rtol=0, atol=1e-12)


def test_kolmogorov_samples() -> None:
    options = {"seed": 2, "T": 0.4, "lag": 0.1, "solver_resolution": 24}
    data = kolmogorov(2, 12, **options)
    assert data.input.shape == data.target.shape == (2, 144, 1) and data.input.dtype == torch.float32
    assert torch.equal(kolmogorov(1, 12, start=1, **options).target, data.target[1:])
    later = kolmogorov(2, 12, **{**options, "T": 0.5})
    torch.testing.assert_close(later.input, data.target, rtol=0, atol=1e-5)
    assert data.grid.period == (2 * math.pi,) * 2
    assert abs(data.input.mean().item()) < 1e-6


def test_an_unstable_step_is_refused() -> None:
    w = torch.from_numpy(20 * smooth(32))
    with pytest.raises(
        ValueError, match=r"dt must be at most 0\.00\d+, where the scheme is stable, got 0\.01"
    ):
        solve_vorticity(w, [0.02], nu=1e-3, dt=0.01)
    with pytest.raises(ValueError, match=r"dt must be smaller: the flow grew without bound with 0\.5"):
        solve_vorticity(1e3 * w, [20.0], nu=1e-3, dt=0.5)
    assert solve_vorticity(w, [0.1], nu=1e-3, dt=0.002).isfinite().all()


ones = torch.ones(4, 4)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: kolmogorov(0, 16, seed=0), ValueError, "n must be at least 1, got 0"),
        (lambda: kolmogorov(1, 13, seed=0), ValueError, "resolution must be even, got 13"),
        (
            lambda: kolmogorov(1, 8, seed=0, solver_resolution=27),
            ValueError,
            "solver_resolution must be even, got 27",
        ),
        (
            lambda: kolmogorov(1, 16, seed=0, solver_resolution=24),
            ValueError,
            "resolution must divide solver_resolution = 24, got 16",
        ),
        (
            lambda: kolmogorov(1, 12, seed=0),
            ValueError,
            "wave must be below solver_resolution / 3 = 4, got 4",
        ),
        (lambda: kolmogorov(1, 16, seed=0, alpha=1.0), ValueError, "alpha must be above 1"),
        (lambda: kolmogorov(1, 16, seed=0, lag=0.0), ValueError, "lag must be finite and positive"),
        (lambda: kolmogorov(1, 16, seed=0, nu=-1.0), ValueError, "nu must be finite and positive"),
        (lambda: vorticity(1, seed=0, times=[]), ValueError, "times must hold at least one time"),
        (lambda: vorticity(1, seed=0, times=[1, 1]), ValueError, "times must be finite, >= 0 and increasing"),
        (lambda: vorticity(1, seed=-1), ValueError, "seed must be at least 0, got -1"),
        (lambda: vorticity(1, seed=0, dtype=torch.float16), TypeError, "dtype must be torch.float32"),
        (
            lambda: solve_vorticity(torch.ones(4, 5), [1], nu=1, dt=1),
            ValueError,
            r"initial must have shape \(..., S, S\)",
        ),
        (
            lambda: solve_vorticity(np.ones((4, 4)), [1], nu=1, dt=1),
            TypeError,
            "initial must be a tensor of real numbers",
        ),
        (
            lambda: solve_vorticity(ones, [1], nu=1, dt=1, forcing=torch.ones(4)),
            ValueError,
            r"forcing must have shape \(..., 4, 4\), got \(4,\)",
        ),
        (lambda: solve_vorticity(ones, [1], nu=1, dt=0.0), ValueError, "dt must be finite and positive"),
    ],
)
def test_errors(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def test_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="progress=True needs tqdm"):
        co.data.vorticity(1, 8, seed=0, solver_resolution=None, progress=True)
