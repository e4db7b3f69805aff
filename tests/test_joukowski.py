"""Flow around Joukowski airfoils: the equations, the boundary conditions, known special cases, areas."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import continuum_ops as co
from continuum_ops.data.joukowski import flow, joukowski_airfoil

CENTRE = complex(-0.1, 0.08)
RADIUS = abs(1 - CENTRE)


def ring(r: float, number: int = 400) -> np.ndarray:
    """Points of the circle r times as large, from the trailing edge on, without it."""
    turn = np.angle(1 - CENTRE) + 2 * np.pi * (np.arange(number) + 0.5) / number
    return CENTRE + r * RADIUS * np.exp(1j * turn)


@pytest.mark.parametrize("angle", [0.0, 0.1, -0.2])
def test_no_flow_through_the_airfoil(angle: float) -> None:
    s = ring(1.0)
    _, velocity = flow(s, CENTRE, angle)
    tangent = 1j * (s - CENTRE) * (1 - s**-2)
    across = (velocity * (tangent * 1j).conj()).real / np.abs(tangent)
    np.testing.assert_allclose(across, 0, atol=1e-12)


def test_free_stream_and_kutta_condition() -> None:
    _, far = flow(CENTRE + 1e7 * np.exp(1j * np.arange(8.0)), CENTRE, 0.1)
    np.testing.assert_allclose(far, np.exp(0.1j), rtol=0, atol=1e-6)
    # Both sides leave the trailing edge with one finite velocity, along the cusp.
    edge = np.angle(1 - CENTRE) + np.array([1e-4, -1e-4])
    _, velocity = flow(CENTRE + RADIUS * np.exp(1j * edge), CENTRE, 0.1)
    assert abs(velocity[0] - velocity[1]) < 2e-3 and 0.5 < abs(velocity[0]) < 1.5


def test_the_velocity_has_no_divergence_and_no_curl_at_second_order() -> None:
    """Central differences of u and v in x and y; points go back to s by z = (s + 1/s) / 4."""
    z0, _ = flow(ring(1.5, 16), CENTRE, 0.1)
    largest = []
    for h in (4e-3, 2e-3, 1e-3):

        def at(z: np.ndarray) -> np.ndarray:
            root = np.sqrt((2 * z) ** 2 - 1)
            s = np.where(
                np.abs(2 * z + root - CENTRE) > np.abs(2 * z - root - CENTRE), 2 * z + root, 2 * z - root
            )
            return flow(s, CENTRE, 0.1)[1]

        dx, dy = (at(z0 + h) - at(z0 - h)) / (2 * h), (at(z0 + 1j * h) - at(z0 - 1j * h)) / (2 * h)
        largest.append(max(np.abs(dx.real + dy.imag).max(), np.abs(dx.imag - dy.real).max()))
    orders = np.log2(np.array(largest[:-1]) / largest[1:])
    assert (orders > 1.9).all() and largest[-1] < 1e-3, largest


def test_lift_by_blasius_and_by_kutta_and_joukowski() -> None:
    """The pressure force on the airfoil is circulation times speed, across the stream (density 1)."""
    angle, centre = 0.1, complex(-0.1, 0.08)
    turn = np.angle(1 - centre) + 2 * np.pi * (np.arange(20000) + 0.5) / 20000
    s = centre + abs(1 - centre) * np.exp(1j * turn)
    _, velocity = flow(s, centre, angle)
    dz = 1j * (s - centre) * (1 - s**-2) / 4 * 2 * np.pi / 20000
    pressure = (1 - np.abs(velocity) ** 2) / 2
    force = (pressure * 1j * dz).sum()  # -p n, the outer normal being -i dz
    circulation = (velocity.conj() * dz).sum().real
    assert abs(force - (-circulation) * 1j * np.exp(1j * angle)) < 1e-6
    assert circulation == pytest.approx(
        -2 * np.pi * abs(1 - centre) * np.sin(angle + np.arcsin(0.08 / abs(1 - centre))) / 2
    )


def test_a_flat_plate() -> None:
    """Centre 0: the airfoil is [-1/2, 1/2]; u = cos b -+ sin b sqrt((1/2 - x) / (1/2 + x)) on both sides."""
    turn = np.linspace(0.3, 2.8, 9)
    for side in (1, -1):
        z, velocity = flow(np.exp(1j * side * turn), 0j, 0.2)
        np.testing.assert_allclose(z.imag, 0, atol=1e-16)
        expected = np.cos(0.2) + side * np.sin(0.2) * np.sqrt((0.5 - z.real) / (0.5 + z.real))
        np.testing.assert_allclose(velocity, expected, rtol=1e-12, atol=1e-12)


def test_samples() -> None:
    data = joukowski_airfoil(2, 500, seed=1, angle=0.1, dtype=torch.float64)
    assert data.mesh.points.shape == (2, 500, 2) and data.target.shape == (2, 500, 3)
    u, v, pressure = data.target.unbind(-1)
    torch.testing.assert_close(pressure, 1 - u**2 - v**2)
    # The first fifth is a closed curve around the leading edge, with a chord of about 1.
    for x in data.mesh.points[:, :100, 0]:
        assert 0.45 < x.max() <= 0.51 and -0.65 < x.min() < -0.45
    assert not torch.equal(data.mesh.points[0], data.mesh.points[1])
    again = joukowski_airfoil(1, 500, seed=1, start=1, angle=0.1, dtype=torch.float64)
    assert torch.equal(again.mesh.points[0], data.mesh.points[1]) and torch.equal(
        again.target[0], data.target[1]
    )
    single = joukowski_airfoil(1, 64, seed=1)
    assert single.target.dtype == single.mesh.dtype == single.mesh.weights.dtype == torch.float32


def test_the_weights_are_areas() -> None:
    """Their sum converges to the area between the airfoil and the outer curve, by Green's theorem."""
    errors = []
    for points in (250, 1000, 4000):
        data = joukowski_airfoil(4, points, seed=2, radius=4.0, dtype=torch.float64)
        assert (data.mesh.weights > 0).all()
        generators = [np.random.default_rng(np.random.SeedSequence(2, spawn_key=(i,))) for i in range(4)]
        centres = [complex(-g.uniform(0.04, 0.16), g.uniform(0.0, 0.15)) for g in generators]
        turn = 2 * np.pi * np.arange(4096) / 4096
        areas = []
        for centre in centres:
            total = 0.0
            for sign, r in ((-1, 1.0), (1, 4.0)):
                s = centre + r * abs(1 - centre) * np.exp(1j * turn)
                z, dz = (s + 1 / s) / 4, 1j * (s - centre) * (1 - s**-2) / 4
                total += sign * (z.conj() * dz).imag.mean() * np.pi
            areas.append(total)
        errors.append(np.abs(data.mesh.weights.sum(1).numpy() / areas - 1).max())
    assert errors[0] < 0.1 and errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2, errors


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"n": 0}, ValueError, "n must be at least 1, got 0"),
        ({"points": 10}, ValueError, "points must be at least 64, got 10"),
        ({"angle": 1.0}, ValueError, r"angle must lie in \[-0.5, 0.5\]"),
        ({"radius": 1.0}, ValueError, "radius must be above 1, got 1.0"),
        ({"dtype": torch.float16}, TypeError, "dtype must be torch.float32"),
    ],
)
def test_errors(change, error, message) -> None:
    with pytest.raises(error, match=message):
        co.data.joukowski_airfoil(**{"n": 1, "points": 100, "seed": 0, **change})


def test_without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="progress=True needs tqdm"):
        joukowski_airfoil(1, 64, seed=0, progress=True)
    monkeypatch.setitem(sys.modules, "scipy.spatial", None)
    with pytest.raises(ImportError, match=r"continuum_ops\[train\]"):
        joukowski_airfoil(1, 64, seed=0)
