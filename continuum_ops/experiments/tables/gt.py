"""Tables and figures of GT: Cao, "Choose a Transformer: Fourier or Galerkin", sections 4, 5 and C."""

from __future__ import annotations

from typing import Any

from .spec import Content, Part, Plot, Table

_TYPES = {"FT": "fourier", "GT": "galerkin", "ST": "softmax", "LT": "linear"}
_NORMS = {"FT": "Ln on Q, K", "GT": "Ln on K, V", "ST": "Ln on Q, K", "LT": "Ln on K, V"}
_OLD_FNO = (
    "the first FNO, trained with steps of the learning rate, is not run; the row below has the same data"
)


def _models(galerkin: str, fourier: str, dropout: float | None = None) -> dict[str, Part]:
    """Rows of tables 2 and 3. dropout: of the attention of GT with the regular layer norm (C.2)."""
    rows: dict[str, Part] = {}
    for regular in (True, False):
        for name, kind in _TYPES.items():
            model: dict[str, Any] = {"layer_norm": "regular"} if regular else {}
            if kind in ("softmax", "linear"):
                model["attention_type"] = kind
            if regular and name == "GT" and dropout is not None:
                model["attention_dropout"] = dropout
            label = f"{name} {'regular Ln' if regular else _NORMS[name]}"
            rows[label] = Part(fourier if kind == "fourier" else galerkin, changes={"model": model})
    return rows


def _points(paper: int, small: int) -> Part:
    """Trained on so many points, batches of 4 at the most of them; the experiment itself has the fewest."""
    if paper == 512:
        return Part(measure="mean")
    changes: Content = {"data": {"points": paper, "resolutions": []}}
    if paper == 8192:
        changes |= {"training": {"batch_size": 4, "steps": 25_600}}
    return Part(measure="mean", changes=changes, small={"data": {"points": small, "resolutions": []}})


_LENGTHS = {"n = 512": _points(512, 64), "n = 2048": _points(2048, 128), "n = 8192": _points(8192, 512)}


def _noise(grids: str, strength: float) -> Part:
    """Of table 3; the experiment itself is on 211 and 71 points an axis."""
    data: Content = {"input_noise": strength}
    if grids == "211, 71":
        return Part(measure="mean", changes={"data": data})
    return Part(
        measure="mean",
        changes={"data": {**data, "resolution": 141, "coarsening": 4}, "model": {"coarsening": 4.0}},
        small={"data": {**data, "resolution": 29, "coarsening": 4}, "model": {"coarsening": 4.0}},
    )


# Points an axis, fine and coarse, at the paper's size and with --small.
_GRIDS = {"141, 36": ((141, 36), (29, 8)), "211, 71": ((211, 71), (43, 15))}
_STRENGTHS = (0.0, 0.01, 0.1)
_INVERSE = {f"{grids}, noise {x:g}": (grids, x) for grids in _GRIDS for x in _STRENGTHS}


def _fno_inverse(grids: str, strength: float, coarse: bool) -> Part:
    """From one grid to the same."""
    paper, small = (sizes[coarse] for sizes in _GRIDS[grids])
    data: Content = {"input_noise": strength}
    return Part(
        "fno-darcy-inverse",
        measure="mean",
        changes={"data": {**data, "resolution": paper}},
        small={"data": {**data, "resolution": small}},
    )


_SIZE: Content = {"data": {"points": 8192, "resolutions": []}, "training": {"steps": 1000, "batch_size": 4}}
_SMALL_SIZE: Content = {
    "data": {"points": 512, "resolutions": []},
    "training": {"steps": 64, "batch_size": 4},
}
_ENCODER: Content = {"d_model": 128, "num_layers": 10, "decoder": "linear"}
_MEMORY = "memory is that of a process on a GPU; bench/memory.py measures the operators'"
_GFLOP = "counted by the profiler that the paper used, backward pass included; not here"


def _speeds(name: str, changes: Content) -> dict[str, Part]:
    speed = Part(
        measure="speed", changes={**_SIZE, "model": changes}, small={**_SMALL_SIZE, "model": changes}
    )
    others = {"mem": _MEMORY, "CUDA mem": _MEMORY, "GFLOP": _GFLOP}
    found = {f"{name}, {what}": Part(why=why) for what, why in others.items()}
    return {**dict(list(found.items())[:2]), f"{name}, speed": speed, **dict(list(found.items())[2:])}


