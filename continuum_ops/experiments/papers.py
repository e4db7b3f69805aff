"""The papers' experiments: their settings, and small ones that two cores train in minutes.

Each is what a TOML file would hold. A new one is an entry of ``EXPERIMENTS``, the paper's settings first and
what --small changes after them. Comments say what the papers leave open; that is our choice.
"""

from __future__ import annotations

from typing import Any

from .config import merge

Content = dict[str, Any]

# CA 6.1: 8000 trajectories, dt = 0.01, relative L2 (39), 1000 for the test. Ours: the optimiser, its batch,
# learning rate and 200 epochs.
_TNO: Content = {
    "data": {"train": 8000, "validation": 500, "test": 1000, "intervals": 200},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 1e-4},
    "training": {
        "steps": 100_000,
        "batch_size": 16,
        "validate_every": 500,
        "checkpoint_every": 500,
        "log_every": 50,
        "test_batch_size": 100,
    },
}
_TNO_SMALL: Content = {
    "data": {"train": 1024, "validation": 32, "test": 100, "intervals": 50},
    "model": {"d_model": 32, "num_heads": 4, "num_layers": 3, "dim_feedforward": 32},
    "optimizer": {"learning_rate": 4e-3},
    "schedule": {"warm_up": 0.2},
    "training": {"steps": 600, "validate_every": 100, "checkpoint_every": 100, "log_every": 20},
}

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

