"""Filling a table from finished runs, or from runs that are trained for it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...models import preset
from ...models.presets import preset_parts
from ...training.progress import require
from ..config import Config, ConfigError, config_from, hint, merge, read_file
from ..evaluation import Picture, evaluate, tested_as
from ..operator import METRICS
from ..running import BUSY, CHECKPOINT, CONFIG, LOG, open_run, predict, read_log
from ..running import train as train_run
from ..sources import Case
from ..store import generate
from . import TABLES
from .flops import flops
from .output import as_markdown, write
from .spec import ERRORS, WITHOUT_RUN, Content, Part, Table, config_of

# What does not change the result of a training but its speed or what is written of it.
FREE = (
    "device",
    "threads",
    "compile",
    "validate_every",
    "checkpoint_every",
    "log_every",
    "test_batch_size",
)


class Filled(NamedTuple):
    """The result as plain data (ID.json), the same as Markdown, and the files that were written."""

    result: dict[str, Any]
    text: str
    files: list[Path]


def fill(
    name: str,
    *,
    small: bool = False,
    runs: str | Path = "runs",
    out: str | Path = "tables",
    data: str | Path | None = None,
    train: bool = False,
    workers: int = 1,
    plots: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Filled:
    """Fill a table of the papers, a cell that was not run stays empty.

    A cell takes the run in a folder of ``runs`` whose settings are its own, whatever the folder's name;
    names, devices and how often something is written may differ. A run is tested where its test is missing.

    Writes NAME.md, NAME.json and, of figures, NAME.png.

    Args:
        name: one of ``TABLES``.
        small: the settings for two cores.
        runs: folder of run folders.
        out: folder of the files; made if it is not there.
        data: as in :func:`continuum_ops.experiments.train`.
        train: train what is missing; one that was interrupted goes on.
        workers: processes that draw samples.
        plots: also the figure; needs matplotlib.
        say: takes a line of text.

    Raises:
        ConfigError: an unknown name; a folder of runs that is missing, unless they are trained.
        CheckpointError: a run with a damaged checkpoint.
        ImportError: a package of ``continuum_ops[train]`` is missing.
    """
    table, folder = table_of(name), Path(runs)
    if plots and table.plot is not None:
        require("the figure", "matplotlib")
    if not folder.is_dir() and not train:
        raise ConfigError(f"{folder}: no such folder of runs")
    found = _Runs(folder, data, workers, train, say)
    cells: list[dict[str, Any]] = []
    pictures: list[Picture] = []
    for row in table.rows:
        for column in table.columns:
            part = table.cell(row, column)
            cell: dict[str, Any] = {"row": row, "column": column, "measure": part.measure}
            cell |= {"value": None, "paper": table.published(row, column), "run": None}
            cells.append(cell | _filled(part, small, found))
            if plots and cells[-1]["run"] and table.drawn(row, column):
                title = f"{row}, {column}: {cells[-1]['value']:.3g}"
                pictures.append(found.picture(Path(cells[-1]["run"]), part, small, title))
    result = {"name": name, "title": table.title, "small": small, "note": table.note, "cells": cells}
    text = as_markdown(table, result)
    return Filled(result, text, write(Path(out), name, table, result, text, pictures if plots else None))


def table_of(name: str) -> Table:
    """The table of this name, or a ConfigError with the closest one."""
    if name not in TABLES:
        raise ConfigError(f"the table must be one of {', '.join(TABLES)}, was {name!r}{hint(name, TABLES)}")
    return TABLES[name]


def needed(table: Table, small: bool) -> dict[str, list[str]]:
    """The commands that train a table's runs, each with the cells that it fills."""
    commands: dict[str, list[str]] = {}
    for row in table.rows:
        for column in table.columns:
            part = table.cell(row, column)
            if not part.why and part.measure not in WITHOUT_RUN:
                commands.setdefault(command(part, small), []).append(f"{row}, {column}")
    return commands


