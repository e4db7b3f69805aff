"""The papers' experiments: their settings, and small ones that two cores train in minutes.

Each is what a TOML file would hold. A new one is an entry of ``EXPERIMENTS``, the paper's settings first and
what --small changes after them. Comments say what the papers leave open; that is our choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import Config, ConfigError, config_from, hint, merge, read_file

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
    "data": {"validation": 100, "test": 200},
    "model": {"d_model": 48, "num_heads": 4, "num_layers": 4, "dim_feedforward": 48},
    "optimizer": {"learning_rate": 3e-3},
    "schedule": {"warm_up": 0.2},
    "training": {"steps": 1200, "validate_every": 100, "checkpoint_every": 100, "log_every": 20},
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
    "data": {"validation": 50, "points": 128, "resolutions": [512, 2048], "solver": 2048},
    "model": {"d_model": 48, "decoder_channels": 32, "head_channels": 32},
    "optimizer": {"learning_rate": 2e-3},
    "training": {"steps": 1536, "validate_every": 128, "checkpoint_every": 128},
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
    "data": {"validation": 40, "test": 40, "resolution": 43, "resolutions": [85], "solver": 85},
    "model": {"d_model": 64, "num_layers": 4, "decoder_channels": 24},
    "training": {"steps": 1536, "validate_every": 128, "checkpoint_every": 128},
}

# CA 6.2.2: 3600, 200 and 200 samples, batches of 1, learning rate 1e-3, relative H1. Ours: the normalisers,
# AdamW and 20 epochs, and the law of the coefficient, that of PiT A.3 and not CA's rougher one.
_PATCHES: Content = {
    "data": {
        "source": "darcy",
        "train": 3600,
        "validation": 200,
        "test": 200,
        "resolution": 416,
        "resolutions": [208, 832],
        "grid": "cell",
    },
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
_PATCHES_SMALL: Content = {
    "data": {"train": 1000, "validation": 20, "test": 40, "resolution": 56, "resolutions": [112, 224]},
    "model": {
        "num_patches": 7,
        "patch_size": 8,
        "modes": 4,
        "d_model": 32,
        "num_heads": 4,
        "num_layers": 4,
        "dim_feedforward": 64,
        "scale": 49.0,  # the mean over a patch, 7 x 7 of them
        "norm_first": True,
        "final_spectral": 16,
    },
    "optimizer": {"learning_rate": 6e-3},
    "training": {
        "steps": 900,
        "batch_size": 4,
        "validate_every": 150,
        "checkpoint_every": 50,
        "log_every": 10,
        "test_batch_size": 4,
    },
}

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
    # 1 % of noise, 211 x 211 -> 71 x 71; no H1 term, for the target jumps.
    "galerkin-darcy-inverse": (
        merge(
            _GT_DARCY,
            {
                "data": {"resolutions": [], "inverse": True, "coarsening": 3, "input_noise": 0.01},
                "model": {"preset": "galerkin-darcy-inverse"},
                "normalizers": {"input": "pointwise", "target": "standard"},
                "loss": {"name": "relative_l2", "gamma": 0.0, "flux": False},
            },
        ),
        {
            "data": {"validation": 40, "resolution": 85, "resolutions": [], "solver": 85},
            "model": {"d_model": 96, "num_layers": 4, "dim_feedforward": 192, "decoder_channels": 96},
            "training": {"steps": 5120},
        },
    ),
    # PiT E.1, tables 6 and 16: Adam, cosine from 1e-3, 500 epochs, batches of 8, 211 x 211, sums over points.
    # Ours: normalisers, no clipping, the samples of validation and test.
    "pit-darcy": (
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
            "model": {"preset": "pit-darcy", "weights": "equal"},
            "normalizers": {"input": "range", "target": "pointwise"},
            "optimizer": {"name": "adam", "learning_rate": 1e-3, "clip": 0.0},
            "schedule": {"name": "cosine"},
            "training": {
                "steps": 64_000,
                "batch_size": 8,
                "validate_every": 640,
                "checkpoint_every": 640,
                "log_every": 32,
                "test_batch_size": 4,
            },
        },
        {
            "data": {
                "train": 1000,
                "validation": 40,
                "test": 20,
                "resolution": 43,
                "resolutions": [85, 141, 211, 421],
                "solver": 85,
            },
            "model": {
                "weights": "mesh",
                "width": 48,
                "latent": [20, 20],
                "rate_function": "tan_sin",
                "initial_rate": [10.0, 300.0],
                "initial_local_rate": [400.0, 2500.0],
            },
            "optimizer": {"name": "adamw", "learning_rate": 4e-3, "weight_decay": 1e-4, "clip": 1.0},
            "schedule": {"name": "one-cycle"},
            "training": {"steps": 700, "validate_every": 100, "checkpoint_every": 50, "log_every": 10},
        },
    ),
    "vitno-darcy416": (merge(_PATCHES, {"model": {"preset": "vitno-darcy416"}}), _PATCHES_SMALL),
    "fano-darcy416": (merge(_PATCHES, {"model": {"preset": "fano-darcy416"}}), _PATCHES_SMALL),
}


def experiment_names() -> list[str]:
    """The names that :func:`load` knows, sorted."""
    return sorted(EXPERIMENTS)


def load(
    experiment: str | Path | Mapping[str, Any],
    *,
    small: bool = False,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """The configuration of an experiment.

    Args:
        experiment: one of :func:`experiment_names`; a TOML file (or a run's config.json); or what such a file
            holds. A file may start from an experiment and change parts of it::

                experiment = "pit-darcy"
                small = true
                [training]
                steps = 2000

        small: the settings for two cores; only with the name of an experiment, or a file that has one.
        sections: values that take the place of others, ``{"training": {"steps": 2000}}``.

    Raises:
        ConfigError: an unknown name, key or value, with the closest known one; a file that is missing.
    """
    name, content = _content(experiment)
    if small and name is None:
        raise ConfigError("small needs an experiment: the configuration names none")
    small = small or bool(content.pop("small", False))
    base: Content = {}
    if name is not None:
        paper, less = _known(name)
        base = {"name": f"{name}-small" if small else name, **(merge(paper, less) if small else paper)}
    return config_from(merge(merge(base, content), sections or {}))


def _content(experiment: str | Path | Mapping[str, Any]) -> tuple[str | None, Content]:
    if isinstance(experiment, Mapping):
        content = dict(experiment)
    elif str(experiment) in EXPERIMENTS:
        return str(experiment), {}
    else:
        path = Path(experiment)
        if not path.exists() and path.suffix not in (".toml", ".json"):
            _known(str(experiment))
        content = read_file(path)
    name = content.pop("experiment", None)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"experiment must be a name, was {name!r}")
    if not isinstance(content.get("small", False), bool):
        raise ConfigError(f"small must be true or false, was {content['small']!r}")
    return name, content


def _known(name: str) -> tuple[Content, Content]:
    if name not in EXPERIMENTS:
        raise ConfigError(
            f"experiment must be a TOML file or one of {', '.join(experiment_names())}, was {name!r}"
            f"{hint(name, EXPERIMENTS)}"
        )
    return EXPERIMENTS[name]
