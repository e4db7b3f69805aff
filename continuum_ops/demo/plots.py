"""The plots of the demonstration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..training.figures import new_figure, save_figure
from .darcy import Field
from .lorenz import Evaluation

# Colour-blind safe; both plots use the same two for the two kinds of weights.
TRUTH, TRAPEZOID, EQUAL, INPUT = "#222222", "#0072B2", "#D55E00", "#777777"


class Uneven(NamedTuple):
    """Test trajectories on the uneven mesh: times (N,), x and y (n, N, 1), and the two predictions of y."""

    times: Tensor
    input: Tensor
    target: Tensor
    trapezoid: Evaluation
    equal_prediction: Tensor


def write_trajectories(path: Path, data: Uneven) -> Path:
    """Prediction against truth on the uneven mesh, for the trajectories of median and of largest error."""
    figure = new_figure(figsize=(11, 7.2))
    axes = figure.subplots(3, 2, sharex=True, sharey="row", height_ratios=(1, 1.7, 1.2))
    order = data.trapezoid.error.argsort()
    times = data.times.numpy()
    dense = times[len(times) // 3]  # the first half of the time holds N / 2 of the 3 N / 2 intervals
    for column, (name, index) in enumerate(
        (("median", order[(len(order) - 1) // 2]), ("largest", order[-1]))
    ):
        top, middle, bottom = axes[:, column]
        x, y = data.input[index, :, 0], data.target[index, :, 0]
        trapezoid, equal = data.trapezoid.prediction[index, :, 0], data.equal_prediction[index, :, 0]
        error = data.trapezoid.error[index].item()
        top.set_title(f"trajectory of {name} error: relative L2 {100 * error:.2f} %", fontsize=11)
        top.plot(times, x, color=INPUT, linewidth=1.5)
        middle.plot(times, y, color=TRUTH, linewidth=3.5, alpha=0.3, label="truth")
        middle.plot(times, equal, color=EQUAL, linewidth=1.1, linestyle="--", label="equal weights")
        middle.plot(times, trapezoid, color=TRAPEZOID, linewidth=1.3, label="trapezoid weights")
        bottom.plot(times, equal - y, color=EQUAL, linewidth=1.1, linestyle="--")
        bottom.plot(times, trapezoid - y, color=TRAPEZOID, linewidth=1.3)
        bottom.axhline(0, color=TRUTH, linewidth=0.6)
        bottom.set_xlabel("time t")
        bottom.set_xlim(times[0], times[-1])
        for axis in (top, middle, bottom):
            axis.axvspan(dense, times[-1], color="#f2f2f2", zorder=0)
            axis.spines[["top", "right"]].set_visible(False)
    for axis, label in zip(axes[:, 0], ("input x(t)", "output y(t)", "prediction − truth"), strict=True):
        axis.set_ylabel(label)
    axes[1, 0].legend(loc="best", frameon=False, fontsize=9)
    figure.suptitle(
        "Lorenz-63 on the uneven mesh (shaded: sampled twice as densely), by a model trained on the even one",
        fontsize=12,
    )
    return save_figure(figure, path)


def write_resolution(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Median and largest error on every mesh, with trapezoid and with equal weights."""
    from matplotlib.ticker import LogLocator

    figure = new_figure(figsize=(8.5, 4.8))
    axis = figure.subplots()
    uniform = sorted({(r["points"], r["mesh"]) for r in rows if r["mesh"] != "uneven"})
    meshes = [*uniform, next((r["points"], r["mesh"]) for r in rows if r["mesh"] == "uneven")]
    for weights, color, shift in (("trapezoid", TRAPEZOID, -0.09), ("equal", EQUAL, 0.09)):
        found = {r["mesh"]: r for r in rows if r["weights"] == weights}
        at = [i + shift for i in range(len(meshes))]
        median, worst = ([100 * found[name][key] for _, name in meshes] for key in ("median", "worst"))
        axis.vlines(at, median, worst, color=color, linewidth=1.0, alpha=0.5)
        axis.plot(at, median, "o", color=color, markersize=8, label=f"{weights} weights, median")
        axis.plot(at, worst, "_", color=color, markersize=14, label=f"{weights} weights, largest")
        for place, value in zip(at, median, strict=True):
            axis.annotate(
                f"{value:.2f}",
                (place, value),
                xytext=(-8 if shift < 0 else 8, 0),
                textcoords="offset points",
                ha="right" if shift < 0 else "left",
                va="center",
                fontsize=9,
                color=color,
            )
    axis.axvline(len(uniform) - 0.5, color="#bbbbbb", linewidth=0.8)
    axis.set_yscale("log")
    for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        formatter("{x:g}")
    axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axis.grid(axis="y", which="major", color="#dddddd")
    axis.set_xticks(range(len(meshes)), [f"{name}\n{points} points" for points, name in meshes])
    axis.set_xlim(-0.5, len(meshes) - 0.5)
    axis.set_ylabel("relative L2 error in %")
    axis.set_title("One model, trained on one mesh, on four meshes (Lorenz-63)")
    axis.legend(ncols=2, frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    axis.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path)


def write_darcy(path: Path, field: Field, rows: list[dict[str, Any]]) -> Path:
    """A test sample on the finest grid, and the errors on all grids."""
    figure = new_figure(figsize=(13, 3.4))
    axes = figure.subplots(1, 5, width_ratios=(1, 1, 1, 1, 1.25))
    top = field.solution.max().item()
    finest = rows[-1]["resolution"]
    error = 100 * (field.prediction - field.solution).abs() / top
    pictures: tuple[tuple[str, Tensor, dict[str, Any]], ...] = (
        ("coefficient a", field.coefficient, {"cmap": "cividis"}),
        ("solution u", field.solution, {"vmin": 0, "vmax": top}),
        ("prediction", field.prediction, {"vmin": 0, "vmax": top}),
        ("error in % of max u", error, {"cmap": "magma", "vmin": 0}),
    )
    for axis, (title, values, style) in zip(axes, pictures, strict=False):
        image = axis.imshow(values.T, origin="lower", extent=(0, 1, 0, 1), **style)
        figure.colorbar(image, ax=axis, shrink=0.7)
        axis.set_title(title, fontsize=10)
        axis.set_xticks([0, 1])
        axis.set_yticks([0, 1])
    last = axes[-1]
    at = range(len(rows))
    last.plot(at, [100 * r["mean"] for r in rows], "o-", color=TRAPEZOID, label="mean")
    last.plot(at, [100 * r["worst"] for r in rows], "_", color=TRAPEZOID, markersize=12, label="largest")
    last.set_xticks(at, [str(r["resolution"]) for r in rows])
    last.set_ylim(bottom=0)
    last.set_xlabel("points an axis")
    last.set_title("relative L2 error in %", fontsize=10)
    last.legend(frameon=False, fontsize=9)
    last.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"Darcy flow on {finest} x {finest} points, by a model trained on {rows[0]['resolution']} x "
        f"{rows[0]['resolution']}: test sample of median error, {100 * field.error:.2f} %",
        fontsize=12,
    )
    return save_figure(figure, path)
