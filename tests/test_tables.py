"""The papers' tables: what they name exists, and a filled cell is what its run's test gave."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiment_cases import TINY, TRAINING

from continuum_ops.cli import main
from continuum_ops.commands import _load
from continuum_ops.experiments import (
    TABLES,
    Config,
    ConfigError,
    fill_table,
    generate,
    load,
    open_run,
    running,
    train,
)
from continuum_ops.experiments.config import config_from, merge
from continuum_ops.experiments.running import NOISE_SEED
from continuum_ops.experiments.tables import Part, Plot, Table, listed, needed
from continuum_ops.experiments.tables.fill import case_of, command, identity, run_name
from continuum_ops.experiments.tables.flops import flops
from continuum_ops.experiments.tables.output import _lines, as_markdown
from continuum_ops.experiments.tables.spec import ERRORS, config_of

PLACES = [(name, row, column) for name, t in TABLES.items() for row in t.rows for column in t.columns]


def test_every_table_that_the_package_promises() -> None:
    pit = [f"pit-{x}" for x in ("table-1", "table-3", "table-4", "table-5", "table-16")]
    pit += [f"pit-figure-4{x}" for x in "abc"]
    gt = [f"gt-{x}" for x in ("table-1", "table-2a", "table-2b", "table-3", "table-8", "figure-12")]
    ca = [f"ca-table-{i}" for i in (1, 3, 4, 5)]
    ca += [f"ca-figure-{i}" for i in (7, 8, 9, 10, 11, 14, 15, 17, 19)]
    assert list(TABLES) == [*pit, *gt, *ca]


def test_every_cell_names_what_exists() -> None:
    """Experiments, keys and values of both sizes, meshes of the test, shapes of the published values."""
    for name, table in TABLES.items():
        assert len(table.paper) <= len(table.rows), name
        assert all(len(values) <= len(table.columns) for values in table.paper), name
        assert set(table.cells) <= {(r, c) for r in table.rows for c in table.columns}, name
        if table.plot and table.plot.kind == "curves":
            assert len(table.plot.x) == len(table.columns), name
    checked: dict[str, Config] = {}
    for name, row, column in PLACES:
        part = TABLES[name].cell(row, column)
        assert part.why or (part.measure and part.name), (name, row, column)
        for small in (False, True) if not part.why else ():
            key = command(part, small)
            if key not in checked:
                checked[key] = config_of(part, small)
            if part.measure in ERRORS and (part.mesh or part.tested(small)):
                tested = config_from(merge(checked[key].to_dict(), {"data": part.tested(small)}))
                assert case_of(tested, part.mesh) in tested.data.cases()
            if part.measure == "radius":
                assert part.layer and 1 <= part.head <= 2
    # Different settings never share a folder.
    names = {run_name(TABLES[n].cell(r, c), True): command(TABLES[n].cell(r, c), True) for n, r, c in PLACES}
    assert len(set(names)) == len(set(names.values()))


def test_published_values_stand_where_the_papers_have_them() -> None:
    for name, row, column, value in [
        ("pit-table-1", "PiT", "Darcy2D", 0.00485),
        ("pit-table-1", "FNO++", "ShockTube", 0.0194),
        ("pit-table-3", "tan", "NACA", 0.0048),
        ("pit-table-4", "h = 8", "Elasticity", 0.00649),
        ("pit-table-5", "Processor 3", "head 2", 0.0752),
        ("pit-table-16", "error on the finest mesh", "85", 0.0209),
        ("gt-table-1", "GT", "model, speed", 27.15),
        ("gt-table-1", "ST", "encoder, speed", 4.12),
        ("gt-table-2a", "GT Ln on K, V", "n = 8192", 1.025e-3),
        ("gt-table-2b", "FT regular Ln", "211, 61", 8.47e-3),
        ("gt-table-3", "GT Ln on K, V", "211, 71, noise 0.1", 7.903e-2),
        ("gt-table-8", "regular, eta = 0.01", "n = 512", 1.406e-3),
        ("gt-table-8", "Galerkin, eta = delta = 0.01", "n = 8192, best epoch", 100),
        ("gt-figure-12", "trained with 0.01", "tested with 0.05", 0.403),
        ("ca-table-1", "Galerkin Transformer", "error", 7.30e-2),
        ("ca-table-3", "FANO", "Kolmogorov", 6.34e-3),
        ("ca-figure-9", "plain softmax", "largest", 6.30e-2),
        ("ca-figure-15", "FANO", "twice", None),
    ]:
        assert TABLES[name].published(row, column) == value, (name, row, column)


def tiny(name: str, **more: Any) -> dict[str, Any]:
    """Changes of a small experiment that make it take moments."""
    return merge({"training": TRAINING, **TINY[name]}, more)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


TIMES = Table(
    "a table",
    rows={
        "one": Part("tno-cde", small=tiny("tno-cde")),
        "other seed": Part("tno-cde", small=tiny("tno-cde", training={"seed": 5})),
        "none": Part(why="there is no such model"),
    },
    columns={
        "mean": Part(measure="mean"),
        "uneven": Part(measure="worst", mesh="uneven"),
        "2 dt": Part(measure="median", mesh="x0.5"),
        "dt / 2": Part(measure="mean", mesh="x2"),
        "parameters": Part(measure="parameters"),
        "best": Part(measure="best"),
        "speed": Part(measure="speed"),
        "epoch": Part(measure="epoch"),
    },
    paper=[[0.25], [None, 0.5]],
    note="A note.",
)


def by_hand(config: Config, run: Path, data: Path, mesh: int) -> np.ndarray:
    """Relative L2 errors (n,) in float64, with the trapezoid rule."""
    samples = config.data.read(generate(config.data, "test", data), "test", config.data.cases()[mesh])
    with torch.no_grad():
        found = open_run(run).operator(samples).double().numpy()[..., 0]
    truth, t = samples.target.double().numpy()[..., 0], samples.mesh.axes[0].double().numpy()
    gaps = np.diff(t)
    w = np.concatenate([gaps, [0.0]]) / 2 + np.concatenate([[0.0], gaps]) / 2
    return np.sqrt((w * (found - truth) ** 2).sum(1) / (w * truth**2).sum(1))


def test_cells_are_the_tests_of_their_runs(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TABLES, "times", TIMES)
    runs, out = tmp_path / "runs", tmp_path / "out"
    with pytest.raises(ConfigError, match=f"{runs}: no such folder of runs"):
        fill_table("times", small=True, runs=runs)
    runs.mkdir()
    options = {"small": True, "runs": runs, "out": out, "data": data}
    empty = fill_table("times", **options)
    # 3 * 8 of the lift, 6 * 72 of the maps of a layer, 32 of its norms, 9 of the projection.
    assert "| one | (0.25) |  |  |  | 497 |  |  |  |" in empty.text.splitlines()
    assert (
        "| none |  |  |  |  |  |  |  |  |" in empty.text
        and "Empty, none: there is no such model." in empty.text
    )
    assert not list(runs.iterdir())

    filled = fill_table("times", train=True, **options)
    cells = {(c["row"], c["column"]): c for c in filled.result["cells"]}
    config = config_of(TIMES.cell("one", "mean"), True)
    for row in ("one", "other seed"):
        run = Path(cells[row, "mean"]["run"])
        assert run.parent == runs
        expected = {
            "mean": by_hand(config, run, data, 0).mean(),
            "uneven": by_hand(config, run, data, 3).max(),
            "2 dt": np.sort(by_hand(config, run, data, 1))[1],  # torch's median of four
            "dt / 2": by_hand(config, run, data, 2).mean(),
        }
        for column, value in expected.items():
            assert cells[row, column]["value"] == pytest.approx(value, rel=1e-4), (row, column)
        log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        checked = {e["step"]: e["validation"] for e in log if "validation" in e}
        # 9 samples in batches of 4: 2.25 steps are an epoch.
        assert cells[row, "best"]["value"] == round(min(checked, key=checked.get) / 2.25)
        assert cells[row, "speed"]["value"] == pytest.approx(20 / log[-1]["seconds"])
        assert cells[row, "epoch"]["value"] == pytest.approx(2.25 * log[-1]["seconds"] / 20)
    assert cells["one", "mean"]["value"] != cells["other seed", "mean"]["value"]
    assert json.loads((out / "times.json").read_text()) == filled.result
    assert (out / "times.md").read_text() == filled.text
    assert f"| one | {cells['one', 'mean']['value']:.3g} (0.25) |" in filled.text
    assert [path.name for path in filled.files] == ["times.md", "times.json"]

    # Found again by their settings, whatever the folder is called, not by its name; nothing is trained.
    one = runs / run_name(TIMES.cell("one", "mean"), True)
    kept = (one / "evaluation.json").stat().st_mtime_ns
    one.rename(runs / "renamed")
    again = fill_table("times", **options)
    found = {(c["row"], c["column"]): c for c in again.result["cells"]}
    assert found["one", "mean"]["run"] == str(runs / "renamed")
    assert found["one", "mean"]["value"] == cells["one", "mean"]["value"]
    assert (runs / "renamed" / "evaluation.json").stat().st_mtime_ns == kept

    # A run that has not ended, or has other settings, is none of a cell's.
    log = (runs / "renamed" / "log.jsonl").read_text().splitlines(keepends=True)
    (runs / "renamed" / "log.jsonl").write_text("".join(log[:-1]))
    content = json.loads((Path(cells["other seed", "mean"]["run"]) / "config.json").read_text())
    content["optimizer"]["learning_rate"] *= 2
    (Path(cells["other seed", "mean"]["run"]) / "config.json").write_text(json.dumps(content))
    neither = fill_table("times", **options)
    assert {c["why"] for c in neither.result["cells"] if c["column"] == "mean"} == {
        "not run",
        "there is no such model",
    }
    assert neither.text.count("    continuum-ops train tno-cde --small") == 2

    with pytest.raises(SystemExit) as ended:
        arguments = ["times", "--small", "--runs", str(runs), "--out", str(out), "--data", str(data)]
        main(["tables", *arguments])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(neither.text)


def test_an_interrupted_training_goes_on(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was started by hand, in any folder; one that another process trains is left alone."""
    table = Table("t", {"r": Part("tno-cde", small=tiny("tno-cde"))}, {"c": Part(measure="mean")})
    monkeypatch.setitem(TABLES, "t", table)
    options = {"small": True, "runs": tmp_path, "out": tmp_path / "out", "data": data}
    config, steps = config_of(table.cell("r", "c"), True), []
    add = running._Log.add

    def stop_at_11(log: Any, step: Any) -> None:
        steps.append(step.step)
        if len(steps) == 11:
            raise KeyboardInterrupt
        add(log, step)

    monkeypatch.setattr(running._Log, "add", stop_at_11)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "by hand", data=data)
    said: list[str] = []
    with running._claimed(tmp_path / "by hand", config):
        done = fill_table("t", train=True, say=said.append, **options)
    assert done.result["cells"][0]["value"] is None
    assert said == [f"training {tmp_path}/by hand", f"{tmp_path}/by hand is being trained by another process"]
    done = fill_table("t", train=True, **options)
    assert done.result["cells"][0]["run"] == str(tmp_path / "by hand")
    assert steps == [*range(1, 12), *range(11, 21)]


