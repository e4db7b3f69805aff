"""Shock tubes: published solutions, jump conditions, conservation, a finite-volume method, the laws."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import continuum_ops as co
from continuum_ops.data import shock_tube
from continuum_ops.data.shock_tube import Gas, averages, conserved, riemann

# Toro, "Riemann Solvers and Numerical Methods for Fluid Dynamics", tables 4.1 to 4.3:
# left and right state, p*, u*, rho*L, rho*R.
TORO = {
    "sod": (Gas(1.0, 0.0, 1.0), Gas(0.125, 0.0, 0.1), 0.30313, 0.92745, 0.42632, 0.26557),
    "two rarefactions": (Gas(1.0, -2.0, 0.4), Gas(1.0, 2.0, 0.4), 0.00189, 0.0, 0.02185, 0.02185),
    "blast, left": (Gas(1.0, 0.0, 1000.0), Gas(1.0, 0.0, 0.01), 460.894, 19.5975, 0.57506, 5.99924),
    "blast, right": (Gas(1.0, 0.0, 0.01), Gas(1.0, 0.0, 100.0), 46.0950, -6.19633, 5.99242, 0.57511),
    "two shocks": (
        Gas(5.99924, 19.5975, 460.894),
        Gas(5.99242, -6.19633, 46.0950),
        1691.64,
        8.68975,
        14.2823,
        31.0426,
    ),
}


def flux(gas: Gas, gamma: float = 1.4) -> np.ndarray:
    momentum = gas.density * gas.velocity
    energy = conserved(gas, gamma)[..., 2]
    return np.stack(
        [momentum, momentum * gas.velocity + gas.pressure, (energy + gas.pressure) * gas.velocity], -1
    )


@pytest.mark.parametrize("name", TORO)
def test_published_solutions(name: str) -> None:
    left, right, p, u, left_density, right_density = TORO[name]
    speeds, state = riemann(left, right)
    assert (np.diff(speeds) >= 0).all()
    contact = speeds[2]
    near = state(np.array([contact - 1e-7, contact + 1e-7]))
    # The tables give six digits, of small numbers fewer.
    np.testing.assert_allclose(near.pressure, p, rtol=2e-5, atol=5e-6)
    np.testing.assert_allclose(near.velocity, u, rtol=2e-5, atol=5e-6)
    np.testing.assert_allclose(near.density, [left_density, right_density], rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("name", TORO)
def test_jump_conditions_and_fans(name: str) -> None:
    """Across a shock or the contact F jumps by s times the jump of U; fans are isentropic."""
    left, right, *_ = TORO[name]
    speeds, state = riemann(left, right)
    for s in {speeds[0], speeds[2], speeds[4]}:
        scale = 1e-9 * max(1.0, abs(s))
        one, other = state(np.array(s - scale)), state(np.array(s + scale))
        jump = conserved(other) - conserved(one)
        if np.abs(jump).max() > 1e-5:
            size = np.abs(flux(one)).max() + np.abs(flux(other)).max()
            np.testing.assert_allclose(flux(other) - flux(one), s * jump, rtol=0, atol=1e-7 * size)
    for side, outer, (a, b) in ((-1, left, speeds[:2]), (1, right, speeds[3:])):
        if b > a:
            xi = np.linspace(a, b, 9)
            gas = state(xi)
            sound = np.sqrt(1.4 * gas.pressure / gas.density)
            np.testing.assert_allclose(gas.velocity + side * sound, xi, rtol=0, atol=1e-9)
            entropy = outer.pressure / outer.density**1.4
            np.testing.assert_allclose(gas.pressure / gas.density**1.4, entropy, rtol=1e-9)


@pytest.mark.parametrize("gamma", [1.4, 5 / 3])
def test_conservation(gamma: float) -> None:
    """What the ends let in is what the tube gains, until a wave reaches one."""
    left, right, T = Gas(0.9, 0.4, 3.0), Gas(0.3, 0.0, 0.2), 0.7
    speeds, state = riemann(left, right, gamma)
    edges = np.linspace(-5, 5, 101)
    assert np.abs(T * speeds).max() < 5
    gain = averages(lambda x: conserved(state(x / T), gamma), edges, T * speeds) - np.where(
        (edges[:-1] < -0.01)[:, None], conserved(left, gamma), conserved(right, gamma)
    )
    expected = T * (flux(left, gamma) - flux(right, gamma))
    np.testing.assert_allclose(gain.sum(0) * 0.1, expected, rtol=0, atol=1e-8)


def test_averages() -> None:
    # x^3 left of 0.35, 5 right of it; breaks on an edge, beyond the ends, or repeated change nothing.
    def function(x: np.ndarray) -> np.ndarray:
        return np.where(x < 0.35, x**3, 5.0)[:, None]

    edges = np.array([0.0, 0.2, 0.5, 1.0])
    expected = [0.2**4 / 4 / 0.2, ((0.35**4 - 0.2**4) / 4 + 0.15 * 5) / 0.3, 5.0]
    found = averages(function, edges, np.array([0.35, 0.2, -3.0, 0.35, 0.0, 1.0]))
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-14)


def hll(u: np.ndarray, h: float, T: float) -> np.ndarray:
    """First-order finite volumes (Harten, Lax, van Leer) with open ends, (N, 3)."""
    time = 0.0
    while time < T:
        v = np.concatenate([u[:1], u, u[-1:]])
        velocity = v[:, 1] / v[:, 0]
        gas = Gas(v[:, 0], velocity, 0.4 * (v[:, 2] - v[:, 1] * velocity / 2))
        sound = np.sqrt(1.4 * gas.pressure / gas.density)
        f = flux(gas)
        low = np.minimum(0, np.minimum(velocity - sound, np.roll(velocity - sound, -1)))[:-1, None]
        high = np.maximum(0, np.maximum(velocity + sound, np.roll(velocity + sound, -1)))[:-1, None]
        through = (high * f[:-1] - low * f[1:] + low * high * (v[1:] - v[:-1])) / (high - low)
        dt = min(0.9 * h / (np.abs(velocity) + sound).max(), T - time)
        u = u - dt / h * (through[1:] - through[:-1])
        time += dt
    return u


def test_a_finite_volume_method_converges_to_it() -> None:
    errors = []
    for cells in (200, 400, 800, 1600):
        data = shock_tube(1, cells, seed=1, dtype=torch.float64)
        found = hll(data.input[0].numpy(), 10 / cells, 1.5)[:, 2]
        errors.append(np.abs(found - data.target[0, :, 0].numpy()).mean())
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    # First-order schemes reach order 1 at shocks and 1/2 at contacts.
    assert ((orders > 0.5) & (orders < 1.1)).all(), orders
    assert errors[-1] < 0.02


def test_laws_of_the_states() -> None:
    data = shock_tube(400, 64, seed=2, T=0.01, dtype=torch.float64)
    for cell, low, high in ((0, (0.3, 0.0, 0.9), (1.2, 1.0, 4.1)), (-1, (0.1, 0.0, 0.05), (0.7, 0.0, 0.7))):
        density, momentum, energy = data.input[:, cell].numpy().T
        velocity = momentum / density
        pressure = 0.4 * (energy - momentum * velocity / 2)
        for part, a, b in zip((density, velocity, pressure), low, high, strict=True):
            assert part.min() >= a - 1e-12 and part.max() <= b + 1e-12
            # Mean and variance of a uniform law, within 5 of their deviations.
            assert abs(part.mean() - (a + b) / 2) <= 5 * (b - a) / np.sqrt(12 * 400)
            assert abs(part.var() - (b - a) ** 2 / 12) <= 5 * (b - a) ** 2 / np.sqrt(180 * 400)
    # The density's total over the tube tells where the jump is.
    density = data.input[:, :, 0].numpy()
    jump = (density.mean(1) * 10 - 5 * (density[:, 0] + density[:, -1])) / (density[:, 0] - density[:, -1])
    far = np.abs(density[:, 0] - density[:, -1]) > 1e-2
    assert np.abs(jump[far]).max() <= 0.5 + 1e-9 and np.abs(jump[far]).max() > 0.45


def test_one_function_on_every_grid_and_seeds() -> None:
    fine = shock_tube(3, 256, seed=4, dtype=torch.float64)
    coarse = shock_tube(2, 64, seed=4, start=1, dtype=torch.float64)
    for a, b in ((fine.input, coarse.input), (fine.target, coarse.target)):
        torch.testing.assert_close(a[1:].unflatten(1, (64, 4)).mean(2), b, rtol=0, atol=1e-9)
    again = shock_tube(1, 256, seed=4, start=2, dtype=torch.float64)
    assert torch.equal(again.target, fine.target[2:]) and torch.equal(again.input, fine.input[2:])
    assert fine.input.shape == (3, 256, 3) and fine.target.shape == (3, 256, 1)
    assert fine.grid.kind == ("cell",) and fine.grid.points[0].item() == -5 + 5 / 256
    single = shock_tube(1, 16, seed=4)
    assert single.input.dtype == single.target.dtype == single.grid.dtype == torch.float32


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: co.data.shock_tube(0, seed=0), ValueError, "n must be at least 1, got 0"),
        (lambda: co.data.shock_tube(1, 0, seed=0), ValueError, "cells must be at least 1, got 0"),
        (lambda: co.data.shock_tube(1, seed=0, gamma=1.0), ValueError, "gamma must be above 1, got 1.0"),
        (lambda: co.data.shock_tube(1, seed=0, T=-1.0), ValueError, "T must be finite and positive"),
        (lambda: co.data.shock_tube(1, seed=0, start=0.5), TypeError, "start must be an int, got float"),
        (
            lambda: riemann(Gas(0.0, 0, 1), Gas(1, 0, 1)),
            ValueError,
            "left.density must be finite and positive",
        ),
        (
            lambda: riemann(Gas(1, 0, 1), Gas(1, 0, -1)),
            ValueError,
            "right.pressure must be finite and positive",
        ),
        (
            lambda: riemann(Gas(1, -6, 1), Gas(1, 6, 1)),
            ValueError,
            "right.velocity - left.velocity must be below 11.8322, where a vacuum opens, got 12",
        ),
    ],
)
def test_errors(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def test_without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="progress=True needs tqdm"):
        shock_tube(1, 8, seed=0, progress=True)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"continuum_ops\[train\]"):
        shock_tube(1, 8, seed=0)
