"""The experiments of PiT: Chen, Wu, "Positional knowledge is all you need"."""

from __future__ import annotations

from typing import Any

from ..config import merge

Content = dict[str, Any]

# PiT E.1, tables 6 to 9: Adam, cosine from 1e-3, 500 epochs, sums over points. Ours: normalisers, no
# clipping.
_PIT: Content = {
    "model": {"weights": "equal"},
    "optimizer": {"name": "adam", "learning_rate": 1e-3, "clip": 0.0},
    "schedule": {"name": "cosine"},
    "training": {"validate_every": 1000, "checkpoint_every": 1000, "log_every": 50, "test_batch_size": 8},
}
_PIT_SMALL: Content = {
    "model": {"weights": "mesh", "rate_function": "tan_sin"},
    "optimizer": {"name": "adamw", "learning_rate": 4e-3, "weight_decay": 1e-4, "clip": 1.0},
    "schedule": {"name": "one-cycle"},
    "training": {"validate_every": 100, "checkpoint_every": 100, "log_every": 20, "test_batch_size": 10},
}
# Trained on relative L1 errors.
_L1: Content = {"loss": {"name": "relative_l1", "metric": "relative_l1"}}


EXPERIMENTS: dict[str, tuple[Content, Content]] = {
    # Batches of 8, 211 x 211; tables 5 and 16. Ours: the samples of validation and test.
    "pit-darcy": (
        merge(
            _PIT,
            {
                "data": {
                    "source": "darcy",
                    "train": 1024,
                    "validation": 100,
                    "test": 200,
                    "resolution": 211,
                    "resolutions": [43, 85, 141, 421],
                    "solver": 421,
                    "meshes": ["uneven", "scattered"],
                },
                "model": {"preset": "pit-darcy"},
                "normalizers": {"input": "range", "target": "pointwise"},
                "training": {"steps": 64_000, "batch_size": 8, "test_batch_size": 4},
            },
        ),
        merge(
            _PIT_SMALL,
            {
                "data": {
                    "train": 512,
                    "validation": 20,
                    "test": 40,
                    "resolution": 43,
                    "resolutions": [85],
                    "solver": 85,
                    "constant_mode": True,
                },
                "model": {
                    "width": 32,
                    "latent": [16, 16],
                    "initial_rate": [10.0, 300.0],
                    "initial_local_rate": [400.0, 2500.0],
                },
                "training": {"steps": 400, "checkpoint_every": 50, "test_batch_size": 4},
            },
        ),
    ),
    "pit-inviscid-burgers": (
        merge(
            merge(_PIT, _L1),
            {
                "data": {"source": "inviscid_burgers", "train": 950, "validation": 74, "test": 128},
                "model": {"preset": "pit-inviscid-burgers"},
                "training": {"steps": 95_000, "batch_size": 5},
            },
        ),
        merge(
            _PIT_SMALL,
            {
                "data": {"cells": 64, "resolutions": [128, 256], "length_scale": 0.15},
                "model": {
                    "width": 48,
                    "latent": [64],
                    "encoder_quantile": 0.1,
                    "decoder_quantile": 0.1,
                    "initial_rate": [20.0, 400.0],
                    "initial_local_rate": [400.0, 2000.0],
                },
                "training": {"steps": 3000, "batch_size": 8},
            },
        ),
    ),
    # The three conserved variables differ in mean and size.
    "pit-shock-tube": (
        merge(
            merge(_PIT, _L1),
            {
                "data": {"source": "shock_tube", "train": 1024, "validation": 100, "test": 128},
                "model": {"preset": "pit-shock-tube"},
                "normalizers": {"input": "standard", "target": "standard"},
                "training": {"steps": 64_000, "batch_size": 8},
            },
        ),
        merge(
            _PIT_SMALL,
            {
                "data": {"cells": 128, "resolutions": [256, 512]},
                "model": {
                    "width": 48,
                    "latent": [128],
                    "initial_rate": [0.2, 10.0],
                    "initial_local_rate": [10.0, 100.0],
                },
                "training": {"steps": 1000},
            },
        ),
    ),
    # Batches of 8 flows, each of 20 steps in time. Ours: learned step by step, not rolled out.
    "pit-vorticity": (
        merge(
            _PIT,
            {
                "data": {"source": "vorticity", "train": 1000, "validation": 50, "test": 200},
                "model": {"preset": "pit-vorticity"},
                "normalizers": {"input": "rms", "target": "rms"},
                "training": {"steps": 62_500, "batch_size": 160},
            },
        ),
        merge(
            _PIT_SMALL,
            {
                "data": {
                    "train": 60,
                    "validation": 5,
                    "test": 20,
                    "resolution": 16,
                    "solver": 32,
                    "snapshots": 14,
                },
                "model": {
                    "width": 48,
                    "num_heads": 2,
                    "latent": [16, 16],
                    "decoder_quantile": 0.05,
                    "initial_rate": [10.0, 300.0],
                    "initial_local_rate": [400.0, 2500.0],
                },
                "training": {"steps": 2000, "batch_size": 8},
            },
        ),
    ),
    # Stand-in for PiT's NACA: its settings, on as many scattered points as its latent mesh of 111 x 26 has.
    # Points drawn from them evenly in space would miss the airfoil, where they are dense.
    "pit-joukowski": (
        merge(
            _PIT,
            {
                "data": {"source": "joukowski_airfoil", "train": 1000, "validation": 100, "points": 2886},
                "model": {"preset": "pit-naca", "latent": None},
                "normalizers": {"input": "range", "target": "standard"},
                "training": {"steps": 62_500, "batch_size": 8},
            },
        ),
        merge(
            _PIT_SMALL,
            {
                "data": {"train": 400, "validation": 20, "test": 40, "points": 192, "resolutions": [384]},
                # Areas would hide the airfoil from the integrals.
                "model": {
                    "weights": "equal",
                    "width": 48,
                    "num_layers": 3,
                    "encoder_quantile": 0.1,
                    "decoder_quantile": 0.1,
                    "initial_rate": [0.1, 10.0],
                    "initial_local_rate": [10.0, 100.0],
                },
                "training": {"steps": 3000},
            },
        ),
    ),
    # Stand-in for PiT's elasticity.
    "pit-elastic-cell": (
        merge(
            _PIT,
            {
                "data": {"source": "elastic_cell", "train": 1000, "validation": 100},
                "model": {"preset": "pit-elasticity"},
                "normalizers": {"input": "range", "target": "standard"},
                "training": {"steps": 50_000, "batch_size": 10},
            },
        ),
        merge(
            _PIT_SMALL,
            {
                "data": {"train": 160, "validation": 8, "test": 16, "points": 160, "resolutions": [240]},
                "model": {
                    "width": 48,
                    "num_heads": 4,
                    "num_layers": 3,
                    "encoder_quantile": 0.05,
                    "decoder_quantile": 0.05,
                },
                "training": {"steps": 2000, "batch_size": 8},
            },
        ),
    ),
}
