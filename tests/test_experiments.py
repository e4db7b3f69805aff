"""Experiments from configuration to report, at a size that takes moments."""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiment_cases import TINY, tiny
from torch import nn

import continuum_ops as co
from continuum_ops import experiments
from continuum_ops.data import darcy
from continuum_ops.experiments import EXPERIMENTS, SOURCES, evaluate, generate, load, open_run, train
from continuum_ops.experiments.operator import build
from continuum_ops.experiments.running import on_device, predict, select
from continuum_ops.experiments.store import path_of
from continuum_ops.models import preset
from continuum_ops.training import CheckpointError, save_checkpoint


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_from_data_to_table(name: str, tmp_path: Path, data: Path) -> None:
    config = tiny(name)
    run = train(config, tmp_path / "run", data=data)
    assert not run.operator.training
    assert [entry["step"] for entry in run.log] == list(range(1, 21))
    assert [entry["step"] for entry in run.log if "validation" in entry] == [10, 20]
    assert all(math.isfinite(entry["loss"]) for entry in run.log)
    assert {str(p.relative_to(run.folder)) for p in run.folder.iterdir()} == {
        "checkpoint.pt",
        "config.json",
        "log.jsonl",
    }
    assert load(run.folder / "config.json") == config
    found = evaluate(run.folder, data=data, plots=False)
    rows = found.result["rows"]
    kinds = 2 if run.operator.takes_weights and config.model.weights == "mesh" else 1
    assert len(rows) == kinds * len(config.data.cases())
    for row in rows:
        assert 0 < row["median"] <= row["worst"] and row["mean"] <= row["worst"] < 50
        assert row["mesh"] in found.text
    assert json.loads((run.folder / "evaluation.json").read_text()) == found.result
    assert (run.folder / "evaluation.txt").read_text() == found.text


def test_the_papers_settings_are_whole() -> None:
    """Every experiment builds its model's published size; the numbers are those of the preset's own test."""
    parameters = {
        "tno-lorenz63": 598_786,
        "tno-lorenz63-y": 598_017,
        "tno-cde": 598_017,
        "galerkin-burgers": 529_601,
        "fourier-burgers": 529_601,
        "galerkin-darcy": 2_217_565,
        "fourier-darcy": 2_217_565,
        "galerkin-darcy-inverse": 2_384_833,
        "fourier-darcy-inverse": 2_384_833,
        "pit-darcy": 313_613,
        "pit-inviscid-burgers": 95_503,
        "pit-shock-tube": 95_631,
        "pit-vorticity": 1_252_103,
        "pit-joukowski": 1_250_061,
        "pit-elastic-cell": 6_586_929,
        "tno-darcy64": 598_145,
        "vitno-darcy416-lognormal": 835_201,
        "fano-darcy416-lognormal": 95_868_801,
        "vitno-darcy416": 835_201,
        "fano-darcy416": 95_868_801,
        "vitno-kolmogorov": 835_201,
        "fano-kolmogorov": 95_868_801,
    }
    assert set(parameters) == set(EXPERIMENTS) == set(TINY)
    for name, count in parameters.items():
        config = load(name)
        model = preset(config.model.preset, **config.model.settings, device="meta")
        assert sum(p.numel() for p in model.parameters()) == count
        assert load(name, small=True).name == f"{name}-small"
    # GT C.1: 100 epochs of 1024 samples in batches of 8 and 4. PiT E.1: 500 epochs in batches of 8.
    assert load("galerkin-burgers").training.steps == 100 * 1024 // 8
    assert load("galerkin-darcy").training.steps == 100 * 1024 // 4
    assert load("pit-darcy").training.steps == 500 * 1024 // 8
    assert load("pit-inviscid-burgers").training.steps == 500 * 950 // 5
    assert load("pit-elastic-cell").training.steps == 500 * 1000 // 10
    # PiT table 6: eight flows of 20 steps in time each.
    vorticity = load("pit-vorticity")
    assert vorticity.training.batch_size == 8 * (vorticity.data.snapshots - vorticity.data.history)


