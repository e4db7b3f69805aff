"""The experiments of CA: Calvello et al., "Continuum attention for neural operators"."""

from __future__ import annotations

from typing import Any

from ..config import merge

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
_LOGNORMAL: Content = {"data": {"coefficient": "lognormal"}, "normalizers": {"input": "log"}}
# Solutions of all sizes take longer to learn.
_LOGNORMAL_SMALL: Content = merge(
    _PATCHES_SMALL,
    {
        "data": _SMOOTH_LOGNORMAL,
        "training": {"steps": 4000, "validate_every": 500, "checkpoint_every": 250, "log_every": 50},
    },
)
# Batches of 2 at 64 x 64, CA table 1.
_TNO_DARCY: Content = {
    "data": {**_CA_DARCY, "coefficient": "lognormal", "resolution": 64, "resolutions": [32, 128]},
    "model": {"preset": "tno-darcy64"},
    "normalizers": {"input": "log", "target": "pointwise"},
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
        "steps": 2400,
        "batch_size": 8,
        "validate_every": 400,
        "checkpoint_every": 200,
        "log_every": 50,
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

TRAJECTORIES: dict[str, tuple[Content, Content]] = {
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
}

FIELDS: dict[str, tuple[Content, Content]] = {
    "tno-darcy64": (_TNO_DARCY, _TNO_DARCY_SMALL),
    "vitno-darcy416-lognormal": (
        merge(merge(_PATCHES, _LOGNORMAL), {"model": {"preset": "vitno-darcy416"}}),
        _LOGNORMAL_SMALL,
    ),
    "fano-darcy416-lognormal": (
        merge(merge(_PATCHES, _LOGNORMAL), {"model": {"preset": "fano-darcy416"}}),
        _LOGNORMAL_SMALL,
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
