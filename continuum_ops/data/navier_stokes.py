"""Navier-Stokes flow on a periodic square: Kolmogorov flow (CA 6.2.3), vorticity (PiT A.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..mesh import Grid
from .functions import FunctionPairs, sample_generator, with_progress
from .trajectories import check_dtype, check_int, check_positive

# Fourier modes an axis, of either sign, of the random initial vorticity: their number fixes the field,
# whatever the grid. A solver keeps those that its grid holds without aliasing.
MODES = 128
# Classical Runge-Kutta is stable on the imaginary axis up to sqrt(8): the bound of |u| k dt of the last mode.
STABLE = 2.8
# Samples solved at a time where the device is not the CPU.
DEVICE_BATCH = 32


class VorticityData(NamedTuple):
    """Vorticity of flows at several times on one periodic grid.

    grid: N = resolution^2 points of [0, 1)^2 in row-major order, kind "periodic".
    times: (F,), the times of the frames.
    vorticity: (n, F, N, 1), w there.
    """

    grid: Grid
    times: Tensor
    vorticity: Tensor


def kolmogorov(
    n: int,
    resolution: int = 416,
    *,
    seed: int,
    start: int = 0,
    solver_resolution: int | None = None,
    T: float = 11.0,
    lag: float = 0.1,
    wave: int = 4,
    nu: float = 1 / 70,
    sigma: float = 7.0**1.5,
    tau: float = 7.0,
    alpha: float = 5.0,
    dt: float | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> FunctionPairs:
    """n pairs w(., T), w(., T + lag) of the vorticity of Kolmogorov flow on [0, 2 pi]^2 (CA 6.2.3, KF).

    ::

        u_t + (u . grad) u + grad p = nu Laplace u + (sin(m y), 0),   div u = 0,   2 pi periodic,
        w = dv/dx - du/dy:   w_t + u . grad w = nu Laplace w - m cos(m y),
        w(., 0) ~ N(0, sigma^2 (-Laplace + tau^2)^-alpha), periodic, of mean 0,

    with CA's m = 4, nu = 1/70, T = 11, lag = 0.1 and N(0, 7^3 (-Laplace + 49)^-5). That field is small (a
    standard deviation of about 1e-3): the flow is the laminar one, disturbed, until it becomes unstable. It
    is drawn in its eigenfunctions, exp(i (k x + l y)) with |k|, |l| <= 128, so a sample's initial condition
    is one function, whatever the grid; the flow is :func:`solve_vorticity` on the grid of solver_resolution,
    read at the points of the grid. CA's time stepping is of second order, this one of fourth.

    The flow is unstable and errors grow: in one sample the relative L2 difference of w(., T + lag) from a
    solver_resolution of 128 was 2 % with 64 and 0.1 % with 96, so compare resolutions on samples of one
    solver_resolution. The first axis of the grid is x, along the force, the second y.

    Sample i of a seed depends on seed, start + i, solver_resolution, dt and the constants alone: neither on n
    nor on resolution, so ``start`` continues a data set. The same arguments give the same bytes on one
    machine's CPU; another device agrees up to the chaos.

    Args:
        n: number of samples, >= 1.
        resolution: points an axis, even, a divisor of solver_resolution.
        seed: >= 0; use different seeds for training and test data.
        start: number of the first sample, >= 0.
        solver_resolution: points an axis of the grid of the computation, even. None: resolution.
        T, lag: time of the input and from there to the target, positive.
        wave: m, >= 1 and below solver_resolution / 3.
        nu: viscosity, positive.
        sigma, tau, alpha: of the initial vorticity, positive, alpha > 1.
        dt: longest time step. None: 1 / solver_resolution, stable up to |u| + |v| = 8; twelve samples of the
            default flow reached 5.2.
        device: where the flow is computed, in float64. The CPU solves sample by sample, others 32 at a time.
        dtype: torch.float32 or torch.float64, of everything that is returned.
        progress: show a progress bar (tqdm) on stderr.

    Returns:
        FunctionPairs: periodic grid, input (n, N, 1), target (n, N, 1), N = resolution^2; on the CPU.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument out of range; grids that are not nested; a dt that is not stable.
        ImportError: progress=True without tqdm.
    """
    T, lag = check_positive("T", T), check_positive("lag", lag)
    wave = check_int("wave", wave, minimum=1)
    fine = _fine(resolution, solver_resolution)
    if 3 * wave >= fine:
        raise ValueError(f"wave must be below solver_resolution / 3 = {fine / 3:g}, got {wave}")
    y = 2 * math.pi * torch.arange(fine, dtype=torch.float64) / fine
    flow = _Flow(
        length=2 * math.pi,
        nu=check_positive("nu", nu),
        dt=1.0 / fine if dt is None else check_positive("dt", dt),
        law=_Law(sigma, tau, alpha),
        forcing=(-wave * torch.cos(wave * y)).expand(fine, fine),
    )
    grid, frames = _generate(
        "kolmogorov", flow, n, resolution, fine, seed, start, [T, T + lag], device, dtype, progress
    )
    return FunctionPairs(grid, frames[:, 0].contiguous(), frames[:, 1].contiguous())


def vorticity(
    n: int,
    resolution: int = 64,
    *,
    seed: int,
    start: int = 0,
    solver_resolution: int | None = 256,
    times: Sequence[float] = tuple(range(1, 31)),
    nu: float = 1e-4,
    sigma: float = 7.0**0.75,
    tau: float = 7.0,
    alpha: float = 2.5,
    dt: float | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> VorticityData:
    """n forced flows on the unit square as frames of their vorticity (PiT section A.4, eq. 16).

    ::

        w_t + u . grad w = nu Laplace w + 0.1 (sin(2 pi (x + y)) + cos(2 pi (x + y))),
        div u = 0,   w = curl u,
        w(., 0) ~ N(0, sigma^2 (-Laplace + tau^2)^-alpha), periodic, of mean 0,

    with PiT's nu = 1e-4 and frames at t = 1, 2, .., 30, computed with 256 points an axis and kept at 64. The
    operator to learn maps the frames up to t = 10 to the later ones.

    PiT leaves the law of the initial vorticity open. The default is the one stated by Li et al. ("Fourier
    Neural Operator", section 5.3), whose data it uses: N(0, 7^(3/2) (-Laplace + 49)^-2.5). The generator
    published with that paper scales with 7^3 instead: ``sigma=7**1.5``. The field is drawn in its
    eigenfunctions, exp(2 pi i (k x + l y)) with |k|, |l| <= 128, and the flow is :func:`solve_vorticity`.

    Sample i of a seed depends on seed, start + i, solver_resolution, times, dt and the constants alone:
    neither on n nor on resolution, so ``start`` continues a data set. The same arguments give the same bytes
    on one machine's CPU; another device agrees up to the growth of rounding errors in the flow.

    Args:
        n: number of samples, >= 1.
        resolution: points an axis, even, a divisor of solver_resolution.
        seed: >= 0; use different seeds for training and test data.
        start: number of the first sample, >= 0.
        solver_resolution: points an axis of the grid of the computation, even. None: resolution.
        times: of the frames, increasing, >= 0; t = 0 gives the initial vorticity.
        nu: viscosity, positive.
        sigma, tau, alpha: of the initial vorticity, positive, alpha > 1.
        dt: longest time step. None: 0.8 / solver_resolution, stable up to |u| + |v| = 1.6; twelve samples of
            the default flow reached 0.85.
        device: where the flow is computed, in float64. The CPU solves sample by sample, others 32 at a time.
        dtype: torch.float32 or torch.float64, of everything that is returned.
        progress: show a progress bar (tqdm) on stderr.

    Returns:
        VorticityData: periodic grid, times (F,), vorticity (n, F, N, 1), N = resolution^2; on the CPU.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument out of range; grids that are not nested; a dt that is not stable.
        ImportError: progress=True without tqdm.
    """
    fine = _fine(resolution, solver_resolution)
    x = 2 * math.pi * torch.arange(fine, dtype=torch.float64) / fine
    phase = x[:, None] + x
    flow = _Flow(
        length=1.0,
        nu=check_positive("nu", nu),
        dt=0.8 / fine if dt is None else check_positive("dt", dt),
        law=_Law(sigma, tau, alpha),
        forcing=0.1 * (torch.sin(phase) + torch.cos(phase)),
    )
    at = _check_times(times)
    grid, frames = _generate("vorticity", flow, n, resolution, fine, seed, start, at, device, dtype, progress)
    return VorticityData(grid, torch.tensor(at, dtype=torch.float64).to(dtype), frames)


def solve_vorticity(
    initial: Tensor,
    times: Sequence[float],
    *,
    nu: float,
    dt: float,
    forcing: Tensor | None = None,
    length: float = 2 * math.pi,
) -> Tensor:
    """w_t + u . grad w = nu Laplace w + f on a periodic square, from w(., 0) = initial.

    Pseudo-spectral: u = (dpsi/dy, -dpsi/dx), -Laplace psi = w, of mean 0; the products of the nonlinear term,
    curl div (u u), are formed at the points, and modes |k| >= S / 3 are dropped (the 2/3 rule: no aliasing);
    those of initial and forcing too. In time the classical Runge-Kutta method of fourth order for
    exp(-nu Laplace t) w (Lawson), so that viscosity does not limit the step.

    Args:
        initial: (..., S, S), S even; the first of the two axes is x, the second y.
        times: (F,), >= 0, increasing. Each interval between them is cut into equal steps.
        nu: viscosity, positive.
        dt: longest step.
        forcing: f, of a shape that broadcasts to initial's; None for 0.
        length: of the sides of the square, positive.

    Returns:
        (..., F, S, S), float64, on the device of initial.

    Raises:
        TypeError: initial that is not a tensor of real numbers.
        ValueError: a shape or number out of range; a dt for which the scheme is not stable, with the one
            that would have been.
    """
    if not isinstance(initial, Tensor) or initial.is_complex():
        kind = initial.dtype if isinstance(initial, Tensor) else type(initial).__name__
        raise TypeError(f"initial must be a tensor of real numbers, got {kind}")
    if (
        initial.ndim < 2
        or initial.shape[-1] != initial.shape[-2]
        or initial.shape[-1] % 2
        or not initial.numel()
    ):
        raise ValueError(f"initial must have shape (..., S, S) with S even, got {tuple(initial.shape)}")
    times = _check_times(times)
    nu, dt, length = check_positive("nu", nu), check_positive("dt", dt), check_positive("length", length)
    size = initial.shape[-1]
    if forcing is None:
        forcing = torch.zeros(size, size)
    elif forcing.shape[-2:] != (size, size):
        raise ValueError(f"forcing must have shape (..., {size}, {size}), got {tuple(forcing.shape)}")
    solver = _Solver(size, length, nu, forcing.to(initial.device, torch.float64))
    spectrum = torch.fft.rfft2(initial.double(), norm="forward")
    return solver.frames(spectrum, times, dt)


class _Law:
    """N(0, sigma^2 (-Laplace + tau^2)^-alpha) on a periodic square, without its mean."""

    def __init__(self, sigma: float, tau: float, alpha: float) -> None:
        self.sigma, self.tau = check_positive("sigma", sigma), check_positive("tau", tau)
        self.alpha = check_positive("alpha", alpha)
        if self.alpha <= 1:
            raise ValueError(f"alpha must be above 1, for the variance to be finite, got {alpha}")

    def draw(self, generator: np.random.Generator, size: int, length: float) -> np.ndarray:
        """Half spectrum (size, size / 2 + 1) of one draw, 1 / size^2 in the forward transform."""
        wave = 2 * np.pi / length * np.arange(-MODES, MODES + 1)
        square = wave[:, None] ** 2 + wave[MODES:] ** 2
        real, imag = generator.standard_normal((2, 2 * MODES + 1, MODES + 1))
        # A pair of opposite modes carries twice the variance over the area, half of it in either part.
        drawn = (
            self.sigma
            / length
            * (square + self.tau**2) ** (-self.alpha / 2)
            * (real + 1j * imag)
            / math.sqrt(2)
        )
        drawn[:MODES, 0] = drawn[:MODES:-1, 0].conj()
        drawn[MODES, 0] = 0.0
        kept = min(MODES, size // 2 - 1)
        spectrum = np.zeros((size, size // 2 + 1), dtype=complex)
        rows = np.arange(-kept, kept + 1)
        spectrum[rows, : kept + 1] = drawn[MODES + rows, : kept + 1]
        return spectrum


class _Solver:
    """One grid, viscosity and forcing; works on half spectra with 1 / S^2 in the forward transform."""

    def __init__(self, size: int, length: float, nu: float, forcing: Tensor) -> None:
        self.size = size
        unit, device = 2 * math.pi / length, forcing.device
        x = (torch.fft.fftfreq(size, 1 / size, dtype=torch.float64, device=device) * unit)[:, None]
        y = torch.fft.rfftfreq(size, 1 / size, dtype=torch.float64, device=device) * unit
        limit = unit * size / 3 * (1 - 1e-12)
        self.keep = (x.abs() < limit) & (y.abs() < limit)
        self.fastest = float(y[self.keep[0]].max())
        square = x**2 + y**2
        self.decay = -nu * square
        inverse = torch.where(square > 0, 1 / square, 0.0)
        self.to_u, self.to_v = 1j * y * inverse, -1j * x * inverse
        self.shear, self.stretch = self.keep * (x**2 - y**2), self.keep * (x * y)
        self.forcing = torch.fft.rfft2(forcing, norm="forward") * self.keep

    def values(self, spectrum: Tensor) -> Tensor:
        return torch.fft.irfft2(spectrum, s=(self.size, self.size), norm="forward")

    def slope(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """-u . grad w + f, and the largest |u| + |v|."""
        u, v = self.values(self.to_u * w), self.values(self.to_v * w)
        # -u . grad w = -curl div (u u): two products to transform where u dw/dx + v dw/dy takes four.
        product = torch.fft.rfft2(u * v, norm="forward")
        difference = torch.fft.rfft2((v - u) * (v + u), norm="forward")
        return self.shear * product + self.stretch * difference + self.forcing, (u.abs() + v.abs()).amax()

    def frames(self, w: Tensor, times: Sequence[float], dt: float) -> Tensor:
        w = w * self.keep
        frames, now = [], 0.0
        for time in times:
            if time > now:
                steps = math.ceil((time - now) / dt * (1 - 1e-12))
                w = self.advance(w, (time - now) / steps, steps)
                now = time
            frames.append(self.values(w))
        return torch.stack(frames, -3)

    def advance(self, w: Tensor, h: float, steps: int) -> Tensor:
        half = torch.exp(self.decay * (h / 2))
        whole = half * half
        peak = torch.zeros((), dtype=torch.float64, device=w.device)
        for _ in range(steps):
            a, speed = self.slope(w)
            b, _ = self.slope(half * (w + h / 2 * a))
            c, _ = self.slope(half * w + h / 2 * b)
            d, _ = self.slope(whole * w + h * half * c)
            w = whole * (w + h / 6 * a) + h / 3 * half * (b + c) + h / 6 * d
            peak = torch.maximum(peak, speed)
        number = h * self.fastest * float(peak)
        if not number <= STABLE:
            raise ValueError(
                f"dt must be at most {h * STABLE / number:.3g}, where the scheme is stable, got {h:.3g}"
                if math.isfinite(number)
                else f"dt must be smaller: the flow grew without bound with {h:.3g}"
            )
        return w


class _Flow(NamedTuple):
    length: float
    nu: float
    dt: float
    law: _Law
    forcing: Tensor


def _fine(resolution: int, solver_resolution: int | None) -> int:
    resolution = check_int("resolution", resolution, minimum=4)
    if resolution % 2:
        raise ValueError(f"resolution must be even, got {resolution}")
    if solver_resolution is None:
        return resolution
    fine = check_int("solver_resolution", solver_resolution, minimum=4)
    if fine % 2:
        raise ValueError(f"solver_resolution must be even, got {fine}")
    if fine % resolution:
        raise ValueError(f"resolution must divide solver_resolution = {fine}, got {resolution}")
    return fine


def _check_times(times: Sequence[float]) -> list[float]:
    at = [float(t) for t in times]
    if not at:
        raise ValueError("times must hold at least one time, got none")
    if not (all(map(math.isfinite, at)) and at[0] >= 0 and all(a < b for a, b in pairwise(at))):
        raise ValueError(f"times must be finite, >= 0 and increasing, got {at}")
    return at


def _batch(device: torch.device) -> int:
    # One by one on the CPU: there a batch gains nothing, and FFTs of a batch may round otherwise.
    return 1 if device.type == "cpu" else DEVICE_BATCH


def _generate(
    name: str,
    flow: _Flow,
    n: int,
    resolution: int,
    fine: int,
    seed: int,
    start: int,
    times: list[float],
    device: torch.device | str,
    dtype: torch.dtype,
    progress: bool,
) -> tuple[Grid, Tensor]:
    n = check_int("n", n, minimum=1)
    seed = check_int("seed", seed, minimum=0)
    start = check_int("start", start, minimum=0)
    dtype = check_dtype(dtype)
    device = torch.device(device)
    solver = _Solver(fine, flow.length, flow.nu, flow.forcing.to(device))
    batch = _batch(device)
    every = fine // resolution
    out = torch.empty(n, len(times), resolution**2, 1, dtype=dtype)
    for first in with_progress(range(0, n, batch), progress, name, "batch" if batch > 1 else "sample"):
        rows = range(first, min(first + batch, n))
        drawn = [flow.law.draw(sample_generator(seed, start + row), fine, flow.length) for row in rows]
        frames = solver.frames(torch.from_numpy(np.stack(drawn)).to(device), times, flow.dt)
        out[rows.start : rows.stop, ..., 0] = frames[..., ::every, ::every].flatten(-2).to("cpu", dtype)
    grid = Grid.uniform((resolution, resolution), [(0.0, flow.length)] * 2, "periodic")
    return grid.to(dtype=dtype), out
