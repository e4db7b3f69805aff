"""What the papers compare with: TNO's encoder with Fourier attention, and neuraloperator's FNO."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiment_cases import FIELDS, TRAINING

import continuum_ops as co
from continuum_ops.experiments import (
    BASELINES,
    EXPERIMENTS,
    evaluate,
    experiment_names,
    load,
    open_run,
    train,
)
from continuum_ops.models import FNO, GalerkinTransformer, preset

NEEDED = 'the FNO is that of the neuraloperator package: pip install "continuum_ops[fno]"'
DATA: dict[str, dict[str, Any]] = {
    "fourier-tno-darcy64": {"resolution": 8, "resolutions": [16], "solver": 17},
    "fno-darcy64": {"resolution": 8, "resolutions": [16], "solver": 17},
    "fno-darcy416-lognormal": {"resolution": 8, "resolutions": [16]},
    "fno-darcy416": {"resolution": 8, "resolutions": [16]},
    "fno-kolmogorov": {"resolution": 8, "resolutions": [16], "solver": 16, "T": 0.5},
    "fno-burgers": {"points": 32, "resolutions": [64], "solver": 256},
    "fno-darcy": {"resolution": 15, "resolutions": [29], "solver": 29},
    "fno-darcy-inverse": {"resolution": 13, "resolutions": [], "solver": 25},
    "fno-pit-inviscid-burgers": {"cells": 16, "resolutions": [32]},
    "fno-pit-shock-tube": {"cells": 16, "resolutions": [32]},
    "fno-pit-darcy": {"resolution": 11, "resolutions": [21], "solver": 21},
    "fno-pit-vorticity": {"resolution": 8, "resolutions": [], "solver": 16, "snapshots": 4, "history": 2},
}


def tiny(name: str) -> Any:
    model = {"modes": 4, "width": 8, "lift_channels": 8}
    if name.startswith("fourier"):
        model = {"d_model": 8, "num_heads": 2, "num_layers": 1, "dim_feedforward": 8}
    if name == "fno-pit-vorticity":
        model["in_channels"] = 2
    sections = {"data": {**FIELDS, **DATA[name]}, "model": model, "training": TRAINING}
    return load(name, small=True, sections=sections)


def test_the_baselines_are_trained_on_the_papers_data() -> None:
    """The data, loss and normalisers of the papers' own experiments, at both sizes."""
    assert set(DATA) == set(BASELINES) and not set(BASELINES) & set(EXPERIMENTS)
    assert experiment_names() == sorted([*BASELINES, *EXPERIMENTS])
    others = {
        "fourier-tno-darcy64": "tno-darcy64",
        "fno-darcy64": "tno-darcy64",
        "fno-darcy416": "fano-darcy416",
        "fno-darcy416-lognormal": "fano-darcy416-lognormal",
        "fno-kolmogorov": "fano-kolmogorov",
        "fno-burgers": "galerkin-burgers",
        "fno-darcy": "galerkin-darcy",
        "fno-pit-inviscid-burgers": "pit-inviscid-burgers",
        "fno-pit-shock-tube": "pit-shock-tube",
        "fno-pit-vorticity": "pit-vorticity",
    }
    for name, other in others.items():
        for small in (False, True):
            config, there = load(name, small=small), load(other, small=small)
            assert (config.data, config.loss) == (there.data, there.loss), name
            assert config.normalizers == there.normalizers, name
            # As many samples seen.
            seen, expected = (c.training.steps * c.training.batch_size for c in (config, there))
            assert seen == expected, name


def test_the_fourier_transformers_encoder_by_hand() -> None:
    """GT (5) in float64, between the linear maps of CA (14), (19)."""
    torch.manual_seed(0)
    settings = {"d_model": 8, "num_heads": 2, "num_layers": 1, "dim_feedforward": 6, "coord_dim": 1}
    model = preset("fourier-tno-darcy64", **settings, dtype=torch.float64).eval()
    assert isinstance(model, GalerkinTransformer)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.tensor([0.0, 0.1, 0.4, 0.5, 0.9], dtype=torch.float64)
    grid, u = co.Grid(x), torch.randn(1, 5, 1, dtype=torch.float64)
    p = {name: value.detach().numpy() for name, value in model.named_parameters()}

    def linear(v: np.ndarray, name: str) -> np.ndarray:
        return v @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def norm(v: np.ndarray, name: str) -> np.ndarray:
        centred = v - v.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]

    place = x.numpy()[:, None]
    weights = np.array([0.05, 0.2, 0.2, 0.25, 0.2])
    v = linear(np.concatenate([u[0].numpy(), place], 1), "lift")
    q, k, value = (linear(v, f"layers.0.attention.{name}_proj").reshape(5, 2, 4) for name in ("q", "k", "v"))
    q, k = norm(q, "layers.0.attention.q_norm"), norm(k, "layers.0.attention.k_norm")
    heads = []
    for h in range(2):
        a, b, c = (np.concatenate([place, y[:, h]], 1) for y in (q, k, value))
        heads.append((a @ b.T) * (weights / weights.sum()) @ c)
    z = v + linear(np.concatenate(heads, 1), "layers.0.attention.out_proj")
    hidden = linear(z, "layers.0.linear1")
    z = z + linear(hidden / (1 + np.exp(-hidden)), "layers.0.linear2")
    expected = linear(z, "decoder")
    np.testing.assert_allclose(model(u, grid)[0].detach().numpy(), expected, rtol=1e-10, atol=1e-10)


