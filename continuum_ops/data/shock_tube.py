"""Shock tubes: exact solutions of Riemann problems of the Euler equations (PiT section A.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..mesh import Grid
from .functions import FunctionPairs, sample_generator, with_progress
from .trajectories import check_dtype, check_int, check_positive

END = 5.0
# Gauss points of each piece of a cell; between the waves the states are constant or, in a fan, smooth.
GAUSS = 6
# Ends of the uniform laws of the densities (left, right), the left velocity, the pressures and the jump.
LAWS = (0.3, 1.2), (0.1, 0.7), (0.0, 1.0), (0.9, 4.1), (0.05, 0.7), (-0.5, 0.5)


class Gas(NamedTuple):
    """Density, velocity and pressure: numbers, or arrays of one shape."""

    density: Any
    velocity: Any
    pressure: Any


def shock_tube(
    n: int,
    cells: int = 2048,
    *,
    seed: int,
    start: int = 0,
    T: float = 1.5,
    gamma: float = 1.4,
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> FunctionPairs:
    """n shock tubes on [-5, 5]: conserved variables at time 0, total energy at time T (PiT A.2, eq. 14).

    ::

        U_t + F(U)_x = 0,   U = (rho, rho u, E),   F = (rho u, rho u^2 + p, (E + p) u),
        E = rho u^2 / 2 + p / (gamma - 1)

    (PiT prints rho u^2 for the second flux), gamma = 1.4, T = 1.5, 2048 cells. U is constant on both sides of
    a jump at x0 at time 0, and the tube is open: waves leave it. PiT leaves the law of the states open; here
    they are independent and uniform,

        rho_L in (0.3, 1.2), u_L in (0, 1), p_L in (0.9, 4.1),
        rho_R in (0.1, 0.7), u_R = 0, p_R in (0.05, 0.7),   x0 in (-0.5, 0.5),

    the random Sod tube of Lye, Mishra and Ray ("Deep learning observables in computational fluid dynamics").
    The functions are averages over the cells, as a finite volume method gives them, of the exact solution
    (:func:`riemann`): no error but rounding and that of the quadrature within a fan, below 1e-9.

    Sample i of a seed depends on seed, start + i, T and gamma alone, so ``start`` continues a data set. The
    same arguments give the same bytes on one machine.

    Args:
        n: number of samples, >= 1.
        cells: N, >= 1.
        seed: >= 0; use different seeds for training and test data.
        start: number of the first sample, >= 0.
        T: final time, positive.
        gamma: adiabatic index, above 1.
        dtype: torch.float32 or torch.float64, of everything that is returned.
        progress: show a progress bar (tqdm) on stderr.

    Returns:
        FunctionPairs: grid of cells, input (n, N, 3) with channels rho, rho u, E at time 0, target (n, N, 1),
        E at time T; on the CPU.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument out of range.
        ImportError: without scipy, or with progress=True without tqdm.
    """
    n = check_int("n", n, minimum=1)
    cells = check_int("cells", cells, minimum=1)
    seed = check_int("seed", seed, minimum=0)
    start = check_int("start", start, minimum=0)
    T = check_positive("T", T)
    gamma = _check_gamma(gamma)
    dtype = check_dtype(dtype)

    edges = np.linspace(-END, END, cells + 1)
    first, last = np.empty((n, cells, 3)), np.empty((n, cells, 1))
    for row in with_progress(range(n), progress, "shock_tube"):
        left, right, jump = _draw(sample_generator(seed, start + row))
        initial = np.stack([conserved(left, gamma), conserved(right, gamma)])
        speeds, state = riemann(left, right, gamma)
        first[row] = averages(partial(_step, values=initial, jump=jump), edges, np.array([jump]))
        energy = partial(_energy, state=state, jump=jump, T=T, gamma=gamma)
        last[row] = averages(energy, edges, jump + T * speeds)
    return FunctionPairs(
        Grid.uniform(cells, (-END, END), "cell").to(dtype=dtype),
        torch.from_numpy(first).to(dtype),
        torch.from_numpy(last).to(dtype),
    )


def conserved(gas: Gas, gamma: float = 1.4) -> np.ndarray:
    """(..., 3): rho, rho u and E of a gas."""
    density, velocity, pressure = (np.asarray(part, dtype=float) for part in gas)
    energy = density * velocity**2 / 2 + pressure / (gamma - 1)
    return np.stack([density, density * velocity, energy], -1)


def riemann(left: Gas, right: Gas, gamma: float = 1.4) -> tuple[np.ndarray, Callable[[np.ndarray], Gas]]:
    """Exact solution of a Riemann problem of the Euler equations (Toro, "Riemann Solvers", chapter 4).

    The pressure p* between the waves is the root of f_L(p) + f_R(p) + u_R - u_L (scipy's brentq), where
    f_K is the change of velocity across a shock (p > p_K) or a rarefaction from state K to pressure p.

    Args:
        left, right: the two states, numbers with positive density and pressure.
        gamma: adiabatic index, above 1.

    Returns:
        (speeds, state): speeds (5,), in increasing order, of head and tail of the left wave, the contact,
        tail and head of the right wave (a shock has one speed, twice); state(xi) the gas at x / t = xi, of
        any shape.

    Raises:
        ValueError: a density or pressure that is not positive; states that leave a vacuum between them.
        ImportError: without scipy.
    """
    try:
        from scipy.optimize import brentq
    except ImportError as error:
        raise ImportError('shock_tube needs scipy: pip install "continuum_ops[train]"') from error
    gamma = _check_gamma(gamma)
    for name, gas in (("left", left), ("right", right)):
        check_positive(f"{name}.density", gas.density)
        check_positive(f"{name}.pressure", gas.pressure)
    sound = [math.sqrt(gamma * gas.pressure / gas.density) for gas in (left, right)]
    approach = left.velocity - right.velocity
    if -approach >= 2 / (gamma - 1) * sum(sound):
        raise ValueError(
            f"right.velocity - left.velocity must be below {2 / (gamma - 1) * sum(sound):g}, where a vacuum "
            f"opens, got {-approach:g}"
        )

    def excess(logarithm: float) -> float:
        p = math.exp(logarithm)
        return (
            sum(_velocity_change(p, gas, a, gamma) for gas, a in zip((left, right), sound, strict=True))
            - approach
        )

    # In the logarithm: p* may be orders of magnitude below both pressures. The excess increases with p.
    low, high = (math.log(bound(left.pressure, right.pressure)) for bound in (min, max))
    while excess(low) > 0:
        low -= 5
    while excess(high) < 0:
        high += 5
    middle = math.exp(brentq(excess, low, high, xtol=1e-15, rtol=8.9e-16))
    changes = [_velocity_change(middle, gas, a, gamma) for gas, a in zip((left, right), sound, strict=True)]
    contact = (left.velocity + right.velocity + changes[1] - changes[0]) / 2
    waves = (
        _Wave(left, sound[0], middle, contact, gamma, -1),
        _Wave(right, sound[1], middle, contact, gamma, 1),
    )
    speeds = np.array([*waves[0].speeds, contact, *reversed(waves[1].speeds)])

    def state(xi: np.ndarray) -> Gas:
        sides = [wave.state(xi) for wave in waves]
        return Gas(*(np.where(xi < contact, one, other) for one, other in zip(*sides, strict=True)))

    return speeds, state


class _Wave:
    """The wave between an outer state and the contact; side is -1 on the left and 1 on the right."""

    def __init__(
        self, outer: Gas, sound: float, middle: float, contact: float, gamma: float, side: int
    ) -> None:
        self.outer, self.sound, self.gamma, self.side = outer, sound, gamma, side
        ratio, g = middle / outer.pressure, (gamma - 1) / (gamma + 1)
        self.shock = ratio > 1
        if self.shock:
            speed = outer.velocity + side * sound * math.sqrt((ratio + g) * (gamma + 1) / (2 * gamma))
            density = outer.density * (ratio + g) / (g * ratio + 1)
            self.speeds = speed, speed
        else:
            density = outer.density * ratio ** (1 / gamma)
            tail = contact + side * sound * ratio ** ((gamma - 1) / (2 * gamma))
            self.speeds = outer.velocity + side * sound, tail
        self.inner = Gas(density, contact, middle)

    def state(self, xi: np.ndarray) -> Gas:
        beyond = self.side * (xi - self.speeds[0]) > 0
        within = self.side * (xi - self.speeds[1]) < 0
        fan = self.inner if self.shock else self._fan(xi)
        return Gas(
            *(
                np.where(beyond, outer, np.where(within, inner, between))
                for outer, inner, between in zip(self.outer, self.inner, fan, strict=True)
            )
        )

    def _fan(self, xi: np.ndarray) -> Gas:
        g, outer, a = self.gamma, self.outer, self.sound
        ratio = 2 / (g + 1) + self.side * (g - 1) / ((g + 1) * a) * (xi - outer.velocity)
        ratio = np.maximum(ratio, 0.0)  # far outside the fan, where the result is not used
        velocity = 2 / (g + 1) * (xi - self.side * a + (g - 1) / 2 * outer.velocity)
        return Gas(
            outer.density * ratio ** (2 / (g - 1)), velocity, outer.pressure * ratio ** (2 * g / (g - 1))
        )


def averages(
    function: Callable[[np.ndarray], np.ndarray], edges: np.ndarray, breaks: np.ndarray
) -> np.ndarray:
    """Means of a function (M,) -> (M, c) over the cells between edges: (N, c); it is smooth between breaks.

    Cells are cut at the breaks and each piece is integrated by Gauss and Legendre.
    """
    nodes, weights = np.polynomial.legendre.leggauss(GAUSS)
    cuts = np.sort(np.concatenate([edges, breaks[(breaks > edges[0]) & (breaks < edges[-1])]]))
    middle, half = (cuts[1:] + cuts[:-1]) / 2, np.diff(cuts) / 2
    values = function((middle[:, None] + half[:, None] * nodes).ravel())
    pieces = np.einsum("pgc,g,p->pc", values.reshape(len(middle), GAUSS, -1), weights, half)
    # The first piece of each cell starts at its edge; an empty one in front of it adds nothing.
    return (
        np.add.reduceat(pieces, np.searchsorted(cuts, edges[:-1], side="right") - 1) / np.diff(edges)[:, None]
    )


def _step(x: np.ndarray, values: np.ndarray, jump: float) -> np.ndarray:
    return values[(x > jump).astype(int)]


def _energy(
    x: np.ndarray, state: Callable[[np.ndarray], Gas], jump: float, T: float, gamma: float
) -> np.ndarray:
    return conserved(state((x - jump) / T), gamma)[..., 2:]


def _velocity_change(p: float, gas: Gas, sound: float, gamma: float) -> float:
    if p > gas.pressure:
        a, b = 2 / ((gamma + 1) * gas.density), (gamma - 1) / (gamma + 1) * gas.pressure
        return (p - gas.pressure) * math.sqrt(a / (p + b))
    return 2 * sound / (gamma - 1) * math.expm1((gamma - 1) / (2 * gamma) * math.log(p / gas.pressure))


def _draw(generator: np.random.Generator) -> tuple[Gas, Gas, float]:
    """Left and right state and the place of the jump."""
    dl, dr, ul, pl, pr, jump = (float(generator.uniform(*law)) for law in LAWS)
    return Gas(dl, ul, pl), Gas(dr, 0.0, pr), jump


def _check_gamma(gamma: float) -> float:
    gamma = check_positive("gamma", gamma)
    if gamma <= 1:
        raise ValueError(f"gamma must be above 1, got {gamma}")
    return gamma
