"""Sampling times and the checks that the time-domain data sets share."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import continuum_ops as co

GENERATORS = [co.data.lorenz63, co.data.controlled_ode]
both = pytest.mark.parametrize("generate", GENERATORS, ids=lambda f: f.__name__)


def test_uniform_times():
    times = co.data.uniform_times(200)
    assert times.shape == (201,) and times.dtype == torch.float64
    exact = [float(Fraction(2 * n, 200)) for n in range(201)]
    assert times.tolist() == exact


@pytest.mark.parametrize("intervals", [2, 8, 200])
@pytest.mark.parametrize("end", [2.0, 0.7, 3])
def test_uneven_times_are_the_uniform_times_with_the_second_half_refined(intervals, end):
    times = co.data.uneven_times(intervals, end)
    assert times.shape == (3 * intervals // 2 + 1,) and times.dtype == torch.float64
    spacing = times.diff()
    dt = end / intervals
    torch.testing.assert_close(spacing[: intervals // 2], torch.full_like(spacing[: intervals // 2], dt))
    torch.testing.assert_close(spacing[intervals // 2 :], torch.full_like(spacing[intervals // 2 :], dt / 2))
    assert times[0] == 0 and times[intervals // 2] == end / 2 and times[-1] == end
    assert set(co.data.uniform_times(intervals, end).tolist()) <= set(times.tolist())


@pytest.mark.parametrize("helper", [co.data.uniform_times, co.data.uneven_times], ids=lambda f: f.__name__)
def test_time_helpers_refuse_bad_arguments(helper):
    with pytest.raises(TypeError, match="num_intervals must be an int, got float"):
        helper(8.0)
    with pytest.raises(ValueError, match=r"num_intervals must be at least \d, got 0"):
        helper(0)
    with pytest.raises(ValueError, match="T must be finite and positive, got -1"):
        helper(8, -1.0)
    with pytest.raises(TypeError, match="T must be a real number, got str"):
        helper(8, "2")


def test_uneven_times_need_an_even_number_of_intervals():
    with pytest.raises(ValueError, match=r"num_intervals must be even, .* got 7"):
        co.data.uneven_times(7)


@both
def test_default_times_and_dtype(generate):
    data = generate(2, seed=0)
    assert data.times.shape == (201,)
    assert data.input.shape == data.target.shape == (2, 201, 1)
    assert data.initial is None
    assert {t.dtype for t in data[:3]} == {torch.float32}
    assert data.input.is_contiguous() and data.target.is_contiguous()
    torch.testing.assert_close(data.times, torch.arange(201) * 0.01)
    assert generate(1, seed=0, T=0.5, dt=0.1).times.tolist() == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])


@both
@pytest.mark.parametrize(
    "times",
    [
        [0.0, 0.25, 1.5],
        (0.0, 0.25, 1.5),
        np.array([1.5, 0.25, 0.0])[::-1],
        np.array([0.0, 0.25, 1.5], dtype=np.float32),
        torch.tensor([0.0, 0.25, 1.5], dtype=torch.bfloat16),
        torch.tensor([0.0, 0.25, 1.5], requires_grad=True),
    ],
    ids=["list", "tuple", "reversed view", "float32", "bfloat16", "requires_grad"],
)
def test_times_in_any_container(generate, times):
    want = generate(2, torch.tensor([0.0, 0.25, 1.5], dtype=torch.float64), seed=3)
    for got, expected in zip(generate(2, times, seed=3)[:3], want[:3], strict=True):
        assert torch.equal(got, expected) and not got.requires_grad


@both
def test_integer_times_and_one_time(generate):
    data = generate(2, [0, 1, 2], seed=3)
    assert torch.equal(data.times, torch.tensor([0.0, 1.0, 2.0]))
    assert torch.equal(generate(2, torch.tensor([1]), seed=3).target[:, 0], data.target[:, 1])


@both
def test_end_rounded_up_by_the_dtype_of_times_is_accepted(generate):
    times = torch.linspace(0, 0.1, 3)
    assert times[-1].item() > 0.1
    assert generate(1, times, seed=0, T=0.1).times.shape == (3,)
    with pytest.raises(ValueError, match=r"times must lie in \[0, T\]"):
        generate(1, times.double(), seed=0, T=0.1)


@both
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n": 0}, ValueError, "n must be at least 1, got 0"),
        ({"n": 1.0}, TypeError, "n must be an int, got float"),
        ({"n": True}, TypeError, "n must be an int, got bool"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": None}, TypeError, "seed must be an int, got NoneType"),
        ({"T": 0.0}, ValueError, "T must be finite and positive, got 0.0"),
        ({"T": math.inf}, ValueError, "T must be finite and positive, got inf"),
        ({"T": "2"}, TypeError, "T must be a real number, got str"),
        ({"dt": 0.3}, ValueError, "dt must divide T, got dt = 0.3 and T = 2.0"),
        ({"dt": 4.0}, ValueError, "dt must divide T, got dt = 4.0 and T = 2.0"),
        ({"dt": 0.0}, ValueError, "dt must be finite and positive, got 0.0"),
        ({"dt": 0.1, "times": [0.0]}, ValueError, "dt must be None when times is given, got 0.1"),
        ({"times": []}, ValueError, r"times must have shape \(N,\) with N >= 1, got \(0,\)"),
        ({"times": torch.zeros(2, 1)}, ValueError, r"times must have shape \(N,\) with N >= 1, got \(2, 1\)"),
        ({"times": 1.0}, ValueError, r"times must have shape \(N,\) with N >= 1, got \(\)"),
        ({"times": ["a"]}, TypeError, "times must hold real numbers, got list"),
        ({"times": [[0.0], 1.0]}, TypeError, "times must hold real numbers, got list"),
        ({"times": [True]}, TypeError, "times must hold real numbers, got dtype torch.bool"),
        ({"times": [1j]}, TypeError, "times must hold real numbers, got dtype torch.complex128"),
        ({"times": [0.0, math.nan]}, ValueError, "times must be finite, got NaN or Inf"),
        ({"times": [-0.1, 1.0]}, ValueError, r"times must lie in \[0, T\] = \[0, 2.0\], got .* -0.1 to 1.0"),
        ({"times": [0, 3]}, ValueError, r"times must lie in \[0, T\] = \[0, 2.0\], got .* 0.0 to 3.0"),
        (
            {"dtype": torch.float16},
            TypeError,
            "dtype must be torch.float32 or torch.float64, got torch.float16",
        ),
    ],
)
def test_bad_arguments(generate, arguments, error, message):
    with pytest.raises(error, match=message):
        generate(**{"n": 1, "seed": 0, **arguments})