def _ablation(norm: str, eta: float, delta: float, dropout: float) -> Part:
    model: Content = {"layer_norm": norm, "eta": eta, "delta": delta, "attention_dropout": dropout}
    return Part("galerkin-burgers", changes={"model": model})


_ABLATIONS = {
    f"{name}{words}": _ablation(norm, *settings)
    for name, norm, choices in (
        (
            "regular",
            "regular",
            {
                "": (1.0, 0.0, 0.0),
                ", zeta = 0.1": (1.0, 0.0, 0.1),
                ", eta = 0.01": (0.01, 0.0, 0.0),
                ", eta = 0.01, zeta = 0.1": (0.01, 0.0, 0.1),
                ", eta = delta = 0.01": (0.01, 0.01, 0.0),
                ", eta = delta = 0.01, zeta = 0.1": (0.01, 0.01, 0.1),
            },
        ),
        (
            "Galerkin",
            "galerkin",
            {
                "": (1.0, 0.0, 0.0),
                ", eta = 0.01": (0.01, 0.0, 0.0),
                ", eta = delta = 0.01": (0.01, 0.01, 0.0),
            },
        ),
    )
    for words, settings in choices.items()
}
_BEST = {f"{name}, best epoch": Part(measure="best").over(part) for name, part in _LENGTHS.items()}
_ERRORS_8 = (
    (0.2004, 0.2064, 1.406e-3, 1.685e-2, 1.514e-2, 2.181e-3, 1.006e-2, 1.927e-3, 1.203e-3),
    (0.2084, 0.2059, 2.138e-2, 1.119e-2, 1.512e-3, 1.396e-2, 1.012e-2, 2.453e-3, 1.150e-3),
    (0.2175, 0.2070, 1.775e-2, 2.571e-3, 1.598e-2, 2.331e-3, 9.129e-3, 1.689e-3, 1.025e-3),
)
_EPOCHS_8 = (
    (86, 46, 99, 20, 35, 100, 96, 95, 99),
    (39, 59, 14, 21, 97, 19, 99, 100, 100),
    (28, 75, 16, 98, 34, 92, 100, 99, 100),
)

