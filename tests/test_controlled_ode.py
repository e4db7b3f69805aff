"""The controlled ODE against a numerical solution and against the definition of its control."""

import math

import numpy as np
import pytest
import torch

import continuum_ops as co


def paths(n, times, **options):
    data = co.data.controlled_ode(n, times, dtype=torch.float64, **options)
    return data.input[..., 0].numpy(), data.target[..., 0].numpy()


@pytest.mark.parametrize("z0", [1.0, -2.5, 0.0, 3.1])
def test_solves_the_ode(z0):
    """Classical Runge-Kutta for dz/du = sin z from each time to the next, 64 steps of size du."""
    u, z = paths(20, co.data.uniform_times(1000), seed=3, z0=z0)
    du, state = np.diff(u, axis=1) / 64, z[:, :-1]
    for _ in range(64):
        k1 = np.sin(state)
        k2 = np.sin(state + du / 2 * k1)
        k3 = np.sin(state + du / 2 * k2)
        k4 = np.sin(state + du * k3)
        state = state + du / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    np.testing.assert_allclose(z[:, 0], z0, rtol=1e-15)
    np.testing.assert_allclose(z[:, 1:], state, rtol=0, atol=1e-12)


def test_starts_at_z0_and_the_default_is_one():
    u, z = paths(5, [0.0, 1.0], seed=0)
    assert (u[:, 0] == 0).all()
    np.testing.assert_allclose(z[:, 0], 1.0, rtol=1e-15)
    _, other = paths(5, [0.0, 1.0], seed=0, z0=-0.5)
    np.testing.assert_allclose(other[:, 0], -0.5, rtol=1e-15)
    assert (np.abs(z) <= np.pi).all() and (z > 0).all() and (other < 0).all()


@pytest.mark.parametrize("modes", [1, 3, 10])
def test_the_control_has_the_stated_law(modes):
    """E u(t)^2 = sum_j E sin^2(pi eta_j t) = J/2 (1 - sin(2 pi J t) / (2 pi J t))."""
    n = 20000
    times = np.array([0.01, 0.03, 0.1, 0.37, 2.0])
    u, _ = paths(n, times, seed=11, J=modes)
    variance = modes / 2 * (1 - np.sinc(2 * modes * times))
    square = u**2
    error = np.abs(square.mean(axis=0) - variance) / (square.std(axis=0) / n**0.5)
    assert (error < 4.5).all()
    assert (np.abs(u.mean(axis=0)) < 4.5 * np.sqrt(variance / n)).all()


def test_one_mode_is_a_sine_with_a_frequency_below_one():
    """sin(a (t + h)) + sin(a (t - h)) = 2 cos(a h) sin(a t) gives the frequency of every control."""
    u, _ = paths(500, co.data.uniform_times(200), seed=1, J=1)
    h, i = 0.01, np.abs(u[:, 1:-1]).argmax(axis=1) + 1
    rows = np.arange(500)
    cosine = (u[rows, i + 1] + u[rows, i - 1]) / (2 * u[rows, i])
    frequency = np.arccos(np.clip(cosine, -1, 1)) / (np.pi * h)
    assert (frequency < 1 + 1e-6).all() and frequency.max() > 0.9 and frequency.min() < 0.1
    amplitude = u[rows, i] / np.sin(np.pi * frequency * h * i)
    reference = amplitude[:, None] * np.sin(np.pi * frequency[:, None] * h * np.arange(201))
    np.testing.assert_allclose(u, reference, rtol=0, atol=1e-4)


def test_trajectories_do_not_depend_on_the_times():
    even = co.data.controlled_ode(6, seed=4, dtype=torch.float64)
    uneven = co.data.controlled_ode(6, co.data.uneven_times(200), seed=4, dtype=torch.float64)
    common = torch.isin(uneven.times, even.times)
    assert common.sum() == 201
    torch.testing.assert_close(uneven.input[:, common], even.input, rtol=0, atol=1e-13)
    torch.testing.assert_close(uneven.target[:, common], even.target, rtol=0, atol=1e-13)
    longer = co.data.controlled_ode(6, even.times, seed=4, T=50.0, dtype=torch.float64)
    assert torch.equal(longer.target, even.target)


def test_the_first_of_many_trajectories_are_the_few():
    many = co.data.controlled_ode(50, seed=9)
    few = co.data.controlled_ode(7, seed=9)
    assert torch.equal(few.input, many.input[:7]) and torch.equal(few.target, many.target[:7])


def test_seeds():
    first, again, other = (co.data.controlled_ode(4, seed=seed) for seed in (1, 1, 2))
    for a, b in zip(first[:3], again[:3], strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
    assert not torch.isclose(first.input[:, 1:], other.input[:, 1:]).all(dim=1).any()


def test_float32_is_the_rounded_float64():
    single = co.data.controlled_ode(4, seed=1)
    double = co.data.controlled_ode(4, seed=1, dtype=torch.float64)
    for s, d in zip(single[:3], double[:3], strict=True):
        assert s.dtype == torch.float32 and torch.equal(s, d.float())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"J": 0}, ValueError, "J must be at least 1, got 0"),
        ({"J": 2.5}, TypeError, "J must be an int, got float"),
        ({"z0": math.pi}, ValueError, r"z0 must lie in \(-pi, pi\), .* got 3.14"),
        ({"z0": -4.0}, ValueError, r"z0 must lie in \(-pi, pi\), .* got -4.0"),
        ({"z0": math.nan}, ValueError, r"z0 must lie in \(-pi, pi\), .* got nan"),
        ({"z0": torch.tensor(1.0)}, TypeError, "z0 must be a real number, got Tensor"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        co.data.controlled_ode(1, seed=0, **arguments)
