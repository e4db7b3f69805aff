"""Inviscid Burgers: against characteristics, a known shock, Godunov's method, the law of the field."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

import continuum_ops as co
from continuum_ops.data import inviscid_burgers
from continuum_ops.data.functions import sample_generator
from continuum_ops.data.inviscid_burgers import _draw, _Series, entropy_potential


def gauss_averages(function, edges: np.ndarray) -> np.ndarray:
    nodes, weights = np.polynomial.legendre.leggauss(12)
    middle, half = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / 2
    return np.array(
        [[function(m + h * node) for node in nodes] @ weights / 2 for m, h in zip(middle, half, strict=True)]
    )


def averages(initial: _Series, cells: int, T: float) -> np.ndarray:
    return np.diff(entropy_potential(initial, np.arange(cells + 1) / cells, T)) * cells


def test_before_the_shock_u_is_constant_along_characteristics() -> None:
    # u0 = 0.3 + sin 2 pi x breaks at 1 / (2 pi) = 0.159.
    initial, T = _Series(np.array([0.3, 0.0]), np.array([0.0, 1.0])), 0.12

    def u0(y: float) -> float:
        return 0.3 + np.sin(2 * np.pi * y)

    def exact(x: float) -> float:
        return u0(brentq(lambda y: y + T * u0(y) - x, x - 1.4 * T, x + 0.8 * T, xtol=1e-15))

    edges = np.arange(17) / 16
    np.testing.assert_allclose(averages(initial, 16, T), gauss_averages(exact, edges), rtol=0, atol=1e-8)


@pytest.mark.parametrize("T", [0.5, 50.0])
def test_a_standing_and_a_moving_shock(T: float) -> None:
    """sin 2 pi x: a shock stands at 1/2; with a mean 0.3 everything moves by 0.3 T."""
    top = np.arccos(-1 / (2 * np.pi * T)) / (2 * np.pi)  # characteristics left of it are ordered

    def exact(x: float) -> float:
        return np.sin(2 * np.pi * brentq(lambda y: y + T * np.sin(2 * np.pi * y) - x, 0, top, xtol=1e-16))

    left = gauss_averages(exact, np.arange(11) / 20)
    expected = np.concatenate([left, -left[::-1]])
    found = averages(_Series(np.zeros(2), np.array([0.0, 1.0])), 20, T)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)
    assert left[-1] > 0.3 / T
    moved = averages(_Series(np.array([0.3, 0.0]), np.array([0.0, 1.0])), 20, T)
    np.testing.assert_allclose(moved, 0.3 + np.roll(expected, round(0.3 * T * 20)), rtol=0, atol=1e-8)


def godunov(u: np.ndarray, T: float) -> np.ndarray:
    """First-order finite volumes with the exact flux of each interface."""
    h, time = 1 / len(u), 0.0
    while time < T:
        dt = min(0.9 * h / np.abs(u).max(), T - time)
        right = np.roll(u, -1)
        flux = np.maximum(np.maximum(u, 0) ** 2, np.minimum(right, 0) ** 2) / 2
        u = u - dt / h * (flux - np.roll(flux, 1))
        time += dt
    return u


def test_godunovs_method_converges_to_it_at_first_order() -> None:
    errors = []
    for cells in (256, 512, 1024, 2048):
        data = inviscid_burgers(2, cells, seed=1, dtype=torch.float64)
        pairs = zip(data.input[..., 0].numpy(), data.target[..., 0].numpy(), strict=True)
        errors.append([np.abs(godunov(u, 0.1) - v).mean() for u, v in pairs])
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    assert ((orders > 0.7) & (orders < 1.2)).all(), orders
    assert np.max(errors[-1]) < 5e-3


def test_distribution_of_the_initial_conditions() -> None:
    """E |u_k|^2 is the Fourier coefficient of the periodic kernel."""
    scale, n = 0.06, 2000
    x = np.arange(128) / 128
    values = np.stack([_draw(sample_generator(2, i), scale).value(x) for i in range(n)])
    power = (np.abs(np.fft.rfft(values, axis=1, norm="forward")[:, :13]) ** 2).mean(0)
    kernel = sum(np.exp(-((x + m) ** 2) / (2 * scale**2)) for m in range(-3, 4))
    true = np.fft.rfft(kernel, norm="forward").real[:13]
    # |u_k|^2 is exponential (k > 0) or chi squared (k = 0): 5 deviations of the mean.
    assert (np.abs(power / true - 1) < 5 * np.where(np.arange(13) == 0, np.sqrt(2), 1) / np.sqrt(n)).all()
    # The averages of a sample are those of its series.
    data = inviscid_burgers(1, 8, seed=2, dtype=torch.float64)
    series = _draw(sample_generator(2, 0), scale)
    averages = gauss_averages(lambda y: series.value(np.array([y]))[0], np.arange(9) / 8)
    np.testing.assert_allclose(data.input[0, :, 0].numpy(), averages, rtol=0, atol=1e-6)


def test_conservation_and_oleiniks_condition() -> None:
    data = inviscid_burgers(4, 512, seed=3, dtype=torch.float64)
    torch.testing.assert_close(data.target.mean(1), data.input.mean(1), rtol=0, atol=1e-12)
    u = data.target[..., 0].numpy()
    rise = (np.roll(u, -1, 1) - u) * 512
    assert rise.max() <= 1 / 0.1 + 1e-6
    assert (rise.min(1) < -50).all()  # shocks


def test_one_function_on_every_grid_and_seeds() -> None:
    fine = inviscid_burgers(3, 256, seed=4, dtype=torch.float64)
    coarse = inviscid_burgers(2, 64, seed=4, dtype=torch.float64, start=1)
    for a, b in ((fine.input, coarse.input), (fine.target, coarse.target)):
        torch.testing.assert_close(a[1:].view(2, 64, 4, 1).mean(2), b, rtol=0, atol=1e-10)
    again = inviscid_burgers(1, 256, seed=4, start=2, dtype=torch.float64)
    assert torch.equal(again.target, fine.target[2:]) and torch.equal(again.input, fine.input[2:])
    assert not torch.equal(inviscid_burgers(1, 64, seed=5).input[0], coarse.input[0].float())
    assert coarse.grid.kind == ("periodic",) and coarse.grid.period == (1.0,)
    torch.testing.assert_close(coarse.grid.points[:, 0], (torch.arange(64).double() + 0.5) / 64)
    torch.testing.assert_close(coarse.grid.weights, torch.full((64,), 1 / 64).double())
    single = inviscid_burgers(1, 16, seed=4)
    assert single.input.dtype == single.target.dtype == single.grid.dtype == torch.float32


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"n": 0}, ValueError, "n must be at least 1, got 0"),
        ({"cells": 0}, ValueError, "cells must be at least 1, got 0"),
        ({"start": -1}, ValueError, "start must be at least 0, got -1"),
        ({"T": 0.0}, ValueError, "T must be finite and positive, got 0.0"),
        ({"length_scale": 0.5}, ValueError, r"length_scale must lie in \[0.005, 0.25\], got 0.5"),
        ({"dtype": torch.float16}, TypeError, "dtype must be torch.float32 or torch.float64"),
    ],
)
def test_errors(change, error, message) -> None:
    with pytest.raises(error, match=message):
        co.data.inviscid_burgers(**{"n": 1, "seed": 0, **change})


def test_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="progress=True needs tqdm"):
        inviscid_burgers(1, 8, seed=0, progress=True)
