"""Smoothing: exact on the eigenfunctions of the Laplacian, between resolutions, errors."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import draw

import continuum_ops as co
from continuum_ops.models import Smoothing

EPS, ALPHA = 3e-2, 1.25
BOUNDS = ((0.5, 2.0), (-1.0, 3.0), (0.0, 1.0))


def wave(grid, axis, k, boundary):
    """An eigenfunction along one axis and its eigenvalue of -Laplace."""
    lo, hi = BOUNDS[axis]
    x, length = grid.axes[axis] - lo, hi - lo
    if boundary == "periodic":
        return torch.cos(2 * math.pi * k * x / length + 0.3), (2 * math.pi * k / length) ** 2
    return torch.sin(math.pi * k * x / length), (math.pi * k / length) ** 2


CASES = [
    ("periodic", "periodic"),
    ("periodic", "cell"),
    ("dirichlet", "endpoint"),
    ("dirichlet", "cell"),
    ("dirichlet", "periodic"),
]


@pytest.mark.parametrize(("boundary", "kind"), CASES)
@pytest.mark.parametrize("n", [7, 8])
def test_eigenfunctions_in_one_dimension(boundary, kind, n):
    grid = co.Grid.uniform(n, BOUNDS[0], kind=kind)
    waves = range(1, 4) if boundary == "periodic" else range(1, n - 1)  # all but Nyquist's
    for k in waves:
        z, eigenvalue = wave(grid, 0, k, boundary)
        out = Smoothing(boundary, EPS, ALPHA)(z[None, :, None], grid)
        true = z * (1 + EPS * eigenvalue) ** -ALPHA
        torch.testing.assert_close(out[0, :, 0], true, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dimension", [2, 3])
@pytest.mark.parametrize("n", [6, 7])
def test_eigenfunctions_with_another_condition_on_each_axis(dimension, n):
    boundary = ("dirichlet", "periodic", "dirichlet")[:dimension]
    kind = ("endpoint", "periodic", "cell")[:dimension]
    shape = (n, 9, 5)[:dimension]
    grid = co.Grid.uniform(shape, BOUNDS[:dimension], kind=kind)
    waves = [wave(grid, i, k, b) for i, (k, b) in enumerate(zip((3, 2, 1), boundary, strict=False))]
    z = waves[0][0]
    for other, _ in waves[1:]:
        z = z[..., None] * other
    factor = (1 + EPS * sum(eigenvalue for _, eigenvalue in waves)) ** -ALPHA
    out = Smoothing(boundary, EPS, ALPHA)(torch.stack([z, -2 * z], -1)[None], grid)
    torch.testing.assert_close(out, torch.stack([z, -2 * z], -1)[None] * factor, rtol=0, atol=1e-13)


def test_constants_are_kept_periodically():
    grid = co.Grid.uniform((6, 8), kind="cell")
    one = torch.ones(1, 6, 8, 1, dtype=torch.float64)
    torch.testing.assert_close(Smoothing("periodic")(one, grid), one, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["cell", "endpoint", "periodic"])
def test_solves_the_boundary_value_problem(kind):
    """alpha = 1: z - eps z'' = 1 with z(0) = z(1) = 0 has a closed form."""

    def error(n):
        grid = co.Grid.uniform(n, kind=kind)
        out = Smoothing("dirichlet", 1e-3, 1.0)(torch.ones(1, n, 1, dtype=torch.float64), grid)
        x, root = grid.axes[0], 1e-3**0.5
        true = 1 - torch.cosh((x - 0.5) / root) / math.cosh(0.5 / root)
        return (out[0, :, 0] - true).abs().max().item()

    assert error(400) < 5e-3
    assert error(800) < 0.6 * error(400)


def test_the_boundary_is_zero_where_it_has_points():
    z = draw((1, 7, 6, 1), torch.float64)
    out = Smoothing("dirichlet")(z, co.Grid.uniform((7, 6)))[0, ..., 0]
    edges = [out[0], out[-1], out[:, 0], out[:, -1]]
    assert max(edge.abs().max().item() for edge in edges) < 1e-15
    out = Smoothing("dirichlet")(z, co.Grid.uniform((7, 6), kind="periodic"))[0, ..., 0]
    assert out[0].abs().max() < 1e-15 and out[-1].abs().max() > 1e-3


def test_evens_out_a_jump():
    """alpha = 1: of a step far from the ends the Green's function leaves e^(-r / root) / 2."""
    n, root = 400, 1e-3**0.5
    grid = co.Grid.uniform(n, kind="cell")
    x = grid.axes[0]
    out = Smoothing("dirichlet", 1e-3, 1.0)((x > 0.5).double()[None, :, None], grid)[0, :, 0]
    decay = 0.5 * torch.exp(-(x - 0.5).abs() / root)
    near = (x - 0.5).abs() < 0.2
    torch.testing.assert_close(out[near], torch.where(x > 0.5, 1 - decay, decay)[near], rtol=0, atol=1e-3)


def test_defaults_dtypes_and_gradients():
    layer = Smoothing("periodic")
    assert (layer.eps, layer.alpha) == (1e-3, 1.001)
    grid = co.Grid.uniform((6, 5), kind="periodic")
    z = draw((2, 6, 5, 2), torch.float64)
    true = layer(z, grid)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        out = layer(z.to(dtype), grid)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), true, rtol=0, atol=bound * z.abs().max().item())
    # The operator is linear and symmetric: its gradient is itself.
    z.requires_grad_()
    g = draw((2, 6, 5, 2), torch.float64, seed=1)
    (layer(z, grid) * g).sum().backward()
    torch.testing.assert_close(z.grad, layer(g, grid), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("neumann",), 'boundary must be "periodic" or "dirichlet", one for all axes or one each, was .neu'),
        (((),), "boundary must be"),
        (("periodic", 0.0), "eps must be finite and > 0, was 0.0"),
        (("periodic", 1e-3, math.nan), "alpha must be finite and > 0, was nan"),
    ],
)
def test_constructor_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        Smoothing(*arguments)


def test_call_errors():
    z = torch.zeros(1, 4, 4, 1)
    with pytest.raises(ValueError, match=r'"periodic" or "cell" along axis 0 .* was "endpoint"'):
        Smoothing("periodic")(z, co.Grid.uniform((4, 4)))
    with pytest.raises(
        ValueError, match=r"z must have shape \(B, 4, 5, C\) on this grid, was \(1, 4, 4, 1\)"
    ):
        Smoothing("dirichlet")(z, co.Grid.uniform((4, 5)))
    with pytest.raises(ValueError, match=r"grid must have 3 axes for boundary .*, had 2"):
        Smoothing(("dirichlet",) * 3)(z, co.Grid.uniform((4, 4)))
    with pytest.raises(ValueError, match="grid must have at least 3 points along axis 0, had 2"):
        Smoothing("dirichlet")(z[:, :2], co.Grid.uniform((2, 4)))