def listed(name: str, small: bool) -> str:
    """A line on what a table shows, one on its runs, and one for each reason why cells stay empty."""
    table = table_of(name)
    runs = needed(table, small)
    words = dict.fromkeys(line.split()[2] for line in runs)
    lines = [f"{name:<15} {table.title}"]
    lines.append(f"{'':<15} runs: {len(runs)}" + (f" of {', '.join(words)}" if runs else ""))
    reasons: dict[str, set[tuple[str, str]]] = {}
    for row in table.rows:
        for column in table.columns:
            reasons.setdefault(table.cell(row, column).why, set()).add((row, column))
    for why, cells in reasons.items():
        if why:
            lines.append(f"{'':<15} empty: {table.places(cells)} ({why})")
    return "\n".join(lines)


def command(part: Part, small: bool) -> str:
    """That trains the run of a cell."""
    changes = _flat(part.changed(small))
    sets = [f"--set {_quoted(f'{key}={json.dumps(value)}')}" for key, value in changes.items()]
    out = [f"--out runs/{run_name(part, small)}"] if changes else []
    return " ".join(["continuum-ops train", part.name, *["--small"] * small, *sets, *out])


def run_name(part: Part, small: bool) -> str:
    """The name of a run, and of its folder: the experiment and what is changed."""
    base = f"{part.name}-small" if small else part.name
    words = [f"{key.partition('.')[2]}={value}" for key, value in _flat(part.changed(small)).items()]
    return _file_name("-".join([base, *words]))


def identity(config: Config) -> str:
    """What two runs have in common that are the same."""
    content = config.to_dict()
    defaults = json.loads(json.dumps(preset_parts(config.model.preset)[1]))
    content["model"] = {**defaults, **content["model"]}
    del content["name"]
    for key in FREE:
        del content["training"][key]
    return json.dumps(content, sort_keys=True)


class _Runs:
    """The run folders of a folder, by what they are."""

    def __init__(
        self, folder: Path, data: str | Path | None, workers: int, train: bool, say: Callable[[str], None]
    ) -> None:
        self.folder, self.data, self.workers, self.train, self.say = folder, data, workers, train, say
        self.known: dict[str, Path] = {}
        self.begun: dict[str, tuple[Path, Config]] = {}
        for path, config, finished in _runs(folder):
            if finished:
                self.known[identity(config)] = path
            else:
                self.begun[identity(config)] = path, config
        self.results: dict[tuple[Path, str], dict[str, Any]] = {}

    def find(self, part: Part, small: bool) -> Path | None:
        """The folder of a cell's run; trained now, if that is asked for."""
        config = config_of(part, small)
        same = identity(config)
        if same not in self.known and self.train:
            name = run_name(part, small)
            folder, config = self.begun.get(same, (self.folder / name, replace(config, name=name)))
            self.say(f"training {folder}")
            try:
                train_run(config, folder, data=self.data, workers=self.workers, say=self.say)
                self.known[same] = folder
            except ConfigError as error:
                # Processes that fill the same table share its trainings.
                if BUSY not in str(error):
                    raise
                self.say(str(error))
        return self.known.get(same)

    def result(self, run: Path, test: Content) -> dict[str, Any]:
        """The evaluation of a run, the one in its folder if it is of this training and test."""
        key = run, json.dumps(test, sort_keys=True)
        if key not in self.results:
            words = "-".join(f"{name}={value}" for name, value in test.items())
            out = run / "tests" / _file_name(words) if test else run
            self.results[key] = _kept(run, out, test) or (
                evaluate(run, data=self.data, out=out, workers=self.workers, plots=False, test=test).result
            )
        return self.results[key]

    def picture(self, run: Path, part: Part, small: bool, title: str) -> Picture:
        """The test sample of a cell: of median error, also for the mean, or of the largest."""
        opened = open_run(run)
        config, operator = tested_as(opened, part.tested(small))
        samples = config.data.read(
            generate(config.data, "test", self.data, self.workers), "test", case_of(config, part.mesh)
        )
        weights, batch = config.model.weights, config.training.test_batch_size
        prediction = predict(operator, samples, weights, batch)
        error = METRICS[config.loss.metric](prediction, samples.target, samples.target_mesh.weights)
        at = -1 if part.measure == "worst" else (len(error) - 1) // 2
        index = int(error.argsort()[at])
        return Picture(title, samples.each(lambda x: x[index]), prediction[index])


