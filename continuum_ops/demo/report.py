"""The table and the JSON file of the demonstration."""

from __future__ import annotations

from typing import Any

from ..training.table import aligned

_COLUMNS = ("mesh", "points", "weights", "median", "worst", "seconds", "peak memory", "N x N scores")


def text(result: dict[str, Any]) -> str:
    """The report: a table of meshes and weights with the large grid, and one of Darcy grids."""
    settings, training, grid = result["settings"], result["training"], result["large_grid"]
    table: list[tuple[str, ...]] = [_COLUMNS]
    for row in [*result["meshes"], {**grid, "weights": "trapezoid", "median": None, "worst": None}]:
        table.append(
            (
                row["mesh"],
                f"{row['points']:,}",
                row["weights"],
                _percent(row["median"]),
                _percent(row["worst"]),
                f"{row['seconds']:.2f}",
                _bytes(row["peak_memory_bytes"]),
                _bytes(row["n_by_n_bytes"]),
            )
        )
    lines, rule = aligned(table, left=(0, 2))
    batch = min(settings["test_batch_size"], settings["test_trajectories"])
    return "\n".join(
        [
            "",
            "Lorenz-63, x(t) -> y(t): relative L2 errors of "
            f"{settings['test_trajectories']} test trajectories.",
            f"TNO with {training['parameters']:,} parameters, {settings['steps']} steps in "
            f"{training['seconds']:.0f} s, on the first mesh alone.",
            "",
            lines[0],
            rule,
            *lines[1:-1],
            rule,
            lines[-1],
            "",
            "seconds, peak memory: of all test trajectories, or of one call on the large grid; peak memory",
            "is the growth of the process. N x N scores: what plain attention would hold, in one layer for",
            f"{batch} trajectories at a time ({settings['num_heads']} heads), in one head on the large grid.",
            "On the uneven mesh equal weights give "
            f"{result['uneven_equal_over_trapezoid']:.1f} times the median error of trapezoid weights.",
            f"On the {grid['mesh']} grid the largest error against float64 is "
            f"{grid['error_against_float64']:.1e} of the largest value.",
            "",
            *_darcy(result["darcy"], settings["darcy"]),
            "",
            *_warning(settings["learns"]),
            f"CPU: {result['machine']['backends']['cpu']}, {settings['threads']} threads, "
            f"{result['seconds']:.0f} s in all.",
            "",
        ]
    )


def _darcy(result: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    training, grids = result["training"], result["grids"]
    table: list[tuple[str, ...]] = [("grid", "points", "mean", "worst", "seconds", "peak memory")]
    for row in grids:
        note = " (training)" if row is grids[0] else ""
        table.append(
            (
                f"{row['resolution']} x {row['resolution']}{note}",
                f"{row['points']:,}",
                _percent(row["mean"]),
                _percent(row["worst"]),
                f"{row['seconds']:.2f}",
                _bytes(row["peak_memory_bytes"]),
            )
        )
    lines, rule = aligned(table, left=(0,))
    return [
        f"Darcy flow, a(x) -> u(x): relative L2 errors of {settings['test_samples']} test samples.",
        f"PiT with {training['parameters']:,} parameters, {settings['steps']} steps in "
        f"{training['seconds']:.0f} s, on the first grid alone.",
        "",
        lines[0],
        rule,
        *lines[1:],
        "",
        "seconds: of all test samples, with the quantile radii of the grid.",
    ]


def _warning(learns: bool) -> list[str]:
    return (
        []
        if learns
        else ["A quick run: the models learned next to nothing and these figures mean nothing.", ""]
    )


def _percent(error: float | None) -> str:
    return "" if error is None else f"{100 * error:.2f} %"


def _bytes(count: int | None) -> str:
    if count is None:
        return "not known"
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
