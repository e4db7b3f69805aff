"""Trajectories of the Lorenz-63 system (CA section 6.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .functions import with_progress
from .trajectories import Trajectories, check_dtype, check_int, check_positive, resolve_times

SIGMA, RHO, BETA = 10.0, 28.0, 8.0 / 3.0
TASKS = ("x->y", "x,y0,z0->y,z")
# One block is one system of 3 * BLOCK equations with common steps. Its size never depends on n: a last block
# that is not full is filled up with trajectories that nobody asked for, so that n changes no trajectory.
BLOCK = 256
# Dense output at this tolerance is within 1e-7 of the exact trajectory on [0, 2]; at 1e-9, 1e-4.
TOLERANCE = 1e-12


def lorenz63(
    n: int,
    times: Tensor | np.ndarray | Sequence[float] | None = None,
    *,
    seed: int,
    task: Literal["x->y", "x,y0,z0->y,z"] = "x->y",
    T: float = 2.0,
    dt: float | None = None,
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> Trajectories:
    """n trajectories of Lorenz-63 on [0, T], sampled at any times (CA section 6.1, equations 40-42).

        dx/dt = sigma (y - x),  dy/dt = x (rho - z) - y,  dz/dt = x y - beta z

    with sigma = 10, rho = 28, beta = 8/3; x(0) and y(0) uniform on (-15, 15), z(0) on (0, 40), independent.
    Time has the unit of the equations.

    The trajectories depend on seed and T alone: not on times, and the first m of n are those of a call with
    n = m. The solver is scipy's DOP853 with its dense output; for T = 2 the values are within 1e-7 of
    the exact solution before they are rounded to dtype. The system is chaotic: the error grows by a factor e
    about every unit of time, so a trajectory means little beyond T of about 20. The same arguments give the
    same bytes on one machine; another version of numpy or scipy may differ within this accuracy.

    Args:
        n: number of trajectories, >= 1.
        times: (N,) real numbers in [0, T], in any order and as uneven as you like; None takes 0, dt, .., T.
            Best in float64, as ``uniform_times`` and ``uneven_times`` give them: float32 rounds the times.
        seed: >= 0; use different seeds for training and test data.
        task: the operator to learn. "x->y" maps {x(t)} to {y(t)}: input (n, N, 1), target (n, N, 1), initial
            None. "x,y0,z0->y,z" maps {x(t)}, y(0), z(0) to {y(t), z(t)} (CA equation 40): input (n, N, 1),
            target (n, N, 2) with channels y, z, and initial (n, 2) with y(0), z(0).
        T: end of the time interval, finite and positive.
        dt: spacing of the default times, 0.01 where it is None; it must divide T. Not together with times.
        dtype: torch.float32 or torch.float64, of everything that is returned. The computation is in float64.
        progress: show a progress bar (tqdm) on stderr.

    Returns:
        Trajectories: times (N,), input, target and initial, on the CPU.

    Raises:
        TypeError: if an argument has the wrong type or dtype.
        ValueError: if an argument is out of range; if dt does not divide T or comes with times.
        ImportError: without scipy, or with progress=True without tqdm.
        RuntimeError: if the solver gives up.
    """
    n = check_int("n", n, minimum=1)
    seed = check_int("seed", seed, minimum=0)
    if task not in TASKS:
        raise ValueError(f"task must be one of {TASKS}, got {task!r}")
    T = check_positive("T", T)
    sample_times = resolve_times(times, dt, T)
    dtype = check_dtype(dtype)

    blocks = -(-n // BLOCK)
    initial = _initial_values(blocks * BLOCK, seed)
    states = torch.empty(n, 3, len(sample_times), dtype=dtype)
    # The solver wants increasing times without repeats.
    distinct, position = np.unique(sample_times.numpy(), return_inverse=True)
    for block in with_progress(range(blocks), progress, "lorenz63", "block"):
        rows = slice(block * BLOCK, min((block + 1) * BLOCK, n))
        solution = _integrate(initial[block * BLOCK : (block + 1) * BLOCK], distinct, T)
        states[rows] = torch.from_numpy(solution[: rows.stop - rows.start, :, position])

    x, yz = states[:, :1].transpose(1, 2), states[:, 1:].transpose(1, 2)
    if task == "x->y":
        return Trajectories(sample_times.to(dtype), x.contiguous(), yz[..., :1].contiguous())
    initial_yz = torch.from_numpy(initial[:n, 1:]).to(dtype)
    return Trajectories(sample_times.to(dtype), x.contiguous(), yz.contiguous(), initial_yz)


def _initial_values(n: int, seed: int) -> np.ndarray:
    """(n, 3): x(0), y(0), z(0), drawn row after row, so that the first rows do not depend on n."""
    uniform = np.random.default_rng(seed).random((n, 3))
    return uniform * (30.0, 30.0, 40.0) - (15.0, 15.0, 0.0)


def _velocity(_: float, state: np.ndarray) -> np.ndarray:
    x, y, z = state.reshape(3, -1)
    return np.concatenate([SIGMA * (y - x), x * (RHO - z) - y, x * y - BETA * z])


def _integrate(initial: np.ndarray, times: np.ndarray, T: float) -> np.ndarray:
    """States (BLOCK, 3, N) at increasing times; the steps run over [0, T] whatever the times are."""
    try:
        from scipy.integrate import solve_ivp
    except ImportError as error:
        raise ImportError('lorenz63 needs scipy: pip install "continuum_ops[train]"') from error
    result = solve_ivp(
        _velocity, (0.0, T), initial.T.ravel(), method="DOP853", t_eval=times, rtol=TOLERANCE, atol=TOLERANCE
    )
    if not result.success:
        raise RuntimeError(f"the integration of Lorenz-63 failed: {result.message}")
    return result.y.reshape(3, len(initial), len(times)).transpose(1, 0, 2)
