"""Potential flow around Joukowski airfoils on scattered points: a stand-in for flows around airfoils."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..quadrature import simplices
from .functions import ScatteredPairs, sample_generator, with_progress
from .trajectories import check_dtype, check_int, check_positive, check_real

# Laws of the circle's centre, -e + i c: e makes the thickness, about 1.3 e of the chord, and c the camber.
THICKNESS = (0.04, 0.16)
CAMBER = (0.0, 0.15)
# Shares of the points on the airfoil and on the outer circle.
SURFACE, OUTER = 0.2, 0.06


def joukowski_airfoil(
    n: int,
    points: int = 1024,
    *,
    seed: int,
    start: int = 0,
    angle: float = 0.0,
    radius: float = 12.0,
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> ScatteredPairs:
    """n incompressible potential flows around random airfoils, each on its own scattered points.

    This is a stand-in for the transonic flows of PiT section A.6 (Euler equations, NACA profiles): another
    equation, other profiles and other meshes, made to have irregular geometry with an exact solution. Its
    errors are not comparable with published ones. The operator to learn maps the points to the flow.

    With m = -e + i c, e uniform in (0.04, 0.16), c uniform in (0, 0.15), and r = |1 - m|, the airfoil is the
    image of the circle |s - m| = r under z = (s + 1 / s) / 4, which has its sharp trailing edge at z = 1/2
    and a chord of about 1. The flow is of speed 1 far away, comes in at the angle b and leaves the trailing
    edge smoothly (Kutta):

        u - i v = (exp(-i b) - r^2 exp(i b) / (s - m)^2 + i g / (s - m)) / (1 - 1 / s^2),
        g = 2 r sin(b - arg(1 - m)),   c_p = 1 - u^2 - v^2.

    The points are random in log |s - m| and arg(s - m) between the circle and one of `radius` times its
    radius, so they are dense at the airfoil; a fifth of them lies on the airfoil and 6 % on the outer circle,
    evenly spaced in the angle. Their weights are areas: a third of each triangle of their Delaunay
    triangulation (scipy) in these two coordinates, times the Jacobian of the map.

    Sample i of a seed depends on seed, start + i, points and the constants alone, so ``start`` continues a
    data set. The same arguments give the same bytes on one machine.

    Args:
        n: number of samples, >= 1.
        points: N of each sample, >= 64.
        seed: >= 0; use different seeds for training and test data.
        start: number of the first sample, >= 0.
        angle: b, angle of attack in radians, in [-0.5, 0.5].
        radius: of the outer circle over that of the inner one, above 1.
        dtype: torch.float32 or torch.float64, of everything that is returned.
        progress: show a progress bar (tqdm) on stderr.

    Returns:
        ScatteredPairs: mesh of points (n, N, 2) in chords with weights (n, N), the points on the airfoil
        first; target (n, N, 3) with channels u, v, c_p; on the CPU.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument out of range.
        ImportError: without scipy, or with progress=True without tqdm.
    """
    n = check_int("n", n, minimum=1)
    points = check_int("points", points, minimum=64)
    seed = check_int("seed", seed, minimum=0)
    start = check_int("start", start, minimum=0)
    angle = check_real("angle", angle)
    if not -0.5 <= angle <= 0.5:
        raise ValueError(f"angle must lie in [-0.5, 0.5] (radians), got {angle}")
    radius = check_positive("radius", radius)
    if radius <= 1:
        raise ValueError(f"radius must be above 1, got {radius}")
    dtype = check_dtype(dtype)

    places, weights, target = np.empty((n, points, 2)), np.empty((n, points)), np.empty((n, points, 3))
    for row in with_progress(range(n), progress, "joukowski_airfoil"):
        generator = sample_generator(seed, start + row)
        e, c = generator.uniform(*THICKNESS), generator.uniform(*CAMBER)
        centre = complex(-e, c)
        depth, turn = _annulus(generator, points, math.log(radius), np.angle(1 - centre))
        s = centre + abs(1 - centre) * np.exp(depth + 1j * turn)
        z, velocity = flow(s, centre, angle)
        places[row] = np.stack([z.real, z.imag], -1)
        jacobian = np.abs((1 - s**-2) / 4 * (s - centre)) ** 2
        weights[row] = _shares(depth, turn) * jacobian
        target[row] = np.stack([velocity.real, velocity.imag, 1 - np.abs(velocity) ** 2], -1)
    return ScatteredPairs.of(places, weights, target, dtype)


def flow(s: np.ndarray, centre: complex, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """Points z = x + i y and velocities u + i v there, at s with |s - centre| >= |1 - centre|, s not 1."""
    arm = 1 - centre
    r, gamma = abs(arm), 2 * abs(arm) * math.sin(angle - math.atan2(arm.imag, arm.real))
    away = s - centre
    slope = np.exp(-1j * angle) - r**2 * np.exp(1j * angle) / away**2 + 1j * gamma / away
    return (s + 1 / s) / 4, (slope / (1 - s**-2)).conj()


def _annulus(
    generator: np.random.Generator, points: int, depth: float, edge: float
) -> tuple[np.ndarray, np.ndarray]:
    """Depths in [0, depth] and angles, the points of depth 0 first; the trailing edge is at `edge`."""
    surface, outer = round(SURFACE * points), max(8, round(OUTER * points))
    depths = np.zeros(points)
    depths[surface : surface + outer] = depth
    turns = np.empty(points)
    for part, first in ((surface, 0), (outer, surface)):
        # A quarter of a step or more from the trailing edge, where the map has no inverse.
        turns[first : first + part] = edge + 2 * np.pi / part * (
            np.arange(part) + generator.uniform(0.25, 0.75)
        )
    inner = surface + outer
    depths[inner:] = depth * generator.random(points - inner)
    turns[inner:] = 2 * np.pi * generator.random(points - inner)
    return depths, turns


def _shares(depth: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """A third of the area of the triangles at each point of a Delaunay triangulation periodic in the turn."""
    try:
        from scipy.spatial import Delaunay
    except ImportError as error:
        raise ImportError('joukowski_airfoil needs scipy: pip install "continuum_ops[train]"') from error
    turn = np.mod(turn, 2 * np.pi)
    # Copies a third of a turn beyond both ends; only triangles centred in the period count.
    low, high = np.flatnonzero(turn < 2.1), np.flatnonzero(turn > 2 * np.pi - 2.1)
    origin = np.concatenate([np.arange(len(turn)), low, high])
    angles = np.concatenate([turn, turn[low] + 2 * np.pi, turn[high] - 2 * np.pi])
    corners = np.stack([depth[origin], angles], -1)
    cells = Delaunay(corners).simplices
    centres = corners[cells, 1].mean(1)
    cells = cells[(centres >= 0) & (centres < 2 * np.pi)]
    return np.bincount(origin, simplices(corners, cells).numpy(), len(turn))
