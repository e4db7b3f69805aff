"""Every experiment's --small: data, training and test, beside the paper's value and the settings that differ.

    python bench/run_experiments.py                        # what the result file lacks; prints the table
    python bench/run_experiments.py pit-darcy tno-cde      # these experiments
    python bench/run_experiments.py --list                 # names of the runs that the result file lacks

Each finished run is an entry of bench/results/experiments-<machine>.json, written at once: an interrupted
call goes on where it stopped, inside a training too. An entry whose settings are no longer those of its
experiment is made anew. "constant" is the error of the mean of the training targets at each point (with one
mesh per sample: over all points), and the factor is that error divided by the model's. Seconds of CPU
time are those of the training, one thread; the file has those of the wall clock too, which other processes
share and may stop.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import report
import torch

from continuum_ops.experiments import (
    EXPERIMENTS,
    SPLITS,
    ConfigError,
    config_from,
    evaluate,
    generate,
    load,
    train,
)

# (error, what it is, where): of the paper's model at the paper's size; None where the paper draws a curve.
PAPER: dict[str, tuple[float | None, str]] = {
    "tno-lorenz63": (8.73e-3, "median, CA figure 6"),
    "tno-lorenz63-y": (None, "CA figure 7"),
    "tno-cde": (None, "CA figure 7"),
    "galerkin-burgers": (1.203e-3, "GT table 2"),
    "fourier-burgers": (1.135e-3, "GT table 2"),
    "galerkin-darcy": (8.44e-3, "GT table 2"),
    "fourier-darcy": (8.47e-3, "GT table 2"),
    "galerkin-darcy-inverse": (2.536e-2, "GT table 3"),
    "fourier-darcy-inverse": (2.467e-2, "GT table 3"),
    "pit-darcy": (4.85e-3, "PiT table 1"),
    "pit-inviscid-burgers": (1.36e-2, "median, PiT table 1"),
    "pit-shock-tube": (1.22e-2, "median, PiT table 1"),
    "pit-vorticity": (0.1140, "rolled out, PiT table 1"),
    "pit-joukowski": (None, "stand-in: none"),
    "pit-elastic-cell": (None, "stand-in: none"),
    "tno-darcy64": (1.19e-2, "median, CA table 1"),
    "vitno-darcy416-lognormal": (7.68e-3, "median, CA table 3"),
    "fano-darcy416-lognormal": (8.39e-3, "median, CA table 3"),
    "vitno-darcy416": (9.72e-3, "median, CA table 3"),
    "fano-darcy416": (1.38e-2, "median, CA table 3"),
    "vitno-kolmogorov": (1.07e-2, "median, CA table 3"),
    "fano-kolmogorov": (6.34e-3, "median, CA table 3"),
}
# What a run of minutes is asked for; inverse problems are ill-posed.
WANTED = {name: 3.0 if "inverse" in name else 5.0 for name in EXPERIMENTS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments; default: all")
    parser.add_argument("--list", action="store_true", help="print what is missing and run nothing")
    parser.add_argument(
        "--out", type=Path, help="result file; default: bench/results/experiments-<machine>.json"
    )
    parser.add_argument("--work", type=Path, default=Path("build/experiments"), help="samples and runs")
    options = parser.parse_args()
    for name in options.names:
        load(name)  # says what is wrong with a name

    document = harness.new_document("experiments", {"threads": 1, "shared": "with other work"})
    path = harness.result_path("experiments", document, options.out)
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {row["name"]: row for row in known if fresh(row)}
    missing = [name for name in options.names or EXPERIMENTS if name not in rows]
    if options.list:
        print("\n".join(missing))
        return
    torch.set_num_threads(1)
    for name in missing:
        rows[name] = run(name, options.work)
        document["rows"] = [rows[n] for n in EXPERIMENTS if n in rows]
        harness.write_json(path, document)
        print(f"{name}: factor {rows[name]['factor']:.1f}", flush=True)
    if path.exists():
        print(render(json.loads(path.read_text())))


def small(name: str) -> Any:
    return load(name, small=True, sections={"training": {"threads": 1}})


def fresh(row: Mapping[str, Any]) -> bool:
    """Whether the settings of a row are still its experiment's; a setting added since has its default."""
    try:
        return bool(config_from(row["config"]) == small(row["name"]))
    except ConfigError:
        return False