TABLES: dict[str, Table] = {
    "gt-table-1": Table(
        "GT table 1: memory, speed in steps a second, and operations of a training, Burgers at n = 8192",
        rows={
            name: Part("galerkin-burgers", changes={"model": {"attention_type": _TYPES[name]}})
            for name in ("ST", "FT", "LT", "GT")
        },
        columns={**_speeds("model", {}), **_speeds("encoder", _ENCODER)},
        paper=[
            [18.39, 31.06, 5.02, 1393, 18.53, 31.34, 4.12, 1876],
            [10.05, 22.92, 6.10, 1138, 10.80, 22.32, 5.46, 1610],
            [2.55, 2.31, 12.70, 606, 2.73, 2.66, 10.98, 773],
            [2.36, 1.93, 27.15, 275, 2.53, 2.33, 19.20, 412],
        ],
        note="Speed: over a training of 1000 steps (64 at n = 512 with --small), its validations included; "
        "the paper's on its GPU. GB and GFLOP in the other columns.",
    ),
    "gt-table-2a": Table(
        "GT table 2a: relative L2 error, Burgers, trained at each n",
        rows={
            "FNO1d": Part(why=_OLD_FNO),
            "FNO1d 1cycle": Part("fno-burgers"),
            **_models("galerkin-burgers", "fourier-burgers", dropout=0.1),
        },
        columns=_LENGTHS,
        paper=[
            [1.58e-2, 1.46e-2, 1.39e-2],
            [4.373e-3, 4.126e-3, 4.151e-3],
            [1.400e-3, 1.477e-3, 1.172e-3],
            [2.181e-3, 1.512e-3, 2.747e-3],
            [1.927e-3, 2.307e-3, 1.981e-3],
            [1.813e-3, 1.770e-3, 1.617e-3],
            [1.135e-3, 1.123e-3, 1.071e-3],
            [1.203e-3, 1.150e-3, 1.025e-3],
            [1.271e-3, 1.266e-3, 1.330e-3],
            [1.139e-3, 1.149e-3, 1.221e-3],
        ],
        note="With --small n is 64, 128 and 512. The FNO is that of neuraloperator.",
    ),
    "gt-table-2b": Table(
        "GT table 2b: relative L2 error, Darcy flow, on fine and coarse grids of so many points an axis",
        rows={
            "FNO2d": Part(why=_OLD_FNO),
            "FNO2d 1cycle": Part("fno-darcy"),
            **_models("galerkin-darcy", "fourier-darcy"),
        },
        columns={
            "141, 43": Part(
                measure="mean",
                changes={"data": {"resolution": 141}, "model": {"coarsening": 10 / 3}},
                # More would overlap on so few points.
                small={"data": {"resolution": 15}, "model": {"modes": 7}},
            ),
            "211, 61": Part(measure="mean"),
        },
        paper=[
            [1.09e-2, 1.09e-2],
            [1.419e-2, 1.424e-2],
            [8.38e-3, 8.47e-3],
            [8.94e-3, 8.56e-3],
            [1.075e-2, 1.131e-2],
            [1.024e-2, 1.130e-2],
            [8.73e-3, 9.21e-3],
            [8.39e-3, 8.44e-3],
            [9.46e-3, 9.59e-3],
            [8.75e-3, 9.70e-3],
        ],
        cells={
            ("FNO2d 1cycle", "141, 43"): Part(
                "fno-darcy",
                measure="mean",
                changes={"data": {"resolution": 141}},
                small={"data": {"resolution": 15}},
            ),
        },
        note="With --small the grids have 15 and 29 points an axis. The FNO is that of neuraloperator.",
    ),
    "gt-table-3": Table(
        "GT table 3: relative L2 error of the inverse Darcy problem, grids of input and target, noise",
        rows={
            "FNO2d (only fine)": Part(),
            "FNO2d (only coarse)": Part(),
            **_models("galerkin-darcy-inverse", "fourier-darcy-inverse"),
        },
        columns={name: _noise(*settings) for name, settings in _INVERSE.items()},
        paper=[
            [0.1371, 0.1378, 0.1512, 0.1393, 0.1396, 0.1504],
            [0.1417, 0.1431, 0.1730, 0.1360, 0.1369, 0.1604],
            [1.799e-2, 2.467e-2, 6.814e-2, 1.563e-2, 2.704e-2, 8.110e-2],
            [2.026e-2, 2.536e-2, 6.659e-2, 1.732e-2, 2.775e-2, 8.024e-2],
            [2.434e-2, 3.106e-2, 7.431e-2, 2.069e-2, 3.365e-2, 8.918e-2],
            [2.254e-2, 3.194e-2, 9.056e-2, 2.063e-2, 3.544e-2, 9.874e-2],
            [1.921e-2, 2.717e-2, 6.725e-2, 1.523e-2, 2.691e-2, 8.286e-2],
            [1.944e-2, 2.552e-2, 6.689e-2, 1.651e-2, 2.729e-2, 7.903e-2],
            [2.160e-2, 2.807e-2, 6.995e-2, 1.889e-2, 3.123e-2, 8.788e-2],
            [2.360e-2, 3.196e-2, 8.656e-2, 2.136e-2, 3.539e-2, 9.622e-2],
        ],
        cells={
            (f"FNO2d (only {'coarse' if coarse else 'fine'})", name): _fno_inverse(*settings, coarse)
            for name, settings in _INVERSE.items()
            for coarse in (False, True)
        },
        note="With --small the fine grids have 29 and 43 points an axis. The FNO is that of neuraloperator.",
    ),
    "gt-table-8": Table(
        "GT table 8: relative L2 error and best epoch of the Galerkin transformer on Burgers, by layer norm, "
        "initialisation (eta, delta) and dropout of the attention (zeta)",
        rows=_ABLATIONS,
        columns={
            name: part for pair in zip(_LENGTHS.items(), _BEST.items(), strict=True) for name, part in pair
        },
        paper=[[value for n in range(3) for value in (_ERRORS_8[n][i], _EPOCHS_8[n][i])] for i in range(9)],
        note="With --small n is 64, 128 and 512.",
    ),
    "gt-figure-12": Table(
        "GT figure 12: relative L2 error of the inverse Darcy problem, noise in training and test",
        rows={
            f"trained with {strength:g}": Part(
                "galerkin-darcy-inverse", measure="mean", changes={"data": {"input_noise": strength}}
            )
            for strength in _STRENGTHS
        },
        columns={
            f"tested with {strength:g}": Part(test={"input_noise": strength})
            for strength in (0.0, 0.01, 0.015, 0.02, 0.05)
        },
        paper=[
            [None, 0.194, 0.416, None, None],
            [0.0235, None, None, 0.0754, 0.403],
            [None, None, None, None, 0.0691],
        ],
        plot=Plot("samples"),
        note="Means over the test; the paper's values are those of one sample.",
    ),
}
