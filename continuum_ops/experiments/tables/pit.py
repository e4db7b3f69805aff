"""Tables and figures of PiT: Chen, Wu, "Positional knowledge is all you need"."""

from __future__ import annotations

from .spec import Content, Part, Plot, Table

_OTHER = "not a model of this package"
_DATA = "the published data set is not made here; a stand-in has a column of its own"
# What an error is, by problem (PiT E.1).
_PROBLEMS = {
    "InviscidBurgers": Part(problem="inviscid-burgers", measure="median"),
    "ShockTube": Part(problem="shock-tube", measure="median"),
    "Darcy2D": Part(problem="darcy", measure="mean"),
    "Vorticity": Part(problem="vorticity", measure="rollout"),
    "Elasticity": Part(why=_DATA),
    "NACA": Part(why=_DATA),
    "elastic cell": Part(problem="elastic-cell", measure="mean"),
    "Joukowski airfoil": Part(problem="joukowski", measure="mean"),
}
_STAND_INS = ("elastic cell", "Joukowski airfoil")
_NOTE = (
    "Median relative L1 errors of InviscidBurgers and ShockTube, mean relative L2 errors of the others; of "
    "Vorticity rolled out, the mean over time."
)
# Initial rates of the global and the local layers of the small experiments, of the first head and the last.
_RATES: dict[str, tuple[tuple[float, float], tuple[float, float]] | None] = {
    "inviscid-burgers": ((20.0, 400.0), (400.0, 2000.0)),
    "shock-tube": ((0.2, 10.0), (10.0, 100.0)),
    "darcy": ((10.0, 300.0), (400.0, 2500.0)),
    "vorticity": ((10.0, 300.0), (400.0, 2500.0)),
    "elastic-cell": None,
    "joukowski": ((0.1, 10.0), (10.0, 100.0)),
}


def _spread(ends: tuple[float, float], heads: int) -> list[float]:
    """Evenly in the logarithm; one head has the middle."""
    low, high = ends
    if heads == 1:
        return [round((low * high) ** 0.5, 3)]
    return [round(low * (high / low) ** (i / (heads - 1)), 3) for i in range(heads)]


def _heads(problem: str, heads: int) -> Part:
    model: Content = {"num_heads": heads}
    small = dict(model)
    rates = _RATES[problem]
    if rates is not None:
        small |= {
            "initial_rate": _spread(rates[0], heads),
            "initial_local_rate": _spread(rates[1], heads),
        }
    column = next(part for part in _PROBLEMS.values() if part.problem == problem)
    return column.over(Part("pit-{}", changes={"model": model}, small={"model": small}))


def _baseline(name: str) -> dict[tuple[str, str], Part]:
    """Cells of a model that has none of the other problems."""
    return {(name, problem): Part(why=_OTHER) for problem, part in _PROBLEMS.items() if problem != "Darcy2D"}


def _resolution(paper: int, small: int) -> Part:
    def data(n: int) -> Content:
        return {"data": {"resolution": n, "meshes": []}}

    return Part("pit-darcy", changes=data(paper), small=data(small))


def _model(key: str, paper: object, small: object) -> Part:
    return Part(changes={"model": {key: paper}}, small={"model": {key: small}})


_SHARES = (0.01, 0.02, 0.04, 0.08, 0.16)
_LATENT = {16: 4, 32: 8, 64: 16, 256: 32, 1024: 64}
_WIDTHS = (16, 32, 64, 128, 256)