def _filled(part: Part, small: bool, runs: _Runs) -> dict[str, Any]:
    """Value and run of a cell, or why it is empty."""
    if part.why:
        return {"why": part.why}
    try:
        if part.measure in WITHOUT_RUN:
            config = config_of(part, small)
            return {"value": parameters(config) if part.measure == "parameters" else flops(config)}
        run = runs.find(part, small)
    except ImportError as error:
        if 'pip install "continuum_ops[' not in str(error):
            raise
        return {"why": str(error)}
    if run is None:
        return {"why": "not run", "command": command(part, small)}
    return {"value": _value(part, small, run, runs), "run": str(run)}


def parameters(config: Config) -> int:
    """Of a configuration's model, complex ones counted once."""
    with torch.device("meta"):
        model = preset(config.model.preset, **config.model.settings)
    return sum(p.numel() for p in model.parameters())


def _value(part: Part, small: bool, run: Path, runs: _Runs) -> float:
    config, log = config_from(read_file(run / CONFIG)), read_log(run / LOG)
    an_epoch = config.data.train / config.training.batch_size
    if part.measure == "speed":
        return log[-1]["step"] / log[-1]["seconds"]
    if part.measure == "epoch":
        return log[-1]["seconds"] / log[-1]["step"] * an_epoch
    if part.measure == "best":
        checked = [entry for entry in log if "validation" in entry]
        return round(min(checked, key=lambda entry: entry["validation"])["step"] / an_epoch)
    result = runs.result(run, part.tested(small))
    if part.measure == "radius":
        return result["radii"][part.layer][part.head - 1]
    if part.measure == "rollout":
        means = [row["mean"] for row in result["rollout"]]
        return sum(means) / len(means)
    assert part.measure in ERRORS
    tested = config_from(result["config"])
    case = case_of(tested, part.mesh)
    name = case.name + (" (training)" if case == tested.data.cases()[0] else "")
    return next(
        row[part.measure]
        for row in result["rows"]
        if row["mesh"] == name and row["weights"] == config.model.weights
    )


def case_of(config: Config, mesh: str) -> Case:
    """The case of an evaluation that a part's `mesh` names.

    Raises:
        ConfigError: the configuration has no such case.
    """
    cases = config.data.cases()
    size = cases[0].size
    if not mesh:
        return cases[0]
    if mesh == "finest":
        return max((c for c in cases if c.kind == cases[0].kind), key=lambda c: c.size)
    factor = float(mesh[1:]) if mesh.startswith("x") else 0.0
    for case in cases:
        if case.kind == mesh:
            return case
        # Nodes with both ends have one more than gaps.
        fits = {round(factor * size), round(factor * (size - 1)) + 1}
        if factor and case.kind == cases[0].kind and case.size in fits:
            return case
    known = ", ".join(c.name for c in cases)
    raise ConfigError(f"mesh must be one of those of {config.name} ({known}), was {mesh!r}")


def _runs(folder: Path) -> Iterator[tuple[Path, Config, bool]]:
    """The runs of a folder, and whether they have ended."""
    for path in sorted(folder.glob(f"*/{CONFIG}")):
        run = path.parent
        try:
            config = config_from(read_file(path))
        except ConfigError:  # of another version
            continue
        log = read_log(run / LOG)
        ended = (run / CHECKPOINT).exists() and log and log[-1]["step"] == config.training.steps
        yield run, config, bool(ended)


def _kept(run: Path, out: Path, test: Content) -> dict[str, Any] | None:
    """The evaluation in a folder, unless it is of another training or test."""
    path = out / "evaluation.json"
    if not path.exists():
        return None
    try:
        result = read_file(path)
        wanted = config_from(merge(read_file(run / CONFIG), {"data": test}))
        same = config_from(result["config"]) == wanted
        return result if same and result["training"] == read_log(run / LOG)[-1] else None
    except (ConfigError, KeyError, TypeError):
        return None


def _flat(content: Content) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, values in content.items() for key, value in values.items()}


def _file_name(words: str) -> str:
    """Without what a shell or a file system minds; the end of a long one is its hash."""
    name = re.sub(r"[^A-Za-z0-9=._+-]+", "_", words).strip("_")
    return name if len(name) <= 120 else f"{name[:110]}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"


def _quoted(text: str) -> str:
    return f"'{text}'" if re.search(r"[^A-Za-z0-9=._+-]", text) else text