# CA 6.2.2: 3600, 200 and 200 samples, its law of the coefficient, learning rate 1e-3, relative H1. Ours: the
# grids of cells, which patches divide, the normalisers, AdamW and 20 epochs.
_CA_DARCY: Content = {
    "source": "darcy",
    "train": 3600,
    "validation": 200,
    "test": 200,
    "grid": "cell",
    "sigma": 12.0,
    "tau": 6.0,
}
# Batches of 1 at 416 x 416.
_PATCHES: Content = {
    "data": {**_CA_DARCY, "resolution": 416, "resolutions": [208, 832]},
    "normalizers": {"input": "range", "target": "pointwise"},
    "loss": {"name": "relative_h1"},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 1e-4},
    "training": {
        "steps": 72_000,
        "batch_size": 1,
        "validate_every": 1800,
        "checkpoint_every": 200,
        "log_every": 50,
        "test_batch_size": 1,
    },
}
_SMALL_PATCHES: Content = {
    "num_patches": 4,
    "patch_size": 8,
    "modes": 4,
    "final_spectral": 12,
    "d_model": 24,
    "num_heads": 4,
    "num_layers": 3,
    "dim_feedforward": 24,
    "norm_first": True,
}
# Smoother coefficients, whose solutions differ more: a few hundred steps learn little of CA's.
_SMOOTH: Content = {"tau": 3.0, "constant_mode": True}
_SMOOTH_LOGNORMAL: Content = {"tau": 3.0}
_PATCHES_SMALL: Content = {
    "data": {"train": 512, "validation": 20, "test": 40, "resolution": 32, "resolutions": [64]},
    "model": {
        **_SMALL_PATCHES,
        "scale": 16.0,  # the mean over a patch, 4 x 4 of them
    },
    "optimizer": {"learning_rate": 6e-3},
    "training": {
        "steps": 300,
        "batch_size": 4,
        "validate_every": 100,
        "checkpoint_every": 50,
        "log_every": 10,
        "test_batch_size": 4,
    },
}
_LOGNORMAL: Content = {"data": {"coefficient": "lognormal"}}
# Batches of 2 at 64 x 64, CA table 1.
_TNO_DARCY: Content = {
    "data": {**_CA_DARCY, "coefficient": "lognormal", "resolution": 64, "resolutions": [32, 128]},
    "model": {"preset": "tno-darcy64"},
    "normalizers": {"input": "standard", "target": "pointwise"},
    "loss": {"name": "relative_h1"},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 1e-4},
    "training": {
        "steps": 36_000,
        "batch_size": 2,
        "validate_every": 1800,
        "checkpoint_every": 900,
        "log_every": 50,
        "test_batch_size": 4,
    },
}
_TNO_DARCY_SMALL: Content = {
    "data": {
        "train": 512,
        "validation": 20,
        "test": 40,
        "resolution": 16,
        "resolutions": [32],
        "solver": 65,
        **_SMOOTH_LOGNORMAL,
    },
    "model": {"d_model": 32, "num_heads": 4, "num_layers": 4, "dim_feedforward": 32},
    "optimizer": {"learning_rate": 4e-3},
    "schedule": {"warm_up": 0.2},
    "training": {
        "steps": 400,
        "batch_size": 8,
        "validate_every": 100,
        "checkpoint_every": 100,
        "log_every": 20,
        "test_batch_size": 20,
    },
}
# CA 6.2.3: 9000, 500 and 500 samples, batches of 2, learning rate 1e-3, relative H1. Ours: the normalisers,
# AdamW and 20 epochs.
_KOLMOGOROV: Content = {
    "data": {
        "source": "kolmogorov",
        "train": 9000,
        "validation": 500,
        "test": 500,
        "resolution": 416,
        "resolutions": [208, 832],
    },
    "normalizers": {"input": "pointwise", "target": "pointwise"},
    "loss": {"name": "relative_h1"},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 1e-4},
    "training": {
        "steps": 90_000,
        "batch_size": 2,
        "validate_every": 4500,
        "checkpoint_every": 500,
        "log_every": 50,
        "test_batch_size": 1,
    },
}
_KOLMOGOROV_SMALL: Content = {
    "data": {"train": 128, "validation": 8, "test": 16, "resolution": 32, "resolutions": [16]},
    "model": {
        **_SMALL_PATCHES,
        "scale": 0.4,  # the mean over a patch of [0, 2 pi]^2: 16 / (2 pi)^2
    },
    "optimizer": {"learning_rate": 4e-3},
    "training": {
        "steps": 1000,
        "batch_size": 4,
        "validate_every": 100,
        "checkpoint_every": 50,
        "log_every": 10,
        "test_batch_size": 10,
    },
}

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
    # CA (40). The channels y and z differ in mean and size.
    "tno-lorenz63": (
        merge(
            _TNO,
            {
                "data": {"source": "lorenz63", "task": "x,y0,z0->y,z"},
                "model": {"preset": "tno-lorenz63"},
                "normalizers": {"input": "standard", "target": "standard"},
            },
        ),
        _TNO_SMALL,
    ),
    # The task of CA figures 8 and 9, x(t) -> y(t); both have mean 0 by symmetry.
    "tno-lorenz63-y": (
        merge(
            _TNO,
            {
                "data": {"source": "lorenz63", "task": "x->y"},
                "model": {"preset": "tno-lorenz63", "out_channels": 1, "initial_channels": 0},
                "normalizers": {"input": "rms", "target": "rms"},
            },
        ),
        _TNO_SMALL,
    ),
    "tno-cde": (
        merge(
            _TNO,
            {
                "data": {"source": "controlled_ode"},
                "model": {"preset": "tno-cde"},
                "normalizers": {"input": "standard", "target": "standard"},
            },
        ),
        _TNO_SMALL,
    ),
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
    "tno-darcy64": (_TNO_DARCY, _TNO_DARCY_SMALL),
    "vitno-darcy416-lognormal": (
        merge(merge(_PATCHES, _LOGNORMAL), {"model": {"preset": "vitno-darcy416"}}),
        merge(_PATCHES_SMALL, {"data": _SMOOTH_LOGNORMAL}),
    ),
    "fano-darcy416-lognormal": (
        merge(merge(_PATCHES, _LOGNORMAL), {"model": {"preset": "fano-darcy416"}}),
        merge(_PATCHES_SMALL, {"data": _SMOOTH_LOGNORMAL}),
    ),
    "vitno-darcy416": (
        merge(_PATCHES, {"model": {"preset": "vitno-darcy416"}}),
        merge(_PATCHES_SMALL, {"data": _SMOOTH}),
    ),
    "fano-darcy416": (
        merge(_PATCHES, {"model": {"preset": "fano-darcy416"}}),
        merge(_PATCHES_SMALL, {"data": _SMOOTH}),
    ),
    "vitno-kolmogorov": (merge(_KOLMOGOROV, {"model": {"preset": "vitno-kolmogorov"}}), _KOLMOGOROV_SMALL),
    "fano-kolmogorov": (merge(_KOLMOGOROV, {"model": {"preset": "fano-kolmogorov"}}), _KOLMOGOROV_SMALL),
}
