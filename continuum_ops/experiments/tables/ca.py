"""Tables and figures of CA: Calvello et al., "Continuum attention for neural operators", section 6."""

from __future__ import annotations

from math import log2

from .spec import Content, Measure, Part, Plot, Table

_AFNO = "the AFNO of physics-nemo is no neural operator and not a part of this package"
# Uniform grids of half and twice the points an axis, which the patches divide.
_COARSER: Content = {"resolutions": [16, 64]}
_FACTORS = {"half": Part(mesh="x0.5"), "training": Part(), "twice": Part(mesh="x2")}
_AXIS = Plot("curves", (0.5, 1.0, 2.0), "points an axis, relative to the training's")


def _high(experiment: str, changes: Content | None = None) -> Part:
    """On 416 x 416 points."""
    return Part(experiment, measure="median", small_test=_COARSER, changes=changes or {})


_PROBLEMS = {
    "Darcy, lognormal": Part(problem="darcy416-lognormal"),
    "Darcy, piecewise constant": Part(problem="darcy416"),
    "Kolmogorov": Part(problem="kolmogorov"),
}
_NAMES = {"ViT NO": "vitno", "FANO": "fano", "FNO": "fno"}
_LOW = {
    "Transformer NO": Part("tno-darcy64", measure="median", small_test={"resolutions": [8, 32]}),
    "FNO": Part("fno-darcy64", measure="median", small_test={"resolutions": [8, 32]}),
    "AFNO": Part(why=_AFNO),
    "Galerkin Transformer": Part(
        "fourier-tno-darcy64", measure="median", small_test={"resolutions": [8, 32]}
    ),
}


def _across(problem: str, *models: str) -> dict[str, Part]:
    return {model: _high(f"{_NAMES[model]}-{problem}") for model in models}