def test_a_stale_test_is_made_anew(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("t", {"r": Part("tno-cde", small=tiny("tno-cde"))}, {"c": Part(measure="mean")})
    monkeypatch.setitem(TABLES, "t", table)
    options = {"small": True, "runs": tmp_path, "out": tmp_path / "out", "data": data}
    value = fill_table("t", train=True, **options).result["cells"][0]["value"]
    path = tmp_path / run_name(table.cell("r", "c"), True) / "evaluation.json"
    result = json.loads(path.read_text())
    result["rows"][0]["mean"] = 7.0
    path.write_text(json.dumps(result))
    assert fill_table("t", **options).result["cells"][0]["value"] == 7.0  # this training's, so it is taken
    result["training"]["loss"] += 1.0
    path.write_text(json.dumps(result))
    assert fill_table("t", **options).result["cells"][0]["value"] == value
    path.write_text("{")
    assert fill_table("t", **options).result["cells"][0]["value"] == value


def test_other_data_in_the_test(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GT figure 12: trained with noise, tested with another; its picture."""
    name = "galerkin-darcy-inverse"
    table = Table(
        "noise",
        {"trained": Part(name, measure="mean", small=tiny(name, data={"input_noise": 0.1}))},
        {"clean": Part(test={"input_noise": 0.0}), "noisy": Part(test={"input_noise": 3.0})},
        plot=Plot("samples"),
    )
    monkeypatch.setitem(TABLES, "noise", table)
    done = fill_table("noise", small=True, runs=tmp_path, out=tmp_path / "out", data=data, train=True)
    clean, noisy = (cell["value"] for cell in done.result["cells"])
    run = open_run(Path(done.result["cells"][0]["run"]))
    samples = run.config.data.read(generate(run.config.data, "test", data), "test")
    truth, w = samples.target.double().numpy(), samples.target_mesh.weights.double().numpy()[:, None]
    deviation = run.operator.input.deviation(samples.mesh)
    generator = torch.Generator().manual_seed(NOISE_SEED)
    drawn = [torch.randn(rows, *samples.input.shape[1:], generator=generator) for rows in (3, 1)]
    for value, strength in ((clean, 0.0), (noisy, 3.0)):
        u = samples.input + strength * deviation * torch.cat(drawn)
        with torch.no_grad():
            found = run.operator(samples._replace(input=u)).double().numpy()
        error = np.sqrt((w * (found - truth) ** 2).sum((1, 2)) / (w * truth**2).sum((1, 2)))
        assert value == pytest.approx(error.mean(), rel=1e-4)
    assert clean != noisy
    assert (tmp_path / "out" / "noise.png").read_bytes().startswith(b"\x89PNG")
    # The run's own test has its own noise, and another file.
    assert not (run.folder / "evaluation.json").exists()
    assert {p.name for p in (run.folder / "tests").iterdir()} == {"input_noise=0.0", "input_noise=3.0"}


def test_commands_train_what_the_cells_ask_for() -> None:
    """Read back as the command line reads them."""
    for name in ("pit-table-4", "gt-table-2b", "ca-figure-9"):
        table = TABLES[name]
        for row in list(table.rows)[-2:]:
            for column in list(table.columns)[:4]:
                part = table.cell(row, column)
                for small in (False, True) if not part.why else ():
                    words = shlex.split(command(part, small))
                    assert words[:2] == ["continuum-ops", "train"] and ("--small" in words) == small
                    changes = tuple(words[i + 1] for i, word in enumerate(words) if word == "--set")
                    assert identity(_load(words[2], small, changes)) == identity(config_of(part, small))
    assert len(needed(TABLES["pit-table-5"], True)["continuum-ops train pit-darcy --small"]) == 12


def test_what_a_preset_sets_already_is_no_other_setting() -> None:
    plain = load("vitno-darcy416")
    same = load("vitno-darcy416", sections={"model": {"d_model": 128}, "training": {"device": "meta"}})
    assert identity(plain) == identity(same)
    for section, key, value in [
        ("model", "d_model", 64),
        ("training", "steps", 1000),
        ("training", "seed", 1),
        ("data", "test", 3),
        ("training", "autocast", "bfloat16"),
    ]:
        assert identity(plain) != identity(load("vitno-darcy416", sections={section: {key: value}}))


def test_operations_are_counted() -> None:
    """CA table 5: every product of matrices of a TNO, N points, and the two of its attention."""
    config = load("tno-darcy64", small=True, sections=tiny("tno-darcy64"))
    n, d = 64, 8
    linear = 2 * n * (3 * d + 4 * d * d + 2 * d * d + d)
    assert flops(config) == linear + 2 * n * n * 2 * d
    # ViT-NO: 4 patches; lift and projection by transforms: 2 modes an axis on patches of 4 x 4.
    config = load("vitno-darcy416", small=True, sections=tiny("vitno-darcy416"))
    encoder = 2 * n * (6 * d * d + d) + 2 * 4 * n * 2 * d

    def transform(numbers: int, side: int) -> int:
        return round(7.5 * numbers * np.log2(side))

    modes = 4 * 3  # of the half spectrum, as the layer keeps them
    lift = transform(4 * 16 * 3, 4) + transform(4 * 16 * d, 4) + 2 * 4 * modes * 3 * d
    final = transform(n, 8) + transform(n, 8)
    assert encoder + final < flops(config) <= encoder + final + lift + 2 * 4 * 3 * d * 4 + 2 * 4**2 * 4


def test_the_text_of_a_table() -> None:
    table = Table("T", {"a": Part(), "b": Part()}, {"x": Part(), "y": Part()}, note="N.")
    cells = [
        {"row": "a", "column": "x", "measure": "mean", "value": 0.012345, "paper": 0.5, "run": "r"},
        {"row": "a", "column": "y", "measure": "parameters", "value": 12345, "paper": None, "run": None},
        {"row": "b", "column": "x", "measure": "mean", "value": None, "paper": None, "run": None, "why": "w"},
        {"row": "b", "column": "y", "measure": "mean", "value": None, "paper": 2e-3, "run": None, "why": "w"},
    ]
    result = {"name": "t", "title": "T", "small": False, "note": "N.", "cells": cells}
    assert as_markdown(table, result).splitlines() == [
        "# T",
        "",
        "Ours (the paper's).",
        "",
        "|  | x | y |",
        "| --- | --- | --- |",
        "| a | 0.0123 (0.5) | 12,345 |",
        "| b |  | (0.002) |",
        "",
        "N.",
        "",
        "Empty, b: w.",
    ]


def test_lines_of_a_figure() -> None:
    def result(*values: float | None) -> dict[str, Any]:
        places = [(row, column) for row in ("m, 1", "m, 2") for column in ("x", "y")]
        pairs = zip(places, values, strict=True)
        return {"cells": [{"row": r, "column": c, "value": v} for (r, c), v in pairs]}

    parts = {"m, 1": Part(), "m, 2": Part()}, {"x": Part(), "y": Part()}
    curves = Table("", *parts, plot=Plot("curves", (1.0, 2.0)))
    assert _lines(curves, result(0.1, None, 0.3, 0.4)) == {
        "m, 1": ([1.0], [0.1]),
        "m, 2": ([1.0, 2.0], [0.3, 0.4]),
    }
    scatter = Table("", *parts, plot=Plot("scatter"))
    assert _lines(scatter, result(10, 0.2, 20, 0.1)) == {"m, y": ([10, 20], [0.2, 0.1])}
    assert _lines(scatter, result(10, None, None, 0.1)) == {}


def test_a_figure_of_curves(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(
        "curve",
        {"TNO": Part("tno-cde", measure="mean", small=tiny("tno-cde"))},
        {"dt": Part(), "2 dt": Part(mesh="x0.5")},
        plot=Plot("curves", (1.0, 2.0), "step"),
    )
    monkeypatch.setitem(TABLES, "curve", table)
    options = {"small": True, "runs": tmp_path, "out": tmp_path / "out", "data": data}
    assert [p.name for p in fill_table("curve", **options).files] == [
        "curve.md",
        "curve.json",
    ]  # nothing to draw
    files = fill_table("curve", train=True, **options).files
    assert files[-1].name == "curve.png" and files[-1].read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert len(fill_table("curve", plots=False, **options).files) == 2
    with pytest.raises(
        ImportError, match=r'the figure needs matplotlib: pip install "continuum_ops\[train\]"'
    ):
        fill_table("curve", **options)


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"table must be one of .*, was 'pit-tabel-16'; .* 'pit-table-16'\?"
    ):
        fill_table("pit-tabel-16", runs=tmp_path)
    config = load("pit-joukowski", small=True)
    with pytest.raises(
        ConfigError, match=r"mesh must be one of those of .* \(192 points, 384 points\), was 'x3'"
    ):
        case_of(config, "x3")
    with pytest.raises(SystemExit) as ended:
        main(["tables", "ca-tabel-1", "--runs", str(tmp_path)])
    assert ended.value.code == 2
    assert "did you mean 'ca-table-1'?" in capsys.readouterr().err


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tables"])
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == list(TABLES)
    lines = [line.strip() for line in listed("ca-table-1", True).splitlines()]
    assert lines[0].startswith("ca-table-1      CA table 1: ")
    assert lines[1:] == [
        "runs: 3 of tno-darcy64, fno-darcy64, fourier-tno-darcy64",
        "empty: AFNO (the AFNO of physics-nemo is no neural operator and not a part of this package)",
    ]
    assert "empty: DeepONet; shift-DeepONet; OFormer; GNOT; ONO; Geo-FNO; " in listed("pit-table-1", False)


def test_a_package_that_is_missing_empties_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "neuralop", None)
    monkeypatch.setitem(sys.modules, "neuralop.models", None)
    table = Table(
        "t", {"FNO": Part("fno-darcy64"), "TNO": Part("tno-darcy64")}, {"n": Part(measure="parameters")}
    )
    monkeypatch.setitem(TABLES, "t", table)
    cells = fill_table("t", runs=tmp_path, out=tmp_path / "out").result["cells"]
    assert cells[0]["value"] is None and 'pip install "continuum_ops[fno]"' in cells[0]["why"]
    assert cells[1]["value"] == 598_145
    assert re.search(r"Empty, FNO: .* neuraloperator package", (tmp_path / "out" / "t.md").read_text())
