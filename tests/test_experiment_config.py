"""What is said about a configuration, a run or a checkpoint that cannot be used; and the exit codes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from experiment_cases import TINY, TRAINING, tiny

from continuum_ops.cli import main
from continuum_ops.experiments import ConfigError, config_from, experiment_names, load, open_run, train
from continuum_ops.training import CheckpointError, load_checkpoint, save_checkpoint

FILE = """
experiment = "tno-cde"
small = true

[data]
train = 9
validation = 3
test = 4
intervals = 10

[model]
d_model = 8
num_heads = 2
num_layers = 1
dim_feedforward = 8

[training]
steps = 20
batch_size = 4
threads = 1
"""


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(args)
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cde.toml"
    path.write_text(FILE)
    return path


def test_a_file_through_the_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, "generate", str(file))
    assert code == 0
    assert out.splitlines()[0] == "train: input (9, 11, 1), target (9, 11, 1)"
    kept = sorted((tmp_path / "data").rglob("*.pt"))
    assert len(kept) == 3
    code, out, err = call(capsys, "train", str(file), "--set", "training.seed=3")
    assert code == 0 and "20 steps, validation error" in out
    assert "loss" in err and "validation" in err and "Traceback" not in err
    assert sorted((tmp_path / "data").rglob("*.pt")) == kept
    assert json.loads((tmp_path / "runs/tno-cde-small/config.json").read_text())["training"]["seed"] == 3
    code, out, _ = call(capsys, "train", str(file), "--set", "training.seed=3")
    assert code == 0 and out.startswith("goes on from step 20 of 20\n")
    code, out, _ = call(capsys, "evaluate", "runs/tno-cde-small", "--no-plots")
    assert code == 0
    assert "tno-cde-small: relative L2 errors of 4 test samples." in out and "uneven" in out
    assert "wrote runs/tno-cde-small/evaluation.json" in out
    code, out, _ = call(capsys, "experiments")
    assert code == 0 and sorted(line.split()[0] for line in out.splitlines()) == experiment_names()


def test_a_whole_configuration_without_an_experiment() -> None:
    config = config_from(tiny("fourier-burgers").to_dict())
    assert config == tiny("fourier-burgers")
    content = config.to_dict()
    assert content == json.loads(json.dumps(content))
    assert content["data"]["source"] == "burgers" and content["model"]["d_model"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"training": {"batchsize": 3}},
            r"unknown key 'batchsize' in \[training\]; did you mean 'batch_size'\? \(known: steps, ",
        ),
        ({"trainig": {}}, r"unknown key 'trainig' in the configuration; did you mean 'training'\?"),
        ({"data": {"interval": 3}}, r"unknown key 'interval' in \[data\]; did you mean 'intervals'\?"),
        (
            {"model": {"d_modell": 3}},
            r"unknown key 'd_modell' in \[model\]; did you mean 'd_model'\? \(known of TNO: preset, weights",
        ),
        ({"model": {"settings": {}}}, r"unknown key 'settings' in \[model\]"),
        ({"data": {"source": "lorentz63"}}, "data.source must be one of .*; did you mean 'lorenz63'"),
        (
            {"model": {"preset": "tno-cd"}},
            "model.preset must be one of .*, was 'tno-cd'; did you mean 'tno-cde'",
        ),
        (
            {"loss": {"name": "relative_l3"}},
            "loss.name must be one of .*, was 'relative_l3'; did you mean 're",
        ),
        ({"optimizer": {"learning_rate": "fast"}}, "optimizer.learning_rate must be a number, was 'fast'"),
        ({"optimizer": {"learning_rate": 0}}, r"optimizer.learning_rate must be above 0, was 0\.0"),
        ({"training": {"steps": 2.5}}, r"training.steps must be an int, was 2\.5"),
        ({"training": {"steps": True}}, "training.steps must be an int, was True"),
        ({"training": {"steps": 0}}, "training.steps must be at least 1, was 0"),
        ({"training": 3}, "training must be a table, was 3"),
        ({"data": {"source": ["lorenz63"]}}, r"data\.source must be one of .*, was \['lorenz63'\]"),
        ({"optimizer": {"weight_decay": float("inf")}}, "optimizer.weight_decay must be finite, was inf"),
        ({"model": {"dropout": float("nan")}}, "model must hold finite numbers, strings, true, false and"),
        ({"training": {"batch_size": 99}}, "data.train must be at least training.batch_size = 99, was 9"),
        (
            {"schedule": {"warm_up": 0.01}},
            r"schedule.warm_up must be 2 steps at least, was 0\.01 of training.st",
        ),
        ({"schedule": {"warm_up": 2}}, r"schedule.warm_up must be at most 1, was 2\.0"),
        ({"loss": {"gamma": 0.1}}, "loss.gamma must be 0 with loss.name = relative_l2, was 0.1"),
        ({"data": {"intervals": 5}}, "data.intervals must be even and at least 2, was 5"),
        ({"data": {"test": 0}}, "data.test must be at least 1, was 0"),
        ({"data": {"seed": -1}}, "data.seed must be at least 0, was -1"),
    ],
)
def test_wrong_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("tno-cde", small=True, sections=_over(changes, TINY["tno-cde"]))


def _over(changes: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {"training": TRAINING, **base}
    for key, value in changes.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return merged


def test_what_is_missing() -> None:
    whole = tiny("tno-cde").to_dict()
    with pytest.raises(ConfigError, match=r"the section \[model\] is missing"):
        config_from({k: v for k, v in whole.items() if k != "model"})
    with pytest.raises(ConfigError, match=r"training\.steps is missing"):
        config_from({**whole, "training": {"batch_size": 3}})
    with pytest.raises(ConfigError, match=r"model\.preset is missing"):
        config_from({**whole, "model": {}})
    with pytest.raises(ConfigError, match="small needs an experiment"):
        load(whole, small=True)
    with pytest.raises(ConfigError, match="small must be true or false, was 1"):
        load({"experiment": "tno-cde", "small": 1})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "vitno-darcy416",
            {"data": {"resolution": 9, "resolutions": []}},
            "model.num_patches and the data do not fit: the grid of the data must have a multiple of "
            r"2 points along axis 0 to make 2 equal patches, got 9 of the grid \(9, 9\)",
        ),
        (
            "vitno-darcy416",
            {"data": {"resolutions": [11]}},
            "data.resolution must be nested in the finest grid",
        ),
        ("vitno-darcy416", {"data": {"meshes": ["uneven"]}}, 'data.meshes must be empty with grid "cell"'),
        ("vitno-darcy416", {"data": {"inverse": True}}, 'data.inverse must be false with grid "cell"'),
        ("vitno-darcy416", {"model": {"modes": 9}}, r"model\.modes\[0\] must be at most 2 for patches of 4"),
        ("vitno-darcy416", {"model": {"final_spectral": 40}}, "the model and the data do not fit: "),
        ("pit-darcy", {"data": {"resolutions": []}}, 'data.meshes must be without "uneven" where'),
        ("pit-darcy", {"data": {"coarsening": 2}}, "data.inverse must be true with coarsening"),
        ("pit-darcy", {"data": {"solver": 13}}, "data.solver - 1 must be a multiple of 10, the gaps of the"),
        ("galerkin-darcy-inverse", {"data": {"coarsening": 5}}, "data.coarsening must divide 13 - 1, was 5"),
        (
            "galerkin-darcy-inverse",
            {"data": {"input_noise": -1}},
            r"data.input_noise must be at least 0, was -1",
        ),
        (
            "galerkin-darcy-inverse",
            {"model": {"coarsening": 4.0}},
            "the model and the data do not fit: target",
        ),
        (
            "galerkin-darcy-inverse",
            {"normalizers": {"input": "standard"}},
            'normalizers.input must be "pointwise" with noise of the input, was "standard"',
        ),
        (
            "tno-lorenz63",
            {"normalizers": {"target": "pointwise"}},
            'normalizers.target must not be "pointwise" with initial values',
        ),
        (
            "galerkin-burgers",
            {"data": {"solver": 100}},
            "data.solver must be a multiple of 32 points, was 100",
        ),
        (
            "galerkin-burgers",
            {"loss": {"flux": True}},
            "loss.flux must be false for data without a coefficient",
        ),
        ("tno-cde", {"model": {"d_model": 9}}, "model.d_model must be divisible by num_heads, was 9"),
        (
            "tno-cde",
            {"training": {"device": "nowhere"}},
            "training.device must be a device of this machine, was",
        ),
    ],
)
def test_settings_that_do_not_fit_are_found_before_the_work(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "continuum_ops.experiments.running.generate", lambda *_: pytest.fail("samples were drawn")
    )
    with pytest.raises(ConfigError, match=message):
        train(tiny(name, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was 'pit-darcyy'; did you mean 'pit-darcy'"):
        load("pit-darcyy")
    with pytest.raises(
        ConfigError, match=r"experiment must be a TOML file or one of .*, was 'fnao-darcy416'"
    ):
        load({"experiment": "fnao-darcy416"})
    with pytest.raises(ConfigError, match=r"experiment must be a name, was \['pit-darcy'\]"):
        load({"experiment": ["pit-darcy"]})
    with pytest.raises(ConfigError, match=r"cannot be read: .*directory"):
        load(tmp_path)
    missing = tmp_path / "no.toml"
    with pytest.raises(ConfigError, match=re.escape(f"{missing}: no such file")):
        load(missing)
    broken = tmp_path / "broken.toml"
    broken.write_text("[training]\nsteps = = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml cannot be read: .*line 2"):
        load(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"broken\.toml cannot be read"):
        load(broken)
    listed = tmp_path / "list.json"
    listed.write_text("[1]")
    with pytest.raises(ConfigError, match=r"list\.json must hold a table, was a list"):
        load(listed)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "pit-darcyy"], "did you mean 'pit-darcy'?"),
        (["train", "no.toml"], "no.toml: no such file"),
        (["train", "tno-cde", "--set", "training.batchsize=3"], "did you mean 'batch_size'?"),
        (["train", "tno-cde", "--set", "steps=3"], "--set must be SECTION.KEY=VALUE, was 'steps=3'"),
        (["train", "tno-cde", "--set", "training.device=nowhere"], "training.device must be a device"),
        (["train", "vitno-darcy416", "--small", "--set=data.resolution=57", "--set=data.resolutions=[]"],
         "multiple of 4 points along axis 0 to make 4 equal patches, got 57"),
        (["generate", "lorenz63"], "did you mean 'tno-lorenz63'?"),
        (["evaluate", "nothing-here"], "nothing-here holds no run: nothing-here/config.json is missing"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *args)
    assert code == 2 and out == ""
    assert err.startswith("Error: ") and err.count("\n") == 1 and message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["tqdm", "matplotlib", "jinja2"])
def test_without_an_extra(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    code, _, err = call(capsys, "evaluate", str(tmp_path))
    assert code == 2
    assert err == f'Error: the evaluation needs {missing}: pip install "continuum_ops[train]"\n'


def test_checkpoints_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    train(tiny("tno-cde"), run)
    train(tiny("tno-cde", model={"d_model": 12}), other)
    theirs = other / "checkpoint.pt"
    with pytest.raises(CheckpointError, match=r"another model \(model\.d_model: 12 there, 8 here\)"):
        open_run(run, theirs)
    capsys.readouterr()
    code, _, err = call(capsys, "evaluate", str(run), "--checkpoint", str(theirs))
    assert code == 2 and "is a checkpoint of another model" in err and err.count("\n") == 1
    with pytest.raises(
        ConfigError, match=r"another configuration \(training.steps: 20 there, 30 here\): choose"
    ):
        train(tiny("tno-cde", training={"steps": 30}), run)

    content = load_checkpoint(run / "checkpoint.pt")
    forged = tmp_path / "forged.pt"
    for change, message in (
        (lambda m: m.pop("model.lift.weight"), "it has no model.lift.weight"),
        (
            lambda m: m.update({"model.lift.weight": torch.zeros(3, 2)}),
            r"model.lift.weight must have shape \(8, 2\), was \(3, 2\)",
        ),
        (lambda m: m.update({"model.more": torch.zeros(1)}), "it has model.more, which this one lacks"),
    ):
        model = dict(content["model"])
        change(model)
        save_checkpoint(forged, {**content, "model": model})
        with pytest.raises(CheckpointError, match=message):
            open_run(run, forged)
    save_checkpoint(forged, {"kind": "samples"})
    with pytest.raises(CheckpointError, match="must be a checkpoint of a training, was one of samples"):
        open_run(run, forged)
    (run / "checkpoint.pt").unlink()
    with pytest.raises(ConfigError, match=r"checkpoint\.pt: no such file; the training has not reached"):
        open_run(run)
    (run / "config.json").unlink()
    (run / "checkpoint.pt").write_bytes(theirs.read_bytes())
    with pytest.raises(ConfigError, match=r"holds a checkpoint without config\.json"):
        train(tiny("tno-cde"), run)
    # A run's folder whose checkpoint was replaced by another run's.
    (run / "config.json").write_text(json.dumps(tiny("tno-cde").to_dict()))
    with pytest.raises(CheckpointError, match=r"another model \(model\.d_model: 12 there, 8 here\)"):
        train(tiny("tno-cde"), run)


def test_a_run_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 and one line each, without a traceback."""
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "train", str(file))[0] == 0
    run = Path("runs/tno-cde-small")

    def refused(*args: str) -> str:
        code, _, err = call(capsys, *args)
        line = err.splitlines()[-1]
        assert code == 2 and line.startswith("Error: ") and "Traceback" not in err, err
        return line

    assert refused("evaluate", str(run), "--checkpoint", "other.pt") == "Error: other.pt: no such file"
    for point, message in (
        ("0.1,0.2", "point must have 1 coordinates, was 0.1, 0.2"),
        ("middle", "--point must be numbers with commas between them, was 'middle'"),
        ("nan", "--point must be numbers with commas between them, was 'nan'"),
    ):
        assert message in refused("evaluate", str(run), "--point", point)
    assert "is a file" in refused("train", str(file), "--out", str(file))
    assert "is a file" in refused("generate", str(file), "--data", str(file))
    (samples,) = Path("data").rglob("validation*.pt")
    for path, command in (
        (samples, ("generate", str(file))),
        (run / "checkpoint.pt", ("evaluate", str(run))),
        (run / "checkpoint.pt", ("train", str(file))),
        (run / "config.json", ("evaluate", str(run))),
        (run / "config.json", ("train", str(file))),
    ):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        assert f"{path} " in refused(*command)
        path.write_bytes(content)
    config = json.loads((run / "config.json").read_text())
    config["training"]["bach_size"] = 3
    (run / "config.json").write_text(json.dumps(config))
    for command in (("evaluate", str(run)), ("train", str(file))):
        assert "'bach_size' in [training]; did you mean 'batch_size'?" in refused(*command)


def test_a_training_that_diverges(capsys: pytest.CaptureFixture[str], tmp_path: Path, file: Path) -> None:
    args = ["train", str(file), "--out", str(tmp_path / "x"), "--data", str(tmp_path / "data")]
    wild = ["optimizer.learning_rate=1e30", "optimizer.clip=0", "schedule.name=constant"]
    code, _, err = call(capsys, *args, *(a for change in wild for a in ("--set", change)))
    assert code == 1 and re.search(r"Error: the training loss is (nan|inf) at step \d+\n$", err)