TABLES: dict[str, Table] = {
    "pit-table-1": Table(
        "PiT table 1: relative errors on six problems",
        rows={
            "DeepONet": Part(why=_OTHER),
            "shift-DeepONet": Part(why=_OTHER),
            "FNO++": Part("fno-pit-{}"),
            "FNO": Part(why="the first FNO's code is not run; FNO++ is neuraloperator's"),
            "OFormer": Part(why=_OTHER),
            "Galerkin Transformer": Part("galerkin-darcy"),
            "GNOT": Part(why=_OTHER),
            "ONO": Part(why=_OTHER),
            "Geo-FNO": Part(why=_OTHER),
            "PiT": Part("pit-{}"),
        },
        columns=_PROBLEMS,
        paper=[
            [0.285, 0.0422],
            [0.0783, 0.0276],
            [0.00995, 0.0194, 0.00509, 0.1315],
            [0.0157, 0.0156, 0.0109, 0.1559, 0.0508, 0.0421],
            [None, None, 0.0128, 0.1755, 0.0183, 0.0183],
            [None, None, 0.00844, 0.1399, 0.0201, 0.0161],
            [None, None, None, 0.138, 0.00865, 0.00757],
            [None, None, None, 0.1195, 0.0118, 0.0056],
            [None, None, None, None, 0.0229, 0.0138],
            [0.0136, 0.0122, 0.00485, 0.1140, 0.00649, 0.00480],
        ],
        cells={
            **_baseline("Galerkin Transformer"),
            **{("FNO++", name): Part(why="the FNO needs a grid") for name in _STAND_INS},
        },
        note=_NOTE,
    ),
    "pit-table-3": Table(
        "PiT table 3: errors of PiT by the function that keeps rates positive",
        rows={
            "square": Part("pit-{}", changes={"model": {"rate_function": "square"}}),
            "tan": Part(
                "pit-{}",
                changes={"model": {"rate_function": "tan_clamped"}},
                small={"model": {"rate_function": "tan_sin"}},
            ),
        },
        columns=_PROBLEMS,
        paper=[
            [0.0273, 0.0122, 0.0102, 0.1169, 0.00649, 0.162],
            [0.0136, 0.0154, 0.00485, 0.5757949, 0.00701, 0.00480],
        ],
        note=f"{_NOTE} With --small, tan of a sine of the parameter.",
    ),
    "pit-table-4": Table(
        "PiT table 4: errors of PiT by the number of heads h",
        rows={f"h = {h}": Part() for h in (1, 2, 4, 8)},
        columns=_PROBLEMS,
        paper=[
            [0.998, 0.251, 0.00627, 0.1140, 0.00794, 0.00553],
            [0.0136, 0.0122, 0.00485, 0.1169, 0.00691, 0.00480],
            [0.0162, 0.0161, 0.00502, 0.1205, 0.00708, 0.00507],
            [0.0157, 0.0158, 0.00530, 0.1186, 0.00649, 0.00545],
        ],
        cells={
            (f"h = {h}", name): _heads(part.problem, h)
            for h in (1, 2, 4, 8)
            for name, part in _PROBLEMS.items()
            if part.problem
        },
        note=_NOTE,
    ),
    "pit-table-5": Table(
        "PiT table 5: learned radii 1 / sqrt(rate) of PiT on Darcy flow",
        rows={
            "Encoder": Part("pit-darcy", layer="encoder"),
            **{f"Processor {i + 1}": Part("pit-darcy", layer=f"layers.{i}.attention") for i in range(4)},
            "Decoder": Part("pit-darcy", layer="decoder"),
        },
        columns={f"head {i}": Part(measure="radius", head=i) for i in (1, 2)},
        paper=[
            [0.0483, 0.0155],
            [2.44, 0.840],
            [0.232, 0.827],
            [0.382, 0.0752],
            [0.588, 0.167],
            [0.0206, 0.0498],
        ],
    ),
    "pit-table-16": Table(
        "PiT table 16: PiT on Darcy flow by the resolution of the training, points an axis",
        rows={
            "seconds an epoch": Part(measure="epoch"),
            "error on the training's mesh": Part(measure="mean"),
            "error on the finest mesh": Part(measure="mean", mesh="finest"),
        },
        columns={
            "43": _resolution(43, 15),
            "85": _resolution(85, 22),
            "141": _resolution(141, 29),
            "211": Part("pit-darcy"),
        },
        paper=[
            [1.11, 2.41, 4.37, 14.7],
            [0.00974, 0.00578, 0.00558, 0.00485],
            [0.0450, 0.0209, 0.0117, 0.00715],
        ],
        note="The finest mesh has 421 points an axis; with --small it has 85, those of the training 15, 22, "
        "29 and 43.",
    ),
    "pit-figure-4a": Table(
        "PiT figure 4: median relative L1 error of PiT on ShockTube by the quantile of the local attention",
        rows={
            name: Part("pit-shock-tube", measure="median")
            for name in ("quantile, encoder", "quantile, decoder")
        },
        columns={f"{q:g}": Part() for q in _SHARES},
        cells={
            (f"quantile, {where}", f"{q:g}"): Part(
                "pit-shock-tube", measure="median", changes={"model": {f"{where}_quantile": q}}
            )
            for where in ("encoder", "decoder")
            for q in _SHARES
        },
        plot=Plot("curves", _SHARES, "quantile"),
        note="The paper draws curves; the values of the abscissa are ours.",
    ),
    "pit-figure-4b": Table(
        "PiT figure 4: median relative L1 error of PiT by the points of the latent mesh",
        rows={name: Part("pit-{}").over(_PROBLEMS[name]) for name in ("InviscidBurgers", "ShockTube")},
        columns={f"{n}": _model("latent", [n], [small]) for n, small in _LATENT.items()},
        plot=Plot("curves", tuple(map(float, _LATENT)), "points of the latent mesh"),
        note="The paper draws curves; the values of the abscissa are ours. With --small there are 4, 8, 16, "
        "32 and 64 points.",
    ),
    "pit-figure-4c": Table(
        "PiT figure 4: relative error of PiT by its width",
        rows={
            name: Part("pit-{}").over(_PROBLEMS[name]) for name in ("InviscidBurgers", "ShockTube", "Darcy2D")
        },
        columns={f"{w}": _model("width", w, w // 4) for w in _WIDTHS},
        paper=[[], [], [None, 0.00808]],
        plot=Plot("curves", tuple(map(float, _WIDTHS)), "width"),
        note="The paper draws curves; most values of the abscissa are ours. With --small they are a quarter.",
    ),
}