def run(name: str, work: Path) -> dict[str, Any]:
    """One row of the result file."""
    config = small(name)
    start = time.perf_counter()
    for split in SPLITS:
        generate(config.data, split, work / "data")
    drawn = time.perf_counter() - start
    cpu = time.process_time()
    folder = work / "runs" / name
    resumed = (folder / "checkpoint.pt").exists()
    trained = train(config, folder, data=work / "data", say=print)
    cpu = time.process_time() - cpu
    found = evaluate(folder, data=work / "data", plots=False).result
    rows = [row for row in found["rows"] if row["weights"] == config.model.weights]
    first = rows[0]
    error, what = PAPER[name]
    return {
        "name": name,
        "model": type(trained.operator.model).__name__,
        "parameters": found["parameters"],
        "metric": config.loss.metric,
        **{key: first[key] for key in ("mean", "median", "worst")},
        "constant": first["training_mean"],
        "factor": first["training_mean"] / first["mean"],
        "wanted": WANTED[name],
        "meshes": [{key: row[key] for key in ("mesh", "mean", "median", "worst")} for row in rows],
        "paper": {"error": error, "what": what},
        "differs": {key: list(pair) for key, pair in differences(load(name).to_dict(), config.to_dict())},
        "config": config.to_dict(),
        "data_seconds": drawn,
        "seconds": trained.log[-1]["seconds"],
        "cpu_seconds": None if resumed else cpu,
        "commit": harness.describe_machine()["commit"],
    }


def differences(
    paper: Mapping[str, Any], here: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(key, (the paper's value, the one here)); None for a setting that only one of them names."""
    for key in {**paper, **here}:
        a, b = paper.get(key), here.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from differences(a, b, f"{prefix}{key}.")
        elif a != b and f"{prefix}{key}" != "name":
            yield f"{prefix}{key}", (a, b)


# Of the settings that differ, those that decide the size of a run; the others are in the result file.
SHOWN = {
    "data.train": "samples",
    "data.intervals": "intervals",
    "data.points": "points",
    "data.cells": "cells",
    "data.resolution": "grid",
    "data.sigma": "sigma",
    "data.tau": "tau",
    "data.constant_mode": "constant mode",
    "data.length_scale": "length scale",
    "data.snapshots": "snapshots",
    "model.d_model": "channels",
    "model.width": "channels",
    "training.steps": "steps",
    "training.batch_size": "batch",
}


def render(document: Mapping[str, Any]) -> str:
    """Markdown: a line per experiment, empty but for the paper's value where it was not run."""
    lines: list[Sequence[str]] = []
    rows = {row["name"]: row for row in document["rows"]}
    for name in EXPERIMENTS:
        if name not in rows:
            lines.append([name, "", "", "", "", "", _of_paper(*PAPER[name]), ""])
            continue
        row = rows[name]
        differs = [
            f"{SHOWN[k]} {_plain(v[0])} → {_plain(v[1])}" for k, v in row["differs"].items() if k in SHOWN
        ]
        norm = row["metric"].removeprefix("relative_").upper()
        lines.append(
            [
                row["name"],
                f"{row['parameters']:,}",
                f"{100 * row['mean']:.2f} % ({100 * row['median']:.2f} %) {norm}",
                f"{100 * row['constant']:.1f} %",
                f"{row['factor']:.1f}"
                + ("" if row["factor"] >= row["wanted"] else f", below {row['wanted']:g}"),
                "" if row["cpu_seconds"] is None else f"{row['cpu_seconds']:.0f}",
                _of_paper(row["paper"]["error"], row["paper"]["what"]),
                "; ".join(differs),
            ]
        )
    header = [
        "experiment, --small",
        "parameters",
        "mean (median) error",
        "constant predictor",
        "factor",
        "CPU s",
        "paper",
        "paper's settings → these",
    ]
    return report.table(header, lines)


def _of_paper(error: float | None, what: str) -> str:
    return ("" if error is None else f"{100 * error:.3g} % ") + f"({what})"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "default" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
