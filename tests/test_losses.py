"""Relative L2 against closed forms and float64 sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import continuum_ops as co
from continuum_ops.training import relative_l2


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
