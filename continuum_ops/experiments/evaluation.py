"""A run on every mesh of its experiment: a table, plots and one page of HTML."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..training import atomic_write, write_json
from ..training.progress import progress_bar, require
from ..training.table import aligned
from .attention import LayerAttention, attention_of
from .config import Config, ConfigError, config_from, merge
from .operator import METRICS, Operator
from .running import Run, open_run, predict, roll_out, select
from .sources import Case, Frames, Samples
from .store import generate


class Evaluation(NamedTuple):
    """The result as plain data (evaluation.json), the same as text, and the files that were written."""

    result: dict[str, Any]
    text: str
    files: list[Path]


class Picture(NamedTuple):
    """One test sample for a plot; the tensors without their first axis."""

    title: str
    samples: Samples
    prediction: Tensor


def evaluate(
    run: str | Path,
    *,
    data: str | Path | None = None,
    checkpoint: str | Path | None = None,
    out: str | Path | None = None,
    workers: int = 1,
    plots: bool = True,
    point: Sequence[float] | None = None,
    test: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Test a trained run on every mesh of its experiment, without training.

    Errors are those of the loss's metric with the quadrature weights of each mesh. A model that takes weights
    and was trained with those of its mesh is also tested with equal ones. "training mean" is the error of the
    mean of the training targets, interpolated. Where the operator is a step in time, it is also applied to
    its own predictions ("roll-out").

    Writes evaluation.json, evaluation.txt and, with ``plots``, PNG files and report.html.

    Args:
        run: folder of a training.
        data: as in :func:`continuum_ops.experiments.train`.
        checkpoint: another checkpoint in place of the folder's.
        out: folder of the files; None: that of the run.
        workers: processes that draw samples.
        plots: needs matplotlib and jinja2.
        point: coordinates from which the attention is drawn; None: the middle of the domain.
        test: values of [data] that are others in the test, such as ``{"resolutions": [64]}`` or
            ``{"input_noise": 0.1}``.

    Raises:
        ConfigError: no run in this folder, a point of another dimension, an unknown key of the test.
        CheckpointError: a checkpoint of another model, or a file that is none.
        ImportError: a package of ``continuum_ops[train]`` is missing.
    """
    require("the evaluation", "tqdm", *(("matplotlib", "jinja2") if plots else ()))
    opened = open_run(run, checkpoint)
    config, operator = tested_as(opened, test)
    folder = opened.folder if out is None else Path(out)
    _check_point(config, point)
    drawn = generate(config.data, "test", data, workers)
    measured = _measure(config, operator, drawn)
    rollout = _follow(config, operator, config.data.frames(drawn))
    result = {
        "name": config.name,
        "config": config.to_dict(),
        "parameters": sum(p.numel() for p in operator.model.parameters()),
        "training": opened.log[-1] if opened.log else None,
        "rows": measured.rows,
        "rollout": rollout.rows,
        "radii": radii(operator),
    }
    text = as_text(result)
    folder.mkdir(parents=True, exist_ok=True)
    files = [write_json(folder / "evaluation.json", result)]
    with atomic_write(folder / "evaluation.txt") as file:
        file.write(text.encode())
    files.append(folder / "evaluation.txt")
    if plots:
        seen = attention_of(operator, measured.sample, point, config.model.weights)
        files += _draw(folder, opened, result, [*measured.pictures, *rollout.pictures], seen)
    return Evaluation(result, text, files)


def tested_as(run: Run, test: Mapping[str, Any] | None) -> tuple[Config, Operator]:
    """The configuration of a test with other values of [data], and the run's operator with its noise."""
    config = run.config
    if test:
        config = config_from(merge(config.to_dict(), {"data": test}))
        run.operator.noise = config.data.noise
    return config, run.operator


def radii(operator: Operator) -> dict[str, list[float]]:
    """Learned radii 1 / sqrt(rate) of each head of position attention, by layer (PiT table 5)."""
    found: dict[str, list[float]] = {}
    for name, module in operator.model.named_modules():
        if hasattr(module, "rate_parameter"):
            with torch.no_grad():
                found[name] = [1 / math.sqrt(max(rate, 1e-30)) for rate in module.rate.tolist()]
    return found


def as_text(result: dict[str, Any]) -> str:
    """The table of a result."""
    table: list[tuple[str, ...]] = [("mesh", "points", "weights", "median", "mean", "worst", "training mean")]
    for row in result["rows"]:
        errors = [f"{100 * row[key]:.2f} %" for key in ("median", "mean", "worst", "training_mean")]
        table.append((row["mesh"], f"{row['points']:,}", row["weights"], *errors))
    lines, rule = aligned(table, left=(0, 2))
    config, trained = result["config"], result["training"]
    done = (
        "no training yet" if trained is None else f"{trained['step']} of {config['training']['steps']} steps"
    )
    metric = config["loss"]["metric"].replace("_", " ").replace("l1", "L1").replace("l2", "L2")
    head = [
        f"{result['name']}: {metric} errors of {config['data']['test']} test samples.",
        f"{config['model']['preset']} with {result['parameters']:,} parameters, {done} on the first mesh.",
        "",
    ]
    tail = []
    if result["rollout"]:
        tail += ["", "Roll-out, from its own predictions:", *_rollout_table(result["rollout"])]
    if result["radii"]:
        tail += ["", "Learned radii 1 / sqrt(rate), by head:"]
        tail += [
            f"  {name}: {', '.join(f'{r:.3g}' for r in heads)}" for name, heads in result["radii"].items()
        ]
    return "\n".join([*head, lines[0], rule, *lines[1:], *tail, ""])


