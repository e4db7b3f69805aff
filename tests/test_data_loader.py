"""An operator and a data generator called by the items of a dataset, in the workers of a DataLoader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import continuum_ops as co
from continuum_ops.data import controlled_ode, uneven_times

TIMES = uneven_times(340)  # 511 points: enough products for the operator to use its threads


class Smoothed(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """u and z of a controlled equation, drawn when they are asked for, and u attended to itself."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        data = controlled_ode(1, TIMES, seed=index, dtype=torch.float64)
        u = data.input
        weights = co.quadrature.trapezoid(data.times)
        return u[0, :, 0], data.target[0, :, 0], co.continuum_attention(u, u, u, weights, scale=2.0)[0, :, 0]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_items_are_made_in_workers(start):
    """Also after the parent has used its threads, which a forked child does not have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        Smoothed()[0]
        loader = DataLoader(Smoothed(), num_workers=2, multiprocessing_context=start, timeout=120)
        items = [tuple(t[0].numpy() for t in item) for item in loader]
    finally:
        torch.set_num_threads(threads)
    assert len(items) == len({u.tobytes() for u, _, _ in items}) == 6
    gaps = np.diff(TIMES.numpy())
    weights = (np.append(gaps, 0) + np.append(0, gaps)) / 2
    for u, z, smooth in items:
        np.testing.assert_allclose(z, 2 * np.arctan(np.tan(0.5) * np.exp(u)), rtol=1e-12, atol=1e-12)
        s = 2.0 * u[:, None] * u
        p = weights * np.exp(s - s.max(1, keepdims=True))
        np.testing.assert_allclose(smooth, p @ u / p.sum(1), rtol=1e-12, atol=1e-12)