def _wide(model: str, width: int) -> Part:
    """CA figures 10 and 11: a feed-forward network as wide as the layer; --small has a quarter."""

    def changes(width: int) -> Content:
        if model == "FNO":
            return {"model": {"width": width}}
        return {"model": {"d_model": width, "dim_feedforward": width}}

    return Part(f"{_NAMES[model]}-{{}}", changes=changes(width), small=changes(width // 4))


def _cost(measure: Measure) -> Table:
    what = "parameters" if measure == "parameters" else "FLOP of an evaluation"
    return Table(
        f"CA figure {10 if measure == 'parameters' else 11}: median relative L2 error against {what}",
        rows={f"{m}, {w}": _wide(m, w) for m in _NAMES for w in (32, 64, 96, 128)}
        | {"AFNO": Part(why=_AFNO)},
        columns={
            what: Part(problem="darcy416", measure=measure),
            **{name: Part(problem=_PROBLEMS[name].problem, measure="median") for name in list(_PROBLEMS)[1:]},
        },
        plot=Plot("scatter", label=what),
        note="Widths are the paper's; with --small models have a quarter of them. The paper draws points.",
    )


# CA table 4 at d_u = d_z = 1, d = 2 and 128 channels.
_C = 128


def _encoder(maps: int) -> int:
    return 6 * (maps * _C**2 + 2 * _C)


def _fno_flops(n: int) -> float:
    """CA table 5 with 84 frequencies."""
    layer = 15 * _C * n * log2(n**0.5) + 84 * (2 * _C**2 - _C) + 2 * n * _C**2
    return 2 * n * (3 + 2 * _C) * _C + 2 * n * _C + 4 * layer


def _tno_flops(n: int) -> float:
    return 2 * n * 3 * _C + 2 * n * _C + 6 * (8 * _C**2 * n + 2 * n**2 * _C + 4 * _C**2 * n)


TABLES: dict[str, Table] = {
    "ca-table-1": Table(
        "CA table 1: parameters and median relative L2 error, lognormal Darcy flow at 64 x 64",
        rows=_LOW,
        columns={"parameters": Part(measure="parameters"), "error": Part(measure="median")},
        paper=[[5.98e5, 1.19e-2], [5.70e6, 1.96e-2], [None, 2.57e-2], [6.04e5, 7.30e-2]],
        note="Complex parameters of the FNO count once.",
    ),
    "ca-table-3": Table(
        "CA table 3: median relative L2 error at 416 x 416",
        rows={name: _high(f"{model}-{{}}") for name, model in _NAMES.items()} | {"AFNO": Part(why=_AFNO)},
        columns=_PROBLEMS,
        paper=[
            [7.68e-3, 9.72e-3, 1.07e-2],
            [8.39e-3, 1.38e-2, 6.34e-3],
            [2.38e-2, 3.78e-2, 1.52e-2],
            [2.66e-2, 3.09e-2, 3.99e-3],
        ],
    ),
    "ca-table-4": Table(
        "CA table 4: parameters, counted beside the paper's formulas",
        rows={
            "FNO": Part("fno-darcy416"),
            "AFNO": Part(why=_AFNO),
            "Transformer NO": Part("tno-darcy64"),
            "ViT NO": Part("vitno-darcy416"),
            "FANO": Part("fano-darcy416"),
        },
        columns={"parameters": Part(measure="parameters")},
        paper=[
            [3 * _C + 2 * _C * _C + _C + 4 * (84 * _C**2 + _C**2)],
            [None],
            [3 * _C + _C + _encoder(6)],
            [3 * _C * 288 + _C + _encoder(6)],
            [3 * _C + _C + _encoder(3 * 162 + 3)],
        ],
        note="The formulas leave out biases, skips and the final spectral layer and count a frequency once; "
        "of ours the FNO counts complex numbers once, ViT NO and FANO twice. Frequencies: 12 x 7 of the FNO, "
        "24 x 12 of ViT NO, 18 x 9 of FANO.",
    ),
    "ca-table-5": Table(
        "CA table 5: floating point operations of an evaluation, counted beside the paper's formulas",
        rows={
            "FNO": Part("fno-{}"),
            "AFNO": Part(why=_AFNO),
            "Transformer NO": Part("tno-{}"),
            "ViT NO": Part("vitno-{}"),
            "FANO": Part("fano-{}"),
        },
        columns={
            "64 x 64": Part(problem="darcy64", measure="flops"),
            "416 x 416": Part(problem="darcy416", measure="flops"),
        },
        paper=[[_fno_flops(64**2), _fno_flops(416**2)], [], [_tno_flops(64**2)]],
        cells={
            ("Transformer NO", "416 x 416"): Part(why="attention between all points is not run at this size"),
            ("ViT NO", "64 x 64"): Part(why="the models on patches are not run at this size"),
            ("FANO", "64 x 64"): Part(why="the models on patches are not run at this size"),
        },
        note="The formulas of ViT NO and FANO are not legible in the text that we have.",
    ),
    "ca-figure-7": Table(
        "CA figure 7: median relative L2 error of the TNO on finer and coarser times",
        rows={
            "Lorenz '63": Part("tno-lorenz63", measure="median"),
            "Lorenz '63, x to y": Part("tno-lorenz63-y", measure="median"),
            "controlled ODE": Part("tno-cde", measure="median"),
        },
        columns={"dt / 2": Part(mesh="x2"), "dt": Part(), "2 dt": Part(mesh="x0.5")},
        plot=Plot("curves", (0.5, 1.0, 2.0), "step in time, relative to the training's"),
        note="The paper draws curves.",
    ),
    "ca-figure-8": Table(
        "CA figure 8: relative L2 error of the TNO on the uneven mesh (41), Lorenz '63, x to y",
        rows={"TNO": Part("tno-lorenz63-y", mesh="uneven")},
        columns={"median": Part(measure="median"), "largest": Part(measure="worst")},
        plot=Plot("samples"),
    ),
    "ca-figure-9": Table(
        "CA figure 9: the same without quadrature weights, in training and test",
        rows={
            "plain softmax": Part("tno-lorenz63-y", mesh="uneven", changes={"model": {"weights": "equal"}})
        },
        columns={"median": Part(measure="median"), "largest": Part(measure="worst")},
        paper=[[2.74e-2, 6.30e-2]],
        plot=Plot("samples"),
    ),
    "ca-figure-10": _cost("parameters"),
    "ca-figure-11": _cost("flops"),
    "ca-figure-14": Table(
        "CA figure 14: median relative L2 error on other grids, lognormal Darcy flow",
        rows={
            **{f"{name}, 64 x 64": part for name, part in _LOW.items() if name != "AFNO"},
            **{
                f"{name}, 416 x 416": part
                for name, part in _across("darcy416-lognormal", "FNO", "ViT NO", "FANO").items()
            },
        },
        columns=_FACTORS,
        plot=_AXIS,
        note="The paper draws curves.",
    ),
    "ca-figure-15": Table(
        "CA figure 15: median relative L2 error on other grids, piecewise constant Darcy flow",
        rows=_across("darcy416", "FNO", "ViT NO", "FANO"),
        columns=_FACTORS,
        plot=_AXIS,
        note="The paper draws curves.",
    ),
    "ca-figure-17": Table(
        "CA figure 17: median relative L2 error on other grids, Kolmogorov flow",
        rows=_across("kolmogorov", "FNO", "ViT NO", "FANO"),
        columns=_FACTORS,
        plot=_AXIS,
        note="The paper draws curves.",
    ),
    "ca-figure-19": Table(
        "CA figure 19: median relative L2 error of the FANO on other grids, patches extended or not",
        rows={
            "FANO": _high("fano-kolmogorov"),
            "FANO, extended": _high("fano-kolmogorov", changes={"model": {"periodic_extension": True}}),
        },
        columns=_FACTORS,
        plot=_AXIS,
        note="The paper draws curves.",
    ),
}