class _Addresses(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action")]


def test_plots_and_a_page_that_needs_no_network(tmp_path: Path, data: Path) -> None:
    config = tiny("pit-darcy")
    train(config, tmp_path / "run", data=data)
    found = evaluate(tmp_path / "run", data=data, out=tmp_path / "report")
    names = [
        "evaluation.json",
        "evaluation.txt",
        "resolution.png",
        "samples.png",
        "radii.png",
        "attention.png",
        "training.png",
        "report.html",
    ]
    assert [p.name for p in found.files] == names
    assert sorted(p.name for p in (tmp_path / "report").iterdir()) == sorted(names)
    for name in names[2:-1]:
        content = (tmp_path / "report" / name).read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")
    page = (tmp_path / "report" / "report.html").read_text()
    addresses = _Addresses()
    addresses.feed(page)
    assert len(addresses.found) == 5
    assert all(address.startswith("data:image/png;base64,") for address in addresses.found)
    assert "<script" not in page and "@import" not in page and "url(" not in page
    for row in found.result["rows"]:
        assert f"<td>{row['mesh']}</td>" in page and f"{100 * row['median']:.2f} %" in page
    radii = found.result["radii"]
    assert len(radii) == 3 and all(len(heads) == 2 for heads in radii.values())
    opened = open_run(tmp_path / "run")
    rate = opened.operator.model.encoder.rate.tolist()
    np.testing.assert_allclose(radii["encoder"], [r**-0.5 for r in rate], rtol=1e-6)


def test_a_roll_out_in_the_report(tmp_path: Path, data: Path) -> None:
    """Burgers' equation on from its first prediction; the first row is the table's."""
    config = tiny("galerkin-burgers", data={"rollout": 2})
    run = train(config, tmp_path, data=data)
    found = evaluate(tmp_path, data=data)
    rows = found.result["rollout"]
    assert [row["time"] for row in rows] == [1, 2, 3]
    for key in ("median", "mean", "worst"):
        assert rows[0][key] == pytest.approx(found.result["rows"][0][key], rel=1e-5)
    drawn = generate(config.data, "test", data)
    samples = config.data.read(drawn, "test", config.data.cases()[0])
    second = predict(
        run.operator, samples._replace(input=predict(run.operator, samples, "mesh", 4)), "mesh", 4
    )
    u, v = (x.double().numpy()[..., 0] for x in (second, drawn["later"][:, 0]))
    errors = np.linalg.norm(u - v, axis=1) / np.linalg.norm(v, axis=1)
    assert rows[1]["mean"] == pytest.approx(errors.mean(), rel=1e-5)
    assert rows[1]["worst"] == pytest.approx(errors.max(), rel=1e-5)
    assert "Roll-out, from its own predictions:" in found.text
    assert "rollout.png" in [p.name for p in found.files]
    page = (tmp_path / "report.html").read_text()
    assert "<h2>roll-out, from its own predictions</h2>" in page and "<h2>error of the roll-out</h2>" in page
    assert f"{100 * rows[1]['median']:.2f} %" in page


def test_the_table_against_numpy(tmp_path: Path, data: Path) -> None:
    """Darcy on the training grid: errors and the training mean's, in float64 from the same predictions."""
    config = tiny("galerkin-darcy")
    run = train(config, tmp_path, data=data)
    row = evaluate(tmp_path, data=data, plots=False).result["rows"][0]
    drawn = generate(config.data, "test", data)
    samples = config.data.read(drawn, "test")
    prediction = predict(run.operator, samples, "mesh", 4).double().numpy()
    truth = samples.target.double().numpy()
    gaps = np.full(15, 1 / 14)
    gaps[[0, -1]] /= 2
    w = np.outer(gaps, gaps).reshape(1, -1, 1)
    norm = lambda f: np.sqrt((w * f**2).sum((1, 2)))  # noqa: E731
    error = norm(prediction - truth) / norm(truth)
    average = config.data.read(generate(config.data, "train", data), "train").target.double().numpy().mean(0)
    plain = norm(average - truth) / norm(truth)
    expected = (np.sort(error)[1], error.mean(), error.max(), plain.mean())
    got = [row[key] for key in ("median", "mean", "worst", "training_mean")]
    np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_training_finds_a_linear_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that can represent the operator learns it, whatever the parts between are."""

    class Wave(SOURCES["burgers"]):  # u -> 3 u
        def draw(self, n: int, seed: int, split: Any) -> dict[str, torch.Tensor]:
            found = super().draw(n, seed, split)
            return {"input": found["input"], "target": 3 * found["input"]}

    monkeypatch.setitem(SOURCES, "burgers", Wave)
    config = tiny("galerkin-burgers", training={"steps": 400}, optimizer={"learning_rate": 0.02})
    monkeypatch.setattr("continuum_ops.experiments.operator.preset", lambda *_, **__: _Pointwise())
    run = train(config, tmp_path)
    assert run.operator.model.scale.item() == pytest.approx(3, abs=2e-2)
    assert run.log[-1]["validation"] < 1e-2


class _Pointwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, u: torch.Tensor, mesh: co.Grid) -> torch.Tensor:
        return self.scale * u


def test_samples_are_the_generators(data: Path) -> None:
    """Cells are the odd nodes, the uneven and scattered meshes nodes of the finest grid."""
    source = tiny("pit-darcy").data
    drawn = generate(source, "test", data)
    fine = drawn["solution"].view(4, 21, 21)
    scattered = source.read(drawn, "test", source.cases()[-1])
    assert len(scattered.mesh) == 121 and scattered.mesh.weights.sum().item() == pytest.approx(1, abs=1e-5)
    at = (scattered.mesh.points * 20).round().long()
    torch.testing.assert_close(scattered.target[..., 0], fine[:, at[:, 0], at[:, 1]], rtol=0, atol=0)
    uneven = source.read(drawn, "test", source.cases()[-2])
    axis = uneven.mesh.axes[0]
    np.testing.assert_allclose(axis.diff().numpy(), [0.1] * 5 + [0.05] * 10, atol=1e-6)
    at = (axis * 20).round().long()
    torch.testing.assert_close(uneven.target[..., 0], fine[:, at][:, :, at].flatten(1), rtol=0, atol=0)

    cells = tiny("vitno-darcy416").data
    drawn = cells.draw(2, 5, "train")
    read = cells.read(drawn, "train")
    nodes = darcy(2, 17, seed=5, sigma=12.0, tau=3.0)
    centres = nodes.solution.view(2, 17, 17)[:, 1::2, 1::2]
    torch.testing.assert_close(read.target[..., 0], centres.flatten(1), rtol=0, atol=0)
    np.testing.assert_allclose(read.mesh.axes[0].numpy(), (np.arange(8) + 0.5) / 8, atol=1e-7)
    statistics = cells.statistics(drawn)
    assert statistics.mesh.shape == (9, 9) and (statistics.target.view(2, 9, 9)[:, 0] == 0).all()


def test_the_inverse_problem(data: Path) -> None:
    """u with noise of the asked strength -> a on every third node; the tests' noise is always the same."""
    config = tiny("galerkin-darcy-inverse", data={"input_noise": 0.5, "train": 400})
    samples = config.data.read(generate(config.data, "train", None), "train")
    assert samples.mesh.shape == (13, 13) and samples.target_mesh.shape == (5, 5)
    assert set(samples.target.unique().tolist()) == {3.0, 12.0}
    operator = build(config, samples, samples)
    torch.manual_seed(0)
    noise = (operator.perturb(samples).input - samples.input).squeeze(-1).double().numpy()
    deviation = samples.input.squeeze(-1).double().numpy().std(0, ddof=1)
    inside = deviation > 0
    ratio = noise.std(0, ddof=1)[inside] / deviation[inside]
    assert ratio.mean() == pytest.approx(0.5, rel=0.02) and not noise[:, ~inside].any()
    few = select(samples, torch.arange(5))
    assert torch.equal(predict(operator, few, "mesh", 2), predict(operator, few, "mesh", 2))


def test_initial_values_are_normalised_like_the_target(tmp_path: Path, data: Path) -> None:
    config = tiny("tno-lorenz63")
    samples = config.data.read(generate(config.data, "train", data), "train")
    torch.testing.assert_close(samples.initial, samples.target[:, 0], rtol=0, atol=1e-5)
    operator = build(config, samples, samples).eval()
    u, z = samples.input.numpy(), samples.target.numpy()
    shift, scale = (np.array([f((0, 1)) for f in (z.mean, lambda a: z.std(a, ddof=1))])).astype(np.float32)
    with torch.no_grad():
        inner = operator.model(
            torch.from_numpy((u - u.mean()) / u.std(ddof=1)),
            samples.mesh,
            torch.from_numpy((samples.initial.numpy() - shift) / scale),
        )
        expected = inner.numpy() * scale + shift
        np.testing.assert_allclose(operator(samples).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_chunks_do_not_depend_on_how_they_were_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def source_of(**changes: int) -> experiments.Source:
        data = {"train": 10, "intervals": 4, **changes}
        return load("tno-cde", sections={"data": data, "training": {"batch_size": 1}}).data

    source = source_of()
    monkeypatch.setattr(type(source), "chunk", 4)
    whole = generate(source, "train", None)
    assert whole["input"].shape == (10, 5, 1)
    assert len({tuple(row) for row in whole["input"][:, :, 0].tolist()}) == 10
    first = generate(source, "train", tmp_path)
    paths = [path_of(source, "train", i, tmp_path) for i in range(3)]
    assert sorted(paths[0].parent.iterdir()) == paths
    kept = paths[0].stat().st_mtime_ns
    paths[1].unlink()
    again = generate(source, "train", tmp_path)
    assert paths[0].stat().st_mtime_ns == kept
    for other in (first, again):
        assert all(torch.equal(whole[name], other[name]) for name in whole)
    # Other numbers of the other splits leave these samples; another seed does not.
    assert path_of(source_of(test=7), "train", 0, tmp_path) == paths[0]
    assert not torch.equal(generate(source_of(seed=1), "train", None)["input"], whole["input"])
    held_out = generate(source, "validation", None)["input"]
    assert not (set(held_out[:, -1, 0].tolist()) & set(whole["input"][:, -1, 0].tolist()))
    # Two processes; forked, for the time that starting afresh takes.
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)
    shared = generate(source, "train", tmp_path / "shared", workers=2)
    assert all(torch.equal(whole[name], shared[name]) for name in whole)
    paths[1].write_bytes(b"something else")
    with pytest.raises(CheckpointError, match=re.escape(f"{paths[1]} is no checkpoint of continuum_ops")):
        generate(source, "train", tmp_path)
    save_checkpoint(paths[1], {"kind": "samples", "tensors": {"input": torch.zeros(3, 5, 1)}})
    with pytest.raises(CheckpointError, match="does not hold 4 samples: delete it"):
        generate(source, "train", tmp_path)


def test_ten_lines_of_python(tmp_path: Path, data: Path) -> None:
    """Those of the package's docstring, smaller."""
    text = experiments.__doc__ or ""
    code = "\n".join(line[4:] for line in text.split("::\n", 1)[1].splitlines())
    code = code.replace("runs/", f"{tmp_path}/runs/").replace('data="data"', f'data="{data}"')
    assert "experiments.train(" in code and "experiments.evaluate(" in code
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 10
    sections = {"training": {"steps": 20, "batch_size": 4}, **TINY["pit-darcy"]}
    code = code.replace('sections={"training": {"seed": 1}}', f"sections={sections!r}")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["prediction"].shape == names["samples"].target.shape


def test_a_compiled_training(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model goes through torch.compile, and its checkpoint is that of any model."""
    compiled: list[nn.Module] = []
    # The graph is traced and run as it is; what Inductor makes of it is test_models_compile.py's matter.
    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda self: (
            compiled.append(self),
            setattr(self, "_compiled_call_impl", torch.compile(self._call_impl, backend="eager")),
        ),
    )
    # Its geometry stays outside of the graph.
    run = train(tiny("pit-darcy", training={"compile": True}), tmp_path / "run", data=data)
    plain = train(tiny("pit-darcy"), tmp_path / "plain", data=data)
    assert compiled == [run.operator.model]
    losses = [[entry["loss"] for entry in r.log] for r in (run, plain)]
    np.testing.assert_allclose(*losses, rtol=1e-3)
    states = [r.operator.state_dict() for r in (open_run(tmp_path / "run"), plain)]
    assert states[0].keys() == states[1].keys()
    torch._dynamo.reset()


class _Events:
    """What TensorBoard's writer is asked to write."""

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.scalars, self.closed = folder, purge_step, [], False
        WRITERS.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


WRITERS: list[_Events] = []


def test_a_log_for_tensorboard(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the lines of JSON; the real writer is in test_trainers.py."""
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = _Events
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    WRITERS.clear()
    run = train(tiny("tno-cde"), tmp_path, data=data, tensorboard=True)
    train(tiny("tno-cde"), tmp_path, data=data, tensorboard=True)
    first, again = WRITERS
    assert first.folder == str(tmp_path / "tensorboard") and (first.purge_step, again.purge_step) == (1, 21)
    assert first.closed and again.closed and again.scalars == []
    expected = [
        (name, entry[name], entry["step"])
        for entry in run.log
        for name in ("loss", "learning_rate", "validation")
        if name in entry
    ]
    assert first.scalars == expected and len(expected) == 2 * 20 + 2
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r'needs tensorboard: pip install "continuum_ops\[tensorboard\]"'):
        train(tiny("tno-cde"), tmp_path / "other", data=data, tensorboard=True)
    assert not (tmp_path / "other").exists()


def test_mixed_precision_and_devices(tmp_path: Path, data: Path) -> None:
    config = tiny("tno-cde", training={"autocast": "bfloat16"})
    run = train(config, tmp_path / "a", data=data)
    assert run.operator.model.projection.weight.dtype == torch.float32
    plain = train(tiny("tno-cde"), tmp_path / "b", data=data)
    losses = [[entry["loss"] for entry in r.log] for r in (run, plain)]
    # bfloat16 has 8 bits: the first loss is close, but not the same.
    assert losses[0][0] != losses[1][0] and losses[0][0] == pytest.approx(losses[1][0], rel=0.02)
    samples = config.data.read(config.data.blank(), "train")
    assert on_device(samples, "cpu") is samples
    moved = on_device(samples, "meta")
    assert moved.mesh is moved.target_mesh and moved.input.device.type == moved.mesh.device.type == "meta"
