"""Trajectories of a controlled differential equation (CA section 6.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .trajectories import Trajectories, check_dtype, check_int, check_positive, check_real, resolve_times


def controlled_ode(
    n: int,
    times: Tensor | np.ndarray | Sequence[float] | None = None,
    *,
    seed: int,
    J: int = 10,
    z0: float = 1.0,
    T: float = 2.0,
    dt: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Trajectories:
    """n solutions of dz = sin(z) du, z(0) = z0, on [0, T], sampled at any times (CA section 6.1, CDE).

        u(t) = sum_{j=1..J} xi_j sin(pi eta_j t),  xi_j ~ N(0, 1),  eta_j uniform on (0, J), independent.

    The operator to learn maps {u(t)} to {z(t)}. Separation of variables gives z in closed form,

        z(t) = 2 atan(tan(z0 / 2) exp(u(t) - u(0))),  u(0) = 0,

    which is evaluated in float64: there is no time stepping and no error beyond rounding. The paper leaves z0
    open; the default is 1, the same for all trajectories. z keeps the sign of z0 and stays between -pi and
    pi; z0 = 0 is the equilibrium z = 0.

    The trajectories depend on seed, J and z0 alone: not on times, and the first m of n are those of a call
    with n = m. The same arguments give the same bytes on one machine; another version of numpy may draw other
    numbers.

    Args:
        n: number of trajectories, >= 1.
        times: (N,) real numbers in [0, T], in any order and as uneven as you like; None takes 0, dt, .., T.
            Best in float64, as ``uniform_times`` and ``uneven_times`` give them: float32 rounds the times.
        seed: >= 0; use different seeds for training and test data.
        J: number of modes of u and upper end of their frequencies eta, >= 1.
        z0: z(0), in radians, in (-pi, pi).
        T: end of the time interval, finite and positive; it bounds times and changes no trajectory.
        dt: spacing of the default times, 0.01 where it is None; it must divide T. Not together with times.
        dtype: torch.float32 or torch.float64, of everything that is returned.

    Returns:
        Trajectories: times (N,), input u (n, N, 1), target z (n, N, 1), initial None; on the CPU.

    Raises:
        TypeError: if an argument has the wrong type or dtype.
        ValueError: if an argument is out of range; if dt does not divide T or comes with times.
    """
    n = check_int("n", n, minimum=1)
    seed = check_int("seed", seed, minimum=0)
    J = check_int("J", J, minimum=1)
    z0 = check_real("z0", z0)
    if not -math.pi < z0 < math.pi:
        raise ValueError(f"z0 must lie in (-pi, pi), where the closed form holds, got {z0}")
    T = check_positive("T", T)
    sample_times = resolve_times(times, dt, T)
    dtype = check_dtype(dtype)

    # Two streams, each drawn row after row: the first rows do not depend on n.
    amplitude_seed, frequency_seed = np.random.SeedSequence(seed).spawn(2)
    amplitude = np.random.default_rng(amplitude_seed).standard_normal((n, J))
    frequency = np.random.default_rng(frequency_seed).random((n, J)) * J

    # Mode after mode: (n, J, N) at once would take J times the memory of the result.
    control = np.zeros((n, len(sample_times)))
    for j in range(J):
        phase = np.pi * frequency[:, j, None] * sample_times.numpy()
        control += amplitude[:, j, None] * np.sin(phase)
    state = 2.0 * np.arctan(math.tan(z0 / 2.0) * np.exp(control))

    return Trajectories(
        sample_times.to(dtype),
        torch.from_numpy(control).to(dtype).unsqueeze(-1),
        torch.from_numpy(state).to(dtype).unsqueeze(-1),
    )
