"""Plots of an evaluation as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..mesh import Grid, Mesh
from ..training.figures import new_figure, save_figure

if TYPE_CHECKING:
    from .attention import LayerAttention
    from .evaluation import Picture

Array = np.ndarray
# Colour-blind safe, as in the demonstration.
TRUTH, MESH, EQUAL, INPUT = "#222222", "#0072B2", "#D55E00", "#777777"
COLORS = (MESH, "#56B4E9", "#009E73", "#882255", "#CC79A7", "#E69F00", "#332288", EQUAL, INPUT)
MARKERS = "osv^D*Px+"


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


def write_lines(path: Path, lines: dict[str, tuple[list[float], list[float]]], label: str) -> Path:
    """Relative errors against numbers, (abscissas, errors) of each line; `label` is that of the abscissa."""
    figure = new_figure(figsize=(8, 4.6))
    axis = figure.subplots()
    for i, (name, (x, y)) in enumerate(lines.items()):
        color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
        axis.plot(x, [100 * error for error in y], marker=marker, color=color, label=name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.grid(axis="y", color="#dddddd")
    axis.set_xlabel(label)
    axis.set_ylabel("relative error in %")
    if lines:
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


def write_rollout(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Error of the roll-out by time."""
    figure = new_figure(figsize=(8, 3.4))
    axis = figure.subplots()
    times = [row["time"] for row in rows]
    for key, style in (("median", "o-"), ("mean", "s--"), ("worst", "_:")):
        axis.plot(times, [100 * row[key] for row in rows], style, color=MESH, label=key)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_xlabel("time")
    axis.set_ylabel("relative error in %")
    axis.legend(frameon=False, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path)


def write_radii(path: Path, radii: dict[str, list[float]]) -> Path:
    """Radii 1 / sqrt(rate) by layer, a mark for each head (PiT table 5)."""
    figure = new_figure(figsize=(8, 3.4))
    axis = figure.subplots()
    names = list(radii)
    for head in range(max(map(len, radii.values()))):
        at = [i for i, name in enumerate(names) if head < len(radii[name])]
        values = [radii[names[i]][head] for i in at]
        color, marker = COLORS[head % len(COLORS)], MARKERS[head % len(MARKERS)]
        axis.plot(at, values, marker, color=color, label=f"head {head + 1}")
    axis.set_yscale("log")
    axis.set_xticks(range(len(names)), names, fontsize=8, rotation=20)
    axis.grid(axis="y", color="#dddddd")
    axis.set_ylabel("1 / sqrt(rate)")
    axis.legend(frameon=False, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path)


def write_attention(path: Path, layers: list[LayerAttention]) -> Path:
    """Where a point looks: a row for each layer, in two dimensions a panel for each head."""
    d = layers[0].points.shape[-1]
    columns = 1 if d == 1 else max(len(layer.density) for layer in layers)
    figure = new_figure(figsize=(8, 1.9 * len(layers)) if d == 1 else (2.3 * columns, 2.1 * len(layers)))
    axes = figure.subplots(len(layers), columns, squeeze=False)
    for row, layer in zip(axes, layers, strict=True):
        for axis in row[len(layer.density) if d > 1 else 1 :]:
            axis.set_visible(False)
        points, density = layer.points.numpy(), layer.density.numpy()
        if d == 1:
            order = points[:, 0].argsort()
            for head, values in enumerate(density):
                color = COLORS[head % len(COLORS)]
                row[0].plot(
                    points[order, 0], values[order], color=color, linewidth=1, label=f"head {head + 1}"
                )
            row[0].axvline(layer.query.item(), color=TRUTH, linewidth=0.6, linestyle=":")
            row[0].spines[["top", "right"]].set_visible(False)
            row[0].set_title(layer.name, fontsize=8)
            continue
        # Of more than two axes the first two, the points on top of each other.
        for head, (axis, values) in enumerate(zip(row, density, strict=False)):
            image = _map(axis, points[:, :2], values)
            axis.plot(*layer.query.numpy()[:2], "+", color=EQUAL, markersize=9)
            figure.colorbar(image, ax=axis, shrink=0.8).ax.tick_params(labelsize=6)
            axis.set_title(f"{layer.name}, head {head + 1}", fontsize=7)
            axis.set_aspect("equal")
            axis.set_xticks([])
            axis.set_yticks([])
    if d == 1:
        axes[0, 0].legend(frameon=False, fontsize=7, ncols=4)
    return save_figure(figure, path)


def _map(axis: Any, points: Array, values: Array) -> Any:
    """Values at points of the plane: cells where these make a grid, else marks that about fill the panel."""
    x, y = (np.unique(column) for column in points.T)
    if len(x) * len(y) == len(points):
        order = np.lexsort((points[:, 1], points[:, 0]))
        return axis.pcolormesh(x, y, values[order].reshape(len(x), len(y)).T, shading="nearest")
    return axis.scatter(*points.T, c=values, s=max(0.2, (1.6 * 72) ** 2 / len(points)), linewidths=0)


def write_convergence(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Error against the number of points, a panel for each operator and dimension, a line for each rule."""
    panels = list(dict.fromkeys((row["operator"], row["dimension"]) for row in rows))
    names = list(dict.fromkeys(row["rule"] for row in rows))
    columns = max(sum(d == dimension for _, d in panels) for dimension in (1, 2))
    figure = new_figure(figsize=(3.4 * columns, 7.6))
    axes = figure.subplots(2, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_visible(False)
    style = {name: (COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}
    handles: dict[str, Any] = {}
    for dimension in (1, 2):
        for axis, (operator, _) in zip(
            axes[dimension - 1], [p for p in panels if p[1] == dimension], strict=False
        ):
            axis.set_visible(True)
            for row in rows:
                if (row["operator"], row["dimension"]) != (operator, dimension):
                    continue
                color, marker = style[row["rule"]]
                # Zero has no logarithm.
                shown = [max(e, 1e-17) for e in row["errors"]]
                (handles[row["rule"]],) = axis.plot(
                    row["points"], shown, marker=marker, color=color, markersize=4, linewidth=1.1
                )
            axis.set_xscale("log")
            axis.set_yscale("log")
            counts = next(row["points"] for row in rows if row["dimension"] == dimension)
            axis.set_xticks(counts[::2], map(str, counts[::2]))
            axis.xaxis.minorticks_off()
            axis.grid(axis="y", color="#dddddd")
            axis.set_title(f"{operator}, d = {dimension}", fontsize=9)
            axis.set_xlabel("points N")
            axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("relative error")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    return save_figure(figure, path)
