"""Relative L2 and the H1 seminorm against closed forms and float64 sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import continuum_ops as co
from continuum_ops.training import h1_seminorm, relative_h1, relative_l1, relative_l2, relative_l2_h1


def test_simpson_integrates_the_squares_of_linear_functions_exactly() -> None:
    # ||x|| / ||2 - x|| on [0, 1]: the integrals of x^2 and (2 - x)^2 are 1/3 and 7/3.
    x = torch.tensor([0.0, 0.1, 0.2, 0.6, 1.0], dtype=torch.float64)
    weights = torch.tensor([0.1, 0.4, 0.1, 0, 0], dtype=torch.float64) / 3
    weights += torch.tensor([0, 0, 0.4, 1.6, 0.4], dtype=torch.float64) / 3
    target = (2 - x).reshape(1, -1, 1)
    error = relative_l2(target + x.reshape(1, -1, 1), target, weights)
    torch.testing.assert_close(
        error, torch.tensor([math.sqrt(1 / 7)], dtype=torch.float64), rtol=1e-14, atol=0
    )


def test_the_value_does_not_depend_on_the_mesh() -> None:
    # ||e^-x|| / ||e^x|| on [0, 1] = sqrt((1 - e^-2) / (e^2 - 1)) = 1/e: Gauss and trapezoid, even and uneven.
    x, w = co.quadrature.gauss_legendre(12, 0.0, 1.0)
    uneven = torch.linspace(0, 1, 2001, dtype=torch.float64) ** 2
    for points, weights in ((x, w), (uneven, co.quadrature.trapezoid(uneven))):
        target = points.exp().reshape(1, -1, 1)
        error = relative_l2(target + (-points).exp().reshape(1, -1, 1), target, weights)
        assert error.item() == pytest.approx(1 / math.e, rel=2e-6)
    without = relative_l2(target + (-uneven).exp().reshape(1, -1, 1), target)
    assert abs(without.item() - 1 / math.e) > 0.05


@pytest.mark.parametrize("per_sample", [False, True])
def test_batches_and_channels_against_numpy(per_sample: bool) -> None:
    generator = np.random.default_rng(0)
    pred, target = generator.standard_normal((2, 3, 7, 2))
    weights = generator.random((3, 7) if per_sample else 7)
    expected = [
        math.sqrt(
            sum(w[i] * ((pred[b, i] - target[b, i]) ** 2).sum() for i in range(7))
            / sum(w[i] * (target[b, i] ** 2).sum() for i in range(7))
        )
        for b in range(3)
        for w in [weights[b] if per_sample else weights]
    ]
    got = relative_l2(*map(torch.from_numpy, (pred, target, weights)))
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-13)


def test_low_precision_sums_in_float32() -> None:
    # 0.5 / 4 exactly; bfloat16 sums of 4096 equal squares would stop growing early.
    target = torch.full((1, 4096, 1), 4.0, dtype=torch.bfloat16)
    error = relative_l2(target + 0.5, target, torch.full((4096,), 1 / 4096, dtype=torch.float64))
    assert error.dtype == torch.float32
    assert error.item() == pytest.approx(0.125, rel=1e-6)


def test_gradient() -> None:
    torch.manual_seed(0)
    pred = torch.randn(2, 5, 2, dtype=torch.float64, requires_grad=True)
    target = torch.randn(2, 5, 2, dtype=torch.float64)
    weights = torch.rand(5, dtype=torch.float64) + 0.1
    assert torch.autograd.gradcheck(lambda p: relative_l2(p, target, weights), pred)
    exact = target.clone().requires_grad_()
    relative_l2(exact, target, weights).sum().backward()
    assert torch.equal(exact.grad, torch.zeros_like(target))


def test_a_target_of_zero() -> None:
    zero, one = torch.zeros(1, 3, 1), torch.ones(1, 3, 1)
    assert relative_l2(one, zero).item() == math.inf
    assert math.isnan(relative_l2(zero, zero).item())


GOOD = torch.ones(2, 3, 1)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((GOOD[0], GOOD[0]), ValueError, r"pred must have shape \(B, N, C\), was \(3, 1\)"),
        (
            (GOOD, GOOD[:, :2]),
            ValueError,
            r"target must have the shape of pred, \(2, 3, 1\), was \(2, 2, 1\)",
        ),
        ((GOOD, GOOD, torch.ones(2)), ValueError, r"weights must have shape \(3,\) or \(2, 3\), was \(2,\)"),
        (
            (GOOD, GOOD.double()),
            TypeError,
            "target must have the dtype of pred, torch.float32, was torch.float64",
        ),
        ((GOOD.int(), GOOD.int()), TypeError, "pred must have a floating dtype, was torch.int32"),
        ((GOOD, GOOD, torch.ones(3).int()), TypeError, "weights must have a floating dtype, was torch.int32"),
        ((GOOD, 1.0), TypeError, "target must be a tensor, was float"),
        ((GOOD, GOOD.to("meta")), ValueError, "target must be on the device of pred, cpu, was on meta"),
    ],
)
def test_errors(args: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        relative_l2(*args)


# --- the H1 seminorm -----------------------------------------------------------------------------


def field(grid: co.Grid) -> Tensor:
    """sin 2 pi x times a factor of period 1 in the other coordinates, (1, N, 1)."""
    x = grid.points
    f = torch.sin(2 * math.pi * x[:, :1])
    for j in range(1, x.shape[1]):
        f = f * torch.cos(2 * math.pi * x[:, j : j + 1])
    return f[None]


@pytest.mark.parametrize("kind", ["periodic", "endpoint", "cell"])
@pytest.mark.parametrize("n", [64, 128, 256, 416])
def test_h1_seminorm_converges_to_its_limit(kind: str, n: int) -> None:
    """CASES 29: |grad sin 2 pi x| on (0, 1) is 2 pi / sqrt(2) at every resolution."""
    grid = co.Grid.uniform(n, kind=kind)
    error = abs(h1_seminorm(field(grid), grid).item() * math.sqrt(2) / (2 * math.pi) - 1)
    assert error < 0.05 * (64 / n) ** 2


def test_h1_seminorm_in_two_dimensions_with_coefficient() -> None:
    grid = co.Grid.uniform((96, 128), kind=("endpoint", "periodic"))
    a = 2.0 + torch.sin(2 * math.pi * grid.points[:, 1])
    # Mean of a^2 cos^2 Y = 4/2 + 1/8, of a^2 sin^2 Y = 4/2 + 3/8; of cos^2 X, sin^2 X: 1/2.
    true = 2 * math.pi * math.sqrt((2 + 1 / 8) / 2 + (2 + 3 / 8) / 2)
    for shape in ((96 * 128,), (1, 96 * 128), (1, 96 * 128, 1)):
        assert h1_seminorm(field(grid), grid, a.view(shape)).item() == pytest.approx(true, rel=2e-3)


@pytest.mark.parametrize("kind", ["periodic", "endpoint"])
def test_differences_are_exact_for_parabolas_on_uneven_axes(kind: str) -> None:
    x = torch.tensor([0.0, 0.1, 0.15, 0.4, 0.9], dtype=torch.float64)
    if kind == "endpoint":
        grid = co.Grid(x)
        f, slope = 3 * x**2 - x, 6 * x - 1
        true = (grid.weights * slope**2).sum().sqrt()
    else:  # a constant: its differences vanish across the period too
        grid, f, true = co.Grid(x, kind="periodic", period=1.0), torch.full_like(x, 2.0), torch.tensor(0.0)
    assert h1_seminorm(f[None, :, None], grid).item() == pytest.approx(true.item(), abs=1e-13)


def test_relative_l2_h1_is_the_sum_of_both_parts() -> None:
    grid = co.Grid.uniform(50, kind="periodic")
    pred, target = torch.randn(2, 3, 50, 2, dtype=torch.float64)
    gamma, norm = 0.1 / 50, (target.square().sum((1, 2)) / 50).sqrt()
    parts = (
        relative_l2(pred, target, grid.weights) ** 2 + gamma * (h1_seminorm(pred - target, grid) / norm) ** 2
    )
    torch.testing.assert_close(relative_l2_h1(pred, target, grid, gamma), parts.sqrt(), rtol=1e-12, atol=0)
    assert torch.equal(relative_l2_h1(pred, target, grid, 0.0), relative_l2(pred, target, grid.weights))
    same = target.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(relative_l2_h1(same, target, grid, gamma).sum(), same)
    assert not gradient.any()


def test_h1_gradient() -> None:
    grid = co.Grid.uniform((4, 5))
    f = torch.randn(2, 20, 1, dtype=torch.float64, requires_grad=True)
    a = torch.rand(2, 20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda f, a: h1_seminorm(f, grid, a), (f, a))


def test_h1_errors() -> None:
    grid, f = co.Grid.uniform(6), torch.ones(2, 6, 1)
    with pytest.raises(TypeError, match="grid must be a Grid, was Tensor"):
        h1_seminorm(f, torch.ones(6))
    with pytest.raises(ValueError, match=r"f must have shape \(B, 6, C\) for this grid, was \(2, 5, 1\)"):
        h1_seminorm(f[:, :5], grid)
    with pytest.raises(ValueError, match=r"grid must have at least 3 points per axis, was \(2, 3\)"):
        h1_seminorm(f, co.Grid.uniform((2, 3)))
    with pytest.raises(ValueError, match=r"coefficient must have shape .*, was \(3,\)"):
        h1_seminorm(f, grid, torch.ones(3))
    with pytest.raises(ValueError, match=r"gamma must be >= 0, was -1"):
        relative_l2_h1(f, f, grid, -1.0)


def test_relative_l1_against_a_closed_form() -> None:
    # |x| over |2 - x| on [0, 1]: integrals 1/2 and 3/2, exact for the trapezoid rule on any mesh.
    for axis in (torch.linspace(0, 1, 9).double(), torch.linspace(0, 1, 9).double() ** 2):
        mesh = co.Grid(axis)
        target = torch.stack([axis - 2, 2 - axis], -1)[None]
        shift = torch.stack([axis, -axis], -1)[None]
        error = relative_l1(target + shift, target, mesh.weights)
        assert error.shape == (1,) and error.item() == pytest.approx(1 / 3, rel=1e-14)
    pred, target = torch.randn(2, 3, 5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, b = pred.numpy(), target.numpy()
    expected = np.abs(a - b).sum((1, 2)) / np.abs(b).sum((1, 2))
    np.testing.assert_allclose(relative_l1(pred, target).numpy(), expected, rtol=1e-14)
    exact = target.clone().requires_grad_()
    relative_l1(exact, target).sum().backward()
    assert torch.equal(exact.grad, torch.zeros_like(target))
    with pytest.raises(ValueError, match="target must have the shape of pred"):
        relative_l1(pred, target[:, :3])


def test_relative_h1_against_closed_forms() -> None:
    # On [0, 1]^2, differences are exact for quadratics: f = x + y^2, g = 1. |f|^2 = 1/3 + 1/3 + 1/5 =
    # 13/15, |grad f|^2 = 1 + 4/3 = 7/3; with the trapezoid rule to O(h^2).
    ratios = []
    for n in (33, 65):
        grid = co.Grid.uniform((n, n))
        x, y = grid.points.unbind(1)
        f, g = (x + y**2)[None, :, None], torch.ones(1, n * n, 1, dtype=torch.float64)
        error = relative_h1(g + f, g, grid)  # |1|_H1 = 1
        ratios.append(error.item() - math.sqrt(13 / 15 + 7 / 3))
    assert abs(ratios[1]) < 3e-4 and ratios[0] / ratios[1] == pytest.approx(4, rel=0.01)
    # The denominator's gradient counts: f / (2 f).
    assert relative_h1(f + 2 * f, 2 * f, grid).item() == pytest.approx(0.5, rel=1e-13)
    assert torch.autograd.gradcheck(
        lambda p: relative_h1(p, f[:, :9], co.Grid.uniform((3, 3))),
        torch.rand(1, 9, 1, dtype=torch.float64, requires_grad=True),
    )
    with pytest.raises(TypeError, match="grid must be a Grid"):
        relative_h1(f, f, co.PointCloud(grid.points))
