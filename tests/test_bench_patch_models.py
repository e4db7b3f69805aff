"""The plain models of bench/bench_patch_models.py compute what ours do."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import continuum_ops as co

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("plain_patch_models")


@pytest.mark.parametrize("name", ["vitno-darcy416", "fano-darcy416"])
@pytest.mark.parametrize("scale", [1.0, 9.0])
def test_parity(plain, name: str, scale: float) -> None:
    torch.manual_seed(0)
    options = {"d_model": 8, "num_heads": 2, "num_layers": 2, "dim_feedforward": 8, "dtype": torch.float64}
    options |= {"num_patches": (3, 2), "patch_size": (8, 6), "modes": (3, 2), "final_spectral": (5, 5)}
    model = co.models.preset(name, scale=scale, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    grid = co.Grid.uniform((24, 12), kind="cell")
    assert plain.parity(model, grid) < 1e-9
    # It would notice other queries: they change the output by far more than that.
    before = plain.forward(model, torch.ones(1, 288, 1, dtype=torch.float64), grid)
    with torch.no_grad():
        next(model.layers[0].attention.parameters()).mul_(1.5)
    after = plain.forward(model, torch.ones(1, 288, 1, dtype=torch.float64), grid)
    assert (after - before).abs().max() > 1e-6
