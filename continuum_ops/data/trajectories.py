"""What the time-domain data sets share: the container, sampling times and argument checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

DEFAULT_DT = 0.01


class Trajectories(NamedTuple):
    """Pairs of an input function and a target function on one set of times.

    times: (N,), sampling times t_i, in the order in which they were asked for.
    input: (n, N, c_in), the input function at the times.
    target: (n, N, c_out), the target function at the times.
    initial: (n, c_0), initial condition at t = 0 (whether or not 0 is one of the times) of the components
        that are not observed, where the operator takes it as an input; otherwise None.

    All tensors have the same dtype, float32 unless asked otherwise, and live on the CPU.
    """

    times: Tensor
    input: Tensor
    target: Tensor
    initial: Tensor | None = None


def uniform_times(num_intervals: int, T: float = 2.0) -> Tensor:
    """Times t_n = n T / N, n = 0..N, with N = num_intervals (CA equation 42).

    Args:
        num_intervals: N >= 1.
        T: end of the time domain [0, T], finite and positive.

    Returns:
        Tensor: (N + 1,), float64.

    Raises:
        TypeError: if num_intervals is not an integer or T not a real number.
        ValueError: if num_intervals < 1 or T is not finite and positive.
    """
    intervals = check_int("num_intervals", num_intervals, minimum=1)
    end = check_positive("T", T)
    return torch.arange(intervals + 1, dtype=torch.float64) * end / intervals


def uneven_times(num_intervals: int, T: float = 2.0) -> Tensor:
    """Times whose second half is up-sampled by 2 (CA equation 41).

    With N = num_intervals and dt = T / N these are n dt for n = 0..N/2 and n dt / 2 for n = N + 1..2 N:
    spacing dt on [0, T/2] and dt / 2 on [T/2, T]. They contain ``uniform_times(N, T)``, with the same bits.

    Args:
        num_intervals: N, even and >= 2: the number of intervals of the uniform times that are refined.
        T: end of the time domain [0, T], finite and positive.

    Returns:
        Tensor: (3 N / 2 + 1,), float64, increasing.

    Raises:
        TypeError: if num_intervals is not an integer or T not a real number.
        ValueError: if num_intervals is odd or below 2, or T is not finite and positive.
    """
    intervals = check_int("num_intervals", num_intervals, minimum=2)
    if intervals % 2:
        raise ValueError(f"num_intervals must be even, so that T/2 is one of the times, got {num_intervals}")
    coarse = uniform_times(intervals, T)
    fine = uniform_times(2 * intervals, T)
    return torch.cat([coarse[: intervals // 2 + 1], fine[intervals + 1 :]])


def check_int(name: str, value: int, *, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return int(value)


def check_real(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}")
    return float(value)


def check_positive(name: str, value: float) -> float:
    number = check_real(name, value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be finite and positive, got {value}")
    return number


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    return dtype


def resolve_times(times: Tensor | np.ndarray | Sequence[float] | None, dt: float | None, T: float) -> Tensor:
    """The sampling times as a float64 tensor (N,) inside [0, T]; without times, n dt up to T."""
    if times is None:
        step = check_positive("dt", DEFAULT_DT if dt is None else dt)
        intervals = round(T / step)
        if intervals < 1 or not math.isclose(intervals * step, T, rel_tol=1e-9):
            raise ValueError(f"dt must divide T, got dt = {step} and T = {T}")
        return uniform_times(intervals, T)
    if dt is not None:
        raise ValueError(f"dt must be None when times is given, got {dt}")

    try:
        given = times.detach() if isinstance(times, Tensor) else torch.from_numpy(np.array(times, order="C"))
    except (TypeError, ValueError) as error:
        raise TypeError(f"times must hold real numbers, got {type(times).__name__}: {error}") from error
    if given.dtype == torch.bool or given.dtype.is_complex:
        raise TypeError(f"times must hold real numbers, got dtype {given.dtype}")
    if given.ndim != 1 or given.numel() == 0:
        raise ValueError(f"times must have shape (N,) with N >= 1, got {tuple(given.shape)}")

    exact = given.to(device="cpu", dtype=torch.float64)
    if not bool(torch.isfinite(exact).all()):
        raise ValueError("times must be finite, got NaN or Inf")
    # T itself, rounded to the dtype of times or summed up in steps of dt, may lie a few ulp above T.
    slack = 4 * torch.finfo(given.dtype).eps * T if given.dtype.is_floating_point else 0.0
    low, high = exact.min().item(), exact.max().item()
    if low < 0 or high > T + slack:
        raise ValueError(f"times must lie in [0, T] = [0, {T}], got values from {low} to {high}")
    return exact.clamp(max=T)