def _rollout_table(rows: list[dict[str, Any]]) -> list[str]:
    table: list[tuple[str, ...]] = [("time", "median", "mean", "worst")]
    for row in rows:
        table.append(
            (f"{row['time']:g}", *(f"{100 * row[key]:.2f} %" for key in ("median", "mean", "worst")))
        )
    lines, rule = aligned(table, left=())
    return [lines[0], rule, *lines[1:]]


def _check_point(config: Config, point: Sequence[float] | None) -> None:
    d = config.data.read(config.data.blank(), "train").mesh.ndim
    if point is not None and len(point) != d:
        raise ConfigError(f"point must have {d} coordinates, was {', '.join(f'{x:g}' for x in point)}")


class _Measured(NamedTuple):
    """The rows of the table, samples to be drawn, and that of median error on the mesh of the training."""

    rows: list[dict[str, Any]]
    pictures: list[Picture]
    sample: Samples


class _Rollout(NamedTuple):
    rows: list[dict[str, Any]]
    pictures: list[Picture]


def _follow(config: Config, operator: Operator, frames: Frames | None) -> _Rollout:
    if frames is None:
        return _Rollout([], [])
    predicted = roll_out(operator, frames, config.model.weights, config.training.test_batch_size)
    rows = []
    for i, time_ in enumerate(frames.times[frames.known :]):
        truth = frames.values[:, frames.known + i]
        error = METRICS[config.loss.metric](predicted[:, i], truth, frames.mesh.weights)
        rows.append({"time": time_, **_statistics(error)})
    middle = int(error.argsort()[(len(error) - 1) // 2])
    known = torch.cat([frames.values[:, i] for i in range(frames.known)], -1)
    last = Samples(known, truth, frames.mesh, frames.mesh).each(itemgetter(middle))
    title = f"roll-out to t = {frames.times[-1]:g}: test sample of median error, {100 * error[middle]:.2f} %"
    return _Rollout(rows, [Picture(title, last, predicted[middle, -1])])


def _statistics(error: Tensor) -> dict[str, float]:
    return {"median": error.median().item(), "mean": error.mean().item(), "worst": error.max().item()}


def _measure(config: Config, operator: Operator, drawn: dict[str, Tensor]) -> _Measured:
    cases, source, trained = config.data.cases(), config.data, config.model.weights
    kinds = [trained]
    if operator.takes_weights and trained == "mesh":
        kinds.append("equal")
    metric = METRICS[config.loss.metric]
    # Pictures of the finest uniform mesh and of those that are not uniform.
    finest = max(
        (case for case in cases if case.kind == "uniform"), key=lambda case: case.size, default=cases[0]
    )
    rows: list[dict[str, Any]] = []
    pictures: list[Picture] = []
    with progress_bar(len(cases) * len(kinds), f"testing {config.name}", "mesh") as bar:
        for case in cases:
            samples = source.read(drawn, "test", case)
            w = samples.target_mesh.weights
            average = operator.average.center(samples.target_mesh).expand_as(samples.target)
            plain = metric(average, samples.target, w).mean().item()
            for weights in kinds:
                start = time.perf_counter()
                prediction = predict(operator, samples, weights, config.training.test_batch_size)
                seconds = time.perf_counter() - start
                error = metric(prediction, samples.target, w)
                rows.append(
                    {
                        "mesh": case.name + (" (training)" if case == cases[0] else ""),
                        "kind": case.kind,
                        "points": len(samples.mesh),
                        "weights": weights,
                        **_statistics(error),
                        "training_mean": plain,
                        "seconds": seconds,
                    }
                )
                if weights == trained and case == cases[0]:
                    middle = error.argsort()[(len(error) - 1) // 2]
                    sample = select(samples, middle[None])
                if weights == trained and (case == finest or case.kind != "uniform"):
                    pictures += _pictures(case, samples, prediction, error)
                bar.update()
    return _Measured(rows, pictures, sample)


def _pictures(case: Case, samples: Samples, prediction: Tensor, error: Tensor) -> list[Picture]:
    order = error.argsort()
    chosen = {"median": int(order[(len(order) - 1) // 2])}
    if case.kind == "uniform":
        chosen["largest"] = int(order[-1])
    return [
        Picture(
            f"{case.name}: test sample of {name} error, {100 * error[i].item():.2f} %",
            samples.each(itemgetter(i)),
            prediction[i],
        )
        for name, i in chosen.items()
    ]


def _draw(
    folder: Path, run: Run, result: dict[str, Any], pictures: list[Picture], seen: list[LayerAttention]
) -> list[Path]:
    from . import plots, report

    files = [
        plots.write_resolution(folder / "resolution.png", result["rows"]),
        plots.write_samples(folder / "samples.png", pictures),
    ]
    if result["rollout"]:
        files.append(plots.write_rollout(folder / "rollout.png", result["rollout"]))
    if result["radii"]:
        files.append(plots.write_radii(folder / "radii.png", result["radii"]))
    if seen:
        files.append(plots.write_attention(folder / "attention.png", seen))
    if run.log:
        files.append(plots.write_training(folder / "training.png", run.log))
    return [*files, report.write(folder / "report.html", result, files)]
