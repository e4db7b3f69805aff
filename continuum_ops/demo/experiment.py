"""The demonstration from data to files."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..data import lorenz63
from ..training import Fitted, write_json
from ..training.progress import progress_bar, require
from . import darcy, large_grid, lorenz, plots, report
from .machine import machine
from .settings import Settings

# Names in the report, and what the model takes.
KINDS: dict[str, lorenz.Weights] = {"trapezoid": "mesh", "equal": "equal"}
EXTRAS = ("scipy", "tqdm", "matplotlib")


def run(settings: Settings, out: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Train two models, test them on other meshes, run the large grid; print tables, write files to `out`.

    Returns what demo.json holds. The directory is made before the work starts and the files are written after
    it, each whole or not at all.

    Raises:
        ImportError: scipy, tqdm or matplotlib is missing.
        OSError: the directory cannot be made, or a file not be written.
        RuntimeError: the training diverged, or the process of the large grid failed.
    """
    require("the demo", *EXTRAS)
    out.mkdir(parents=True, exist_ok=True)
    result, pictures = measure(settings)
    say(report.text(result))
    for path in (
        write_json(out / "demo.json", result),
        plots.write_resolution(out / "resolution.png", result["meshes"]),
        plots.write_trajectories(out / "trajectories.png", pictures.uneven),
        plots.write_darcy(out / "darcy.png", pictures.field, pictures.grids),
    ):
        say(f"wrote {path}")
    return result


class Pictures(NamedTuple):
    """What the plots show besides the numbers: the uneven mesh, one Darcy sample, errors by grid."""

    uneven: plots.Uneven
    field: darcy.Field
    grids: list[dict[str, Any]]


def measure(settings: Settings) -> tuple[dict[str, Any], Pictures]:
    """Everything that `run` reports, and what its plots need besides."""
    start = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with torch.random.fork_rng(devices=[]):
            trained = lorenz.train(settings)
        rows, uneven = _test(trained.model, settings)
        with torch.random.fork_rng(devices=[]):
            data = darcy.training_data(settings.darcy, settings.seed)
            pit = darcy.train(data, settings.darcy, settings.seed)
        grids, sample = darcy.test(
            pit.model, darcy.test_data(settings.darcy, settings.seed), "mesh", settings.darcy
        )
        grid = large_grid.measure_in_child(settings)
    finally:
        torch.set_num_threads(threads)

    equal, mesh = (
        next(r["median"] for r in rows if r["mesh"] == "uneven" and r["weights"] == w)
        for w in ("equal", "trapezoid")
    )
    result = {
        "settings": asdict(settings),
        "machine": machine(),
        "training": _training(trained.parameters, trained.fitted),
        "meshes": rows,
        "uneven_equal_over_trapezoid": equal / mesh,
        "darcy": {"training": _training(pit.parameters, pit.fitted), "grids": grids},
        "large_grid": grid,
        "seconds": time.perf_counter() - start,
    }
    return result, Pictures(uneven, sample, grids)


def _training(parameters: int, fitted: Fitted) -> dict[str, Any]:
    return {"parameters": parameters, **fitted._asdict()}


def _test(model: lorenz.ScaledTNO, settings: Settings) -> tuple[list[dict[str, Any]], plots.Uneven]:
    """Errors on every mesh, with its weights and with equal ones; and the uneven mesh's test for its plot."""
    rows: list[dict[str, Any]] = []
    kept: dict[str, lorenz.Evaluation] = {}
    cases = lorenz.mesh_cases(settings.intervals)
    with progress_bar(2 * len(cases), "testing", "mesh") as bar:
        for case in cases:
            data = lorenz63(settings.test_trajectories, case.times, seed=2 * settings.seed + 1)
            mesh = lorenz.grid_of(case.times)
            for name, weights in KINDS.items():
                kept[name] = result = lorenz.evaluate(model, data, mesh, weights, settings)
                n, batch = len(mesh), min(settings.test_batch_size, settings.test_trajectories)
                rows.append(
                    {
                        "mesh": case.name,
                        "points": n,
                        "weights": name,
                        "median": result.error.median().item(),
                        "worst": result.error.max().item(),
                        "seconds": result.seconds,
                        "peak_memory_bytes": result.peak_memory,
                        "n_by_n_bytes": batch * settings.num_heads * n * n * 4,
                    }
                )
                bar.update()
    # The last case is the uneven mesh.
    return rows, plots.Uneven(
        case.times, data.input, data.target, kept["trapezoid"], kept["equal"].prediction
    )
