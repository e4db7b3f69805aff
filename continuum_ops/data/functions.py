"""What the data sets of function pairs share: the container, one random stream a sample, the progress bar."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..mesh import Grid, PointCloud


class FunctionPairs(NamedTuple):
    """Input and target functions on one grid.

    grid: N points, in row-major order on a grid of two axes.
    input: (n, N, c_in), the input functions there.
    target: (n, N, c_out), the target functions there.
    """

    grid: Grid
    input: Tensor
    target: Tensor


class ScatteredPairs(NamedTuple):
    """Target functions on scattered points that differ from sample to sample: the points are the input.

    mesh: n meshes of N points, points (n, N, d) and weights (n, N), the areas that the points stand for.
    target: (n, N, c), the target functions at the points.
    """

    mesh: PointCloud
    target: Tensor

    @classmethod
    def of(
        cls, points: np.ndarray, weights: np.ndarray, target: np.ndarray, dtype: torch.dtype
    ) -> ScatteredPairs:
        where, share, values = (torch.from_numpy(part).to(dtype) for part in (points, weights, target))
        return cls(PointCloud(where, share), values)


def sample_generator(seed: int, row: int) -> np.random.Generator:
    """The random numbers of sample `row`: of the seed and the row alone, whatever else is computed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(row,)))


def with_progress(rows: Iterable[Any], progress: bool, name: str, unit: str = "sample") -> Iterable[Any]:
    if not progress:
        return rows
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError('progress=True needs tqdm: pip install "continuum_ops[train]"') from error
    return tqdm(rows, desc=name, unit=unit)


def one_blas_thread() -> AbstractContextManager[Any]:
    """For solvers on short vectors, where a second thread of BLAS waits longer than it works."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return nullcontext()
    return threadpool_limits(1, user_api="blas")
