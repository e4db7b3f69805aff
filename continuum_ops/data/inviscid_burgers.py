"""Entropy solutions of the inviscid Burgers equation on a periodic interval (PiT section A.1)."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..mesh import Grid
from .functions import FunctionPairs, sample_generator, with_progress
from .trajectories import check_dtype, check_int, check_positive

# Points of the first search for minima, per period of the highest mode; a minimum is then polished by Newton.
SEARCH = 48


def inviscid_burgers(
    n: int,
    cells: int = 1024,
    *,
    seed: int,
    start: int = 0,
    T: float = 0.1,
    length_scale: float = 0.06,
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> FunctionPairs:
    """n pairs u(., 0), u(., T) of the entropy solution of u_t + (u^2 / 2)_x = 0, u of period 1 (PiT eq. 13).

    PiT's T = 0.1 and 1024 cells. PiT leaves the law of the initial conditions and the boundary open; the
    choice here: u has period 1 and u(., 0) is a Gaussian field of mean 0 with covariance
    sum_m exp(-(x - y + m)^2 / (2 l^2)), l = 0.06 (variance 1), the mean of a sample not being 0:

        u0 = sum_k sqrt(c_k) (xi_k cos 2 pi k x + eta_k sin 2 pi k x),  c_0 = l sqrt(2 pi),
        c_k = 2 l sqrt(2 pi) exp(-2 pi^2 l^2 k^2),

    with the modes whose share is above rounding. The functions are given as averages over the cells, as a
    finite volume method does, and are exact: by Lax and Oleinik, u(., T) is the derivative of

        Phi(x) = min_y U0(y) + (x - y)^2 / (2 T),  U0' = u0,

    so an average is a difference of Phi over the cell. All local minima are found on a fine grid of y and
    polished by Newton's method: shocks are where they are to rounding, and the mean is conserved.

    Sample i of a seed depends on seed, start + i, T and length_scale alone, so ``start`` continues a data
    set; averages over coarser cells are averages of these. The same arguments give the same bytes on
    one machine.

    Args:
        n: number of pairs, >= 1.
        cells: N, >= 1.
        seed: >= 0; use different seeds for training and test data.
        start: number of the first sample, >= 0.
        T: final time, positive.
        length_scale: l, in [0.005, 0.25].
        dtype: torch.float32 or torch.float64, of everything that is returned.
        progress: show a progress bar (tqdm) on stderr.

    Returns:
        FunctionPairs: the centres of the cells as a periodic grid, input (n, N, 1), target (n, N, 1); CPU.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument out of range.
        ImportError: progress=True without tqdm.
    """
    n = check_int("n", n, minimum=1)
    cells = check_int("cells", cells, minimum=1)
    seed = check_int("seed", seed, minimum=0)
    start = check_int("start", start, minimum=0)
    T = check_positive("T", T)
    scale = check_positive("length_scale", length_scale)
    if not 0.005 <= scale <= 0.25:
        raise ValueError(f"length_scale must lie in [0.005, 0.25], got {length_scale}")
    dtype = check_dtype(dtype)

    edges = np.arange(cells + 1) / cells
    first, last = np.empty((n, cells)), np.empty((n, cells))
    for row in with_progress(range(n), progress, "inviscid_burgers"):
        initial = _draw(sample_generator(seed, start + row), scale)
        first[row] = np.diff(initial.integral(edges)) * cells
        last[row] = np.diff(entropy_potential(initial, edges, T)) * cells
    centres = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    return FunctionPairs(
        Grid(centres, kind="periodic", period=1.0).to(dtype=dtype),
        torch.from_numpy(first).to(dtype).unsqueeze(-1),
        torch.from_numpy(last).to(dtype).unsqueeze(-1),
    )


def _draw(generator: np.random.Generator, scale: float) -> _Series:
    k = np.arange(math.ceil(2 / scale) + 1)
    root = np.sqrt(np.where(k == 0, 1, 2) * scale * math.sqrt(2 * math.pi)) * np.exp(
        -((np.pi * scale * k) ** 2)
    )
    return _Series(*(root * generator.standard_normal((2, len(k)))))


class _Series:
    """sum_k cosine_k cos 2 pi k x + sine_k sin 2 pi k x, its derivative and an integral."""

    def __init__(self, cosine: np.ndarray, sine: np.ndarray) -> None:
        self.wave = 2 * np.pi * np.arange(len(cosine))
        self.mean, self.coefficients = cosine[0], cosine - 1j * sine
        self.coefficients[0] = 0.0

    def _sum(self, x: np.ndarray, factor: np.ndarray) -> np.ndarray:
        return (np.exp(1j * np.multiply.outer(x, self.wave)) @ (factor * self.coefficients)).real

    def value(self, x: np.ndarray) -> np.ndarray:
        return self.mean + self._sum(x, np.ones(len(self.wave)))

    def slope(self, x: np.ndarray) -> np.ndarray:
        return self._sum(x, 1j * self.wave)

    def integral(self, x: np.ndarray) -> np.ndarray:
        factor = np.zeros(len(self.wave), dtype=complex)
        factor[1:] = 1 / (1j * self.wave[1:])
        return self.mean * x + self._sum(x, factor)


def entropy_potential(initial: _Series, x: np.ndarray, T: float) -> np.ndarray:
    """min_y U0(y) + (x - y)^2 / (2 T) at each x: (N,)."""
    points = SEARCH * len(initial.wave)
    period = np.arange(points) / points
    values = initial.value(period)
    # y = x - T u, where u is within the range of u0 and, as u_x <= 1 / T, within 1 / T of its mean.
    fastest, slowest = min(values.max(), initial.mean + 1 / T), max(values.min(), initial.mean - 1 / T)
    low = math.floor((x.min() - T * fastest) * points) - 2
    high = math.ceil((x.max() - T * slowest) * points) + 2
    index = np.arange(low, high + 1)
    y = index / points
    potential = initial.integral(period)[index % points] + initial.mean * (index // points)
    found = np.empty(len(x))
    for first in range(0, len(x), 128):  # 128 rows at a time bound the memory
        block = x[first : first + 128]
        action = potential + (block[:, None] - y) ** 2 / (2 * T)
        lower = (action[:, 1:-1] <= action[:, :-2]) & (action[:, 1:-1] < action[:, 2:])
        rows, columns = np.nonzero(lower)
        at, target = y[columns + 1], block[rows]
        left, right = y[columns], y[columns + 2]
        for _ in range(8):
            rise = initial.value(at) - (target - at) / T
            curvature = initial.slope(at) + 1 / T
            step = np.divide(rise, curvature, out=np.zeros_like(at), where=curvature > 0)
            at = np.clip(at - step, left, right)
        polished = initial.integral(at) + (target - at) ** 2 / (2 * T)
        best = action.min(1)
        np.minimum.at(best, rows, polished)
        found[first : first + 128] = best
    return found
