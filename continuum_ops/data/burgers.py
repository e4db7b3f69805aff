"""Solutions of the viscous Burgers equation on a periodic interval (GT section 5.1 and appendix C.2)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..mesh import Grid
from .trajectories import check_dtype, check_int, check_positive

# Largest ratio of the values of the Cole-Hopf variable at time T: beyond it, the solution loses digits.
MAX_RATIO = 1e6


class BurgersData(NamedTuple):
    """Initial conditions and solutions at time T on one periodic grid.

    grid: N points of [0, 1), kind "periodic".
    input: (n, N, 1), u(., 0) at the points.
    target: (n, N, 1), u(., T) at the points.
    """

    grid: Grid
    input: Tensor
    target: Tensor


def burgers(
    n: int,
    points: int = 512,
    *,
    seed: int,
    nu: float = 0.1 / (2 * math.pi),
    T: float = 1.0,
    resolution: int = 8192,
    sigma: float = 25.0,
    tau: float = 5.0,
    dtype: torch.dtype = torch.float32,
) -> BurgersData:
    """n pairs u(., 0), u(., T) of u_t + u u_x = nu u_xx, u of period 1 (GT eq. 18).

    The initial conditions are drawn from N(0, sigma^2 (-Laplace + tau^2)^-2), with GT's sigma = 25 and
    tau^2 = 25: u0 = sum_k sqrt(2 lambda_k) (xi_k cos 2 pi k x + eta_k sin 2 pi k x), xi and eta standard
    normal and sqrt(lambda_k) = sigma / ((2 pi k)^2 + tau^2), k = 1 .. resolution / 2 - 1. As in the published
    data the mean (k = 0) is 0; another one only carries the solution along.

    The solution is spectral in space on `resolution` points and exact in time. By Cole and Hopf,
    u = -2 nu phi_x / phi where phi solves the heat equation from phi_0 = exp(-1 / (2 nu) integral of u0),
    and the exponential of the heat equation is diagonal in the Fourier modes: one step, no time stepping
    error. Both functions are then sub-sampled to `points`.

    The functions depend on seed, nu, T, resolution, sigma and tau alone: not on points, and the first m of n
    are those of a call with n = m. The same arguments give the same bytes on one machine; another version of
    numpy may draw other numbers.

    Args:
        n: number of pairs, >= 1.
        points: N, a divisor of resolution (GT: 512, 2048, 8192).
        seed: >= 0; use different seeds for training and test data.
        nu: viscosity; positive. GT: 0.1 / (2 pi).
        T: final time, positive.
        resolution: points of the spectral computation, even.
        sigma, tau: of the distribution, positive.
        dtype: torch.float32 or torch.float64, of everything that is returned.

    Returns:
        BurgersData: grid of N points, input (n, N, 1), target (n, N, 1); on the CPU.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument out of range; points that do not divide resolution; nu T so small that the
            values of phi at time T span more than 6 decades, where u loses accuracy.
    """
    n = check_int("n", n, minimum=1)
    points = check_int("points", points, minimum=1)
    seed = check_int("seed", seed, minimum=0)
    resolution = check_int("resolution", resolution, minimum=4)
    nu, T = check_positive("nu", nu), check_positive("T", T)
    sigma, tau = check_positive("sigma", sigma), check_positive("tau", tau)
    dtype = check_dtype(dtype)
    if resolution % 2:
        raise ValueError(f"resolution must be even, got {resolution}")
    if resolution % points:
        raise ValueError(f"points must divide resolution, got points = {points}, resolution = {resolution}")

    modes = resolution // 2
    k = np.arange(1, modes)
    root = sigma / ((2 * np.pi * k) ** 2 + tau**2)
    rng = np.random.default_rng(seed)
    every = resolution // points
    first, last = np.empty((n, points)), np.empty((n, points))
    for i in range(n):  # one by one: sample i does not depend on n, and memory stays that of the result
        xi, eta = rng.standard_normal((2, modes - 1))
        spectrum = np.zeros(modes + 1, dtype=complex)
        spectrum[1:modes] = root / math.sqrt(2) * (xi - 1j * eta)
        first[i] = np.fft.irfft(spectrum, resolution, norm="forward")[::every]
        last[i] = _cole_hopf(spectrum, resolution, nu, T)[::every]

    grid = Grid.uniform(points, kind="periodic", dtype=dtype)
    return BurgersData(
        grid,
        torch.from_numpy(first).to(dtype).unsqueeze(-1),
        torch.from_numpy(last).to(dtype).unsqueeze(-1),
    )


def _cole_hopf(spectrum: np.ndarray, n: int, nu: float, T: float) -> np.ndarray:
    """u(., T) on n points from the half spectrum (1/n in the forward transform) of u0, whose mean is 0."""
    wave = 2j * np.pi * np.arange(n // 2 + 1)
    wave[-1] = 0.0  # the derivative of the Nyquist mode vanishes at the points
    potential = np.zeros_like(spectrum)
    potential[1:-1] = spectrum[1:-1] / wave[1:-1]
    exponent = -np.fft.irfft(potential, n, norm="forward") / (2 * nu)
    phi = np.fft.rfft(np.exp(exponent - exponent.max()))
    phi *= np.exp(-nu * T * (2 * np.pi * np.arange(n // 2 + 1)) ** 2)
    values, slopes = np.fft.irfft(phi, n), np.fft.irfft(wave * phi, n)
    if not values.max() < MAX_RATIO * values.min():
        raise ValueError(
            f"nu * T must be large enough for a span of at most {MAX_RATIO:g} in the Cole-Hopf variable, "
            f"got nu = {nu:g}, T = {T:g}"
        )
    return -2 * nu * slopes / values
