"""Every experiment at a size that takes moments."""

from __future__ import annotations

from typing import Any

from continuum_ops.experiments import Config, load

TRAINING = {
    "steps": 20,
    "batch_size": 4,
    "validate_every": 10,
    "checkpoint_every": 2,
    "log_every": 1,
    "test_batch_size": 3,
    "threads": 1,
}
TRAJECTORIES = {
    "data": {"train": 9, "validation": 3, "test": 4, "intervals": 10},
    "model": {"d_model": 8, "num_heads": 2, "num_layers": 1, "dim_feedforward": 8},
}
BURGERS = {
    "data": {"train": 9, "validation": 3, "test": 4, "points": 32, "resolutions": [64], "solver": 256},
    "model": {"d_model": 8, "num_layers": 1, "decoder_channels": 4, "head_channels": 4, "modes": 4},
}
FIELDS = {"train": 9, "validation": 3, "test": 4}
GT_DARCY = {
    "data": {**FIELDS, "resolution": 15, "resolutions": [29], "solver": 29},
    "model": {"d_model": 8, "num_heads": 2, "num_layers": 1, "decoder_channels": 4, "modes": 3},
}
PATCHES = {
    "data": {**FIELDS, "resolution": 8, "resolutions": [16]},
    "model": {
        "num_patches": 2,
        "patch_size": 4,
        "modes": 2,
        "d_model": 8,
        "num_heads": 2,
        "num_layers": 1,
        "dim_feedforward": 8,
        "final_spectral": 4,
    },
}
INVERSE = {
    "data": {**FIELDS, "resolution": 13, "resolutions": [], "solver": 25},
    "model": {"d_model": 8, "num_heads": 2, "num_layers": 1, "dim_feedforward": 8, "decoder_channels": 4},
}
SMALL_PIT = {"width": 8, "num_layers": 1, "encoder_quantile": 0.3, "decoder_quantile": 0.3}
CELLS = {
    "data": {**FIELDS, "cells": 16, "resolutions": [32]},
    "model": {**SMALL_PIT, "latent": [8], "initial_rate": 1.0, "initial_local_rate": 1.0},
}
KOLMOGOROV = {"data": {**PATCHES["data"], "solver": 16, "T": 0.5}, "model": PATCHES["model"]}
TINY: dict[str, dict[str, Any]] = {
    "tno-lorenz63": TRAJECTORIES,
    "tno-lorenz63-y": TRAJECTORIES,
    "tno-cde": TRAJECTORIES,
    "galerkin-burgers": BURGERS,
    "fourier-burgers": BURGERS,
    "galerkin-darcy": GT_DARCY,
    "fourier-darcy": GT_DARCY,
    "galerkin-darcy-inverse": INVERSE,
    "fourier-darcy-inverse": INVERSE,
    "pit-darcy": {
        "data": {**FIELDS, "resolution": 11, "resolutions": [21], "solver": 21},
        "model": {
            "width": 8,
            "num_layers": 1,
            "latent": [5, 5],
            "encoder_quantile": 0.1,
            "decoder_quantile": 0.2,
        },
    },
    "pit-inviscid-burgers": CELLS,
    "pit-shock-tube": CELLS,
    "pit-vorticity": {
        "data": {**FIELDS, "resolution": 8, "resolutions": [16], "solver": 16, "snapshots": 4, "history": 2},
        "model": {**SMALL_PIT, "in_channels": 2, "latent": [4, 4]},
    },
    "pit-joukowski": {
        "data": {**FIELDS, "points": 64, "resolutions": [80]},
        "model": {**SMALL_PIT, "latent": 16},  # farthest points of each mesh
    },
    "pit-elastic-cell": {"data": {**FIELDS, "points": 150, "resolutions": [160]}, "model": SMALL_PIT},
    "tno-darcy64": {
        "data": {**FIELDS, "resolution": 8, "resolutions": [16], "solver": 17},
        "model": TRAJECTORIES["model"],
    },
    "vitno-darcy416-lognormal": PATCHES,
    "fano-darcy416-lognormal": PATCHES,
    "vitno-darcy416": PATCHES,
    "fano-darcy416": PATCHES,
    "vitno-kolmogorov": KOLMOGOROV,
    "fano-kolmogorov": KOLMOGOROV,
}


def tiny(name: str, **sections: dict[str, Any]) -> Config:
    changes = {"training": TRAINING, **TINY[name]}
    for section, values in sections.items():
        changes[section] = {**changes.get(section, {}), **values}
    return load(name, small=True, sections=changes)