def test_the_fourier_transformers_parameters() -> None:
    """CA table 1: 6.04e5. A layer has four maps of 128, coordinates of 4 heads, two norms and CA (18)."""
    layer = 4 * (128**2 + 128) + 4 * 2 * 128 + 2 * 2 * 128 + 2 * (128**2 + 128)
    model = preset("fourier-tno-darcy64", device="meta")
    total = (3 + 1) * 128 + 6 * layer + 128 + 1
    assert sum(p.numel() for p in model.parameters()) == total == 604_289
    assert f"{total:,}" in (preset.__doc__ or "")


def test_the_fourier_transformer_from_data_to_table(tmp_path: Path) -> None:
    config = tiny("fourier-tno-darcy64")
    train(config, tmp_path)
    rows = evaluate(tmp_path, plots=False).result["rows"]
    assert [row["mesh"] for row in rows] == ["8 x 8 (training)", "16 x 16"]
    assert all(0 < row["median"] <= row["worst"] < 5 for row in rows)


def test_without_neuraloperator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Said before anything is drawn or written; nothing else needs the package."""
    monkeypatch.setitem(sys.modules, "neuralop", None)
    monkeypatch.setitem(sys.modules, "neuralop.models", None)
    with pytest.raises(ImportError, match=re.escape(NEEDED)):
        preset("fno-2d")
    with pytest.raises(ImportError, match=re.escape(NEEDED)):
        train(tiny("fno-darcy64"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="width must be at least 1, was 0"):
        preset("fno-2d", width=0)


@pytest.fixture
def neuralop() -> Any:
    return pytest.importorskip("neuralop", reason="make test-models installs it")


@pytest.mark.models
def test_the_fno_is_neuraloperators(neuralop: Any) -> None:
    """Its arguments, and functions on a grid in their row-major order, of which the second axis is last."""
    from neuralop.models import FNO as Theirs

    torch.manual_seed(0)
    model = FNO(2, 3, 2, modes=4, width=6, num_layers=2, lift_channels=5)
    torch.manual_seed(0)
    theirs = Theirs(
        n_modes=(4, 4),
        in_channels=2,
        out_channels=3,
        hidden_channels=6,
        n_layers=2,
        lifting_channel_ratio=5.01 / 6,
        projection_channel_ratio=5.01 / 6,
    )
    assert (theirs.lifting_channels, theirs.projection_channels) == (5, 5)
    u = torch.randn(4, 2, 8, 10)
    grid = co.Grid.uniform((8, 10), kind="cell", dtype=torch.float32)
    flat = torch.stack([u[:, :, i, j] for i in range(8) for j in range(10)], 1)
    with torch.no_grad():
        found, expected = model(flat, grid), theirs(u)
    torch.testing.assert_close(found.unflatten(1, (8, 10)).movedim(-1, 1), expected, rtol=0, atol=0)
    assert "_metadata" not in model.state_dict()

    with pytest.raises(ValueError, match="mesh must be a Grid for the FNO, was PointCloud"):
        model(flat, co.PointCloud(torch.rand(80, 2), torch.ones(80)))
    with pytest.raises(ValueError, match="mesh must be evenly spaced for the FNO"):
        model(flat, co.Grid(torch.arange(8.0) ** 2, torch.arange(10.0)))
    with pytest.raises(ValueError, match="mesh must have 2 axes, was one of 1"):
        model(flat, co.Grid.uniform(80))
    with pytest.raises(ValueError, match=r"u must have shape \(B, 80, 2\), was \(4, 80, 1\)"):
        model(flat[..., :1], grid)


@pytest.mark.models
def test_the_fnos_parameters(neuralop: Any) -> None:
    """CA tables 1 and 4: 5.7e6, complex numbers counted once, 12 x 7 frequencies."""
    with torch.device("meta"):
        model = preset("fno-2d")
    total = sum(p.numel() for p in model.parameters())
    formula = (
        3 * 128 + 2 * 128**2 + 128 + 4 * (84 + 1) * 128**2
    )  # biases, skips and channel networks left out
    assert formula < total < 1.02 * formula and total == pytest.approx(5.70e6, rel=0.01)


@pytest.mark.models
@pytest.mark.parametrize("name", [name for name in BASELINES if name.startswith("fno")])
def test_the_fno_from_data_to_report(neuralop: Any, name: str, tmp_path: Path) -> None:
    config = tiny(name)
    run = train(config, tmp_path)
    again = open_run(tmp_path)
    for a, b in zip(run.operator.parameters(), again.operator.parameters(), strict=True):
        assert torch.equal(a, b)
    rows = evaluate(tmp_path, plots=name == "fno-burgers").result["rows"]
    assert len(rows) == len(config.data.cases())
    assert all(0 < row["median"] <= row["worst"] < 50 for row in rows)
    assert (tmp_path / "report.html").exists() == (name == "fno-burgers")
