"""The experiments of GT: Cao, "Choose a Transformer: Fourier or Galerkin"."""

from __future__ import annotations

from typing import Any

from ..config import merge

Content = dict[str, Any]

# GT C.1: Adam without decay, 1cycle from and to 1e-4 of the maximum with 30 % of warm-up, clipped at 1, 1024
# and 100 samples, 100 epochs.
_GT: Content = {
    "data": {"train": 1024, "validation": 100, "test": 100},
    "optimizer": {"name": "adam", "learning_rate": 1e-3},
    "schedule": {"name": "one-cycle", "warm_up": 0.3, "div_factor": 1e4, "final_div_factor": 1.0},
    "training": {"seed": 1127802, "validate_every": 256, "checkpoint_every": 256, "log_every": 32},
}
# Section 3: gamma = 0.1 h, neither input nor target normalised; n = 512, batches of 8.
_BURGERS: Content = merge(
    _GT,
    {
        "data": {"source": "burgers", "points": 512, "resolutions": [2048, 8192]},
        "loss": {"name": "relative_l2_h1", "gamma": 0.1},
        "training": {"steps": 12_800, "batch_size": 8},
    },
)
_BURGERS_SMALL: Content = {
    "data": {"validation": 32, "points": 64, "resolutions": [128, 512], "solver": 2048},
    "model": {"d_model": 32, "num_layers": 3, "decoder_channels": 24, "head_channels": 24},
    "optimizer": {"learning_rate": 3e-3},
    "training": {"steps": 768, "validate_every": 128, "checkpoint_every": 128},
}
# Gamma = 0.5 h with the flux, input and target normalised; n = 211, batches of 4.
_GT_DARCY: Content = merge(
    _GT,
    {
        "data": {"source": "darcy", "resolution": 211, "resolutions": [421], "solver": 421},
        "normalizers": {"input": "pointwise", "target": "pointwise"},
        "loss": {"name": "relative_l2_h1", "gamma": 0.5, "flux": True},
        "training": {"steps": 25_600, "batch_size": 4},
    },
)
_GT_DARCY_SMALL: Content = {
    "data": {
        "train": 512,
        "validation": 20,
        "test": 40,
        "resolution": 29,
        "resolutions": [57],
        "solver": 57,
        "constant_mode": True,  # the samples differ more, so that little training shows
    },
    "model": {"d_model": 48, "num_layers": 2, "decoder_channels": 16},
    "optimizer": {"learning_rate": 2e-3},
    "training": {"steps": 400, "validate_every": 128, "checkpoint_every": 128},
}

# 1 % of noise, 211 x 211 -> 71 x 71; no H1 term, for the target jumps.
_GT_INVERSE: Content = merge(
    _GT_DARCY,
    {
        "data": {"resolutions": [], "inverse": True, "coarsening": 3, "input_noise": 0.01},
        "normalizers": {"input": "pointwise", "target": "standard"},
        "loss": {"name": "relative_l2", "gamma": 0.0, "flux": False},
    },
)
_GT_INVERSE_SMALL: Content = {
    "data": {"validation": 40, "resolution": 43, "resolutions": [], "solver": 85},
    "model": {"d_model": 64, "num_layers": 3, "dim_feedforward": 128, "decoder_channels": 64},
    "training": {"steps": 2560},
}

EXPERIMENTS: dict[str, tuple[Content, Content]] = {
    "galerkin-burgers": (merge(_BURGERS, {"model": {"preset": "galerkin-burgers"}}), _BURGERS_SMALL),
    "fourier-burgers": (merge(_BURGERS, {"model": {"preset": "fourier-burgers"}}), _BURGERS_SMALL),
    "galerkin-darcy": (merge(_GT_DARCY, {"model": {"preset": "galerkin-darcy"}}), _GT_DARCY_SMALL),
    "fourier-darcy": (
        merge(_GT_DARCY, {"model": {"preset": "fourier-darcy"}, "optimizer": {"learning_rate": 5e-4}}),
        _GT_DARCY_SMALL,
    ),
    "galerkin-darcy-inverse": (
        merge(_GT_INVERSE, {"model": {"preset": "galerkin-darcy-inverse"}}),
        _GT_INVERSE_SMALL,
    ),
    "fourier-darcy-inverse": (
        merge(_GT_INVERSE, {"model": {"preset": "galerkin-darcy-inverse", "attention_type": "fourier"}}),
        _GT_INVERSE_SMALL,
    ),
}
