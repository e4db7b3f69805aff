"""Plots of an evaluation as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..mesh import Grid, Mesh
from ..training.figures import new_figure, save_figure

if TYPE_CHECKING:
    from .evaluation import Picture

Array = np.ndarray
# Colour-blind safe, as in the demonstration.
TRUTH, MESH, EQUAL, INPUT = "#222222", "#0072B2", "#D55E00", "#777777"


def write_resolution(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Median and largest error against the number of points, other meshes beside the uniform ones."""
    figure = new_figure(figsize=(8, 4.6))
    axis = figure.subplots()
    for weights, color in (("mesh", MESH), ("equal", EQUAL)):
        of_kind = [r for r in rows if r["weights"] == weights]
        uniform = sorted((r for r in of_kind if r["kind"] == "uniform"), key=lambda r: r["points"])
        others = [r for r in of_kind if r["kind"] != "uniform"]
        label = f"{'quadrature' if weights == 'mesh' else 'equal'} weights"
        if uniform:
            at, style = [r["points"] for r in uniform], "o-" if weights == "mesh" else "s--"
            median, worst = ([100 * r[key] for r in uniform] for key in ("median", "worst"))
            axis.plot(at, median, style, color=color, label=f"{label}, median")
            axis.plot(at, worst, "_", color=color, markersize=12, label="largest")
        for r in others:
            axis.plot(r["points"], 100 * r["median"], "D", color=color, fillstyle="none")
            axis.annotate(
                r["mesh"],
                (r["points"], 100 * r["median"]),
                xytext=(7, 0),
                textcoords="offset points",
                fontsize=8,
            )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.grid(axis="y", color="#dddddd")
    axis.set_xlabel("points")
    axis.set_ylabel("relative error in %")
    axis.legend(frameon=False, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path)


def write_training(path: Path, log: list[dict[str, Any]]) -> Path:
    """Loss and validation error by step."""
    figure = new_figure(figsize=(8, 3.4))
    axis = figure.subplots()
    axis.plot([e["step"] for e in log], [e["loss"] for e in log], color=INPUT, linewidth=0.8, label="loss")
    checked = [e for e in log if "validation" in e]
    axis.plot(
        [e["step"] for e in checked],
        [e["validation"] for e in checked],
        "o-",
        color=MESH,
        markersize=3,
        label="validation error",
    )
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.legend(frameon=False, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path)


def write_samples(path: Path, pictures: list[Picture]) -> Path:
    """Input, truth, prediction and error, a row for each sample; its first channels."""
    figure = new_figure(figsize=(13, 3.1 * len(pictures)))
    for part, picture in zip(figure.subfigures(len(pictures), squeeze=False)[:, 0], pictures, strict=True):
        part.suptitle(picture.title, fontsize=10)
        samples = picture.samples
        u, truth, prediction = (x[:, 0].numpy() for x in (samples.input, samples.target, picture.prediction))
        axes = part.subplots(1, 4)
        if samples.mesh.points.shape[-1] == 1:
            _lines(axes, samples.mesh, samples.target_mesh, u, truth, prediction)
        else:
            _fields(part, axes, samples.mesh, samples.target_mesh, u, truth, prediction)
        for axis, title in zip(axes, ("input", "truth", "prediction", "prediction − truth"), strict=True):
            axis.set_title(title, fontsize=9)
    return save_figure(figure, path)


def _lines(axes: Any, mesh: Mesh, target_mesh: Mesh, u: Array, truth: Array, prediction: Array) -> None:
    x, y = mesh.points[:, 0].numpy(), target_mesh.points[:, 0].numpy()
    axes[0].plot(x, u, color=INPUT)
    axes[1].plot(y, truth, color=TRUTH)
    axes[2].plot(y, truth, color=TRUTH, linewidth=3, alpha=0.3)
    axes[2].plot(y, prediction, color=MESH)
    axes[3].plot(y, prediction - truth, color=EQUAL)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)


def _fields(
    figure: Any, axes: Any, mesh: Mesh, target_mesh: Mesh, u: Array, truth: Array, prediction: Array
) -> None:
    low, high = truth.min(), truth.max()
    difference = prediction - truth
    bound = max(np.abs(difference).max(), 1e-30)
    shown: tuple[tuple[Mesh, Array, dict[str, Any]], ...] = (
        (mesh, u, {"cmap": "cividis"}),
        (target_mesh, truth, {"vmin": low, "vmax": high}),
        (target_mesh, prediction, {"vmin": low, "vmax": high}),
        (target_mesh, difference, {"cmap": "RdBu_r", "vmin": -bound, "vmax": bound}),
    )
    for axis, (on, values, style) in zip(axes, shown, strict=True):
        if isinstance(on, Grid):
            x, y = (a.numpy() for a in on.axes)
            image = axis.pcolormesh(
                x, y, values.reshape(on.shape).T, shading="nearest", rasterized=True, **style
            )
        else:
            x, y = on.points.numpy().T
            image = axis.tripcolor(x, y, values, shading="gouraud", rasterized=True, **style)
        figure.colorbar(image, ax=axis, shrink=0.8)
        axis.set_aspect("equal")
        axis.set_xticks([])
        axis.set_yticks([])
