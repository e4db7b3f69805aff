"""The demonstration: its numbers against numpy, its files, its table."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import continuum_ops as co
from continuum_ops.data import uneven_times
from continuum_ops.demo import Settings, darcy, experiment, large_grid, lorenz, report, run
from continuum_ops.demo.machine import PeakMemory
from continuum_ops.training import write_json

QUICK = Settings.quick(seed=3, threads=1)


class Run:
    def __init__(self, out: Path) -> None:
        self.out, self.said = out, []
        self.pictures: experiment.Pictures | None = None
        self.result = run(QUICK, out, self.said.append)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        measured: list[Any] = []
        measure = experiment.measure
        patch.setattr(experiment, "measure", lambda s: measured.append(measure(s)) or measured[0])
        done = Run(tmp_path_factory.mktemp("demo") / "a" / "b")
        done.pictures = measured[0][1]
    return done


def trapezoid(times: np.ndarray) -> np.ndarray:
    gaps = np.diff(times)
    return (np.append(gaps, 0) + np.append(0, gaps)) / 2


def test_the_files(quick: Run) -> None:
    pictures = ["darcy.png", "resolution.png", "trajectories.png"]
    assert sorted(os.listdir(quick.out)) == sorted(["demo.json", *pictures])
    for name in pictures:
        content = (quick.out / name).read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert content.endswith(b"IEND\xaeB`\x82")
        width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
        assert width >= 1000 and height >= 400
    assert json.loads((quick.out / "demo.json").read_text()) == json.loads(json.dumps(quick.result))


def test_the_json_says_what_was_run_and_where(quick: Run) -> None:
    result = json.loads((quick.out / "demo.json").read_text())
    assert set(result) == {
        "settings",
        "machine",
        "training",
        "meshes",
        "uneven_equal_over_trapezoid",
        "darcy",
        "large_grid",
        "seconds",
    }
    assert result["settings"] == json.loads(json.dumps(asdict(QUICK)))
    assert result["machine"]["torch"] == torch.__version__
    assert result["machine"]["backends"] == co.backends()
    assert result["machine"]["cpu"] and result["machine"]["cores"] >= 1
    # lift 3 d; one layer 6 (d^2 + d) + 4 d; projection d + 1; with d = 16.
    assert result["training"]["parameters"] == 3 * 16 + 6 * (16**2 + 16) + 4 * 16 + 17
    assert [h["step"] for h in result["training"]["history"]] == [10, 20]
    # A steadily falling loss is not to be had in 20 steps; one above the zero function's would be a fault.
    assert 0 < result["training"]["history"][-1]["validation"] < 1


def test_every_mesh_with_and_without_weights(quick: Run) -> None:
    rows = quick.result["meshes"]
    assert [(r["mesh"], r["points"], r["weights"]) for r in rows] == [
        (name, points, weights)
        for name, points in (("dt = 0.1 (training)", 21), ("dt = 0.2", 11), ("dt = 0.05", 41), ("uneven", 31))
        for weights in ("trapezoid", "equal")
    ]
    for row in rows:
        assert 0 < row["median"] <= row["worst"] < 2
        assert row["n_by_n_bytes"] == 32 * 4 * row["points"] ** 2 * 4
    errors = {r["weights"]: r["median"] for r in rows if r["mesh"] == "uneven"}
    assert quick.result["uneven_equal_over_trapezoid"] == errors["equal"] / errors["trapezoid"]


def test_the_uneven_errors_against_numpy(quick: Run) -> None:
    shown = quick.pictures.uneven
    times = uneven_times(20).numpy()
    np.testing.assert_array_equal(shown.times.numpy(), times)
    fresh = co.data.lorenz63(32, times, seed=2 * QUICK.seed + 1)
    target = fresh.target[..., 0].double().numpy()
    w = trapezoid(times)
    for weights, prediction in (
        ("trapezoid", shown.trapezoid.prediction),
        ("equal", shown.equal_prediction),
    ):
        squares = (prediction[..., 0].double().numpy() - target) ** 2 @ w
        errors = np.sqrt(squares / (target**2 @ w))
        (row,) = (r for r in quick.result["meshes"] if r["mesh"] == "uneven" and r["weights"] == weights)
        # torch's median of an even count is the lower of the two in the middle.
        assert row["median"] == pytest.approx(np.sort(errors)[15], rel=1e-5)
        assert row["worst"] == pytest.approx(errors.max(), rel=1e-5)


def test_the_table(quick: Run) -> None:
    (table,) = (text for text in quick.said if "N x N" in text)
    lines = table.splitlines()
    (row,) = (r for r in quick.result["meshes"] if r["mesh"] == "uneven" and r["weights"] == "equal")
    (line,) = (text for text in lines if text.startswith("uneven") and " equal " in text)
    assert f"{100 * row['median']:.2f} %" in line and f"{100 * row['worst']:.2f} %" in line
    (line,) = (text for text in lines if text.startswith("32 x 32 "))
    assert "1,024" in line and line.endswith("4.2 MB")
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("A quick run:") and "mean nothing" in line for line in lines)
    assert quick.said[-1] == f"wrote {quick.out / 'darcy.png'}"


def test_darcy_on_every_grid(quick: Run) -> None:
    result, settings = quick.result["darcy"], QUICK.darcy
    assert [row["resolution"] for row in result["grids"]] == [11, 21, 41]
    assert [row["points"] for row in result["grids"]] == [121, 441, 1681]
    # lift 3 d + d; A_in, A and A_out d^2 + 2 each; a block 3 (d^2 + d); projection d^2 + 2 d + 1.
    d = settings.width
    assert result["training"]["parameters"] == 4 * d + 3 * (d**2 + 2) + 3 * (d**2 + d) + d**2 + 2 * d + 1
    assert [h["step"] for h in result["training"]["history"]] == [10, 20]
    for row in result["grids"]:
        assert 0 < row["median"] <= row["worst"] < 2 and 0 < row["mean"] <= row["worst"]
    (table,) = (text for text in quick.said if "N x N" in text)
    assert "11 x 11 (training)" in table and f"{100 * result['grids'][-1]['mean']:.2f} %" in table


def test_the_darcy_errors_against_numpy(quick: Run) -> None:
    """The shown sample is one of the test set, its error and the largest over the set are as said."""
    shown, settings = quick.pictures.field, QUICK.darcy
    fresh = co.data.darcy(settings.test_samples, 41, seed=2 * QUICK.seed + 1, constant_mode=False)
    candidates = fresh.solution.view(-1, 41, 41)
    (index,) = (i for i, u in enumerate(candidates) if torch.equal(u, shown.solution))
    assert torch.equal(fresh.coefficient[index].view(41, 41), shown.coefficient)
    w = np.outer(trapezoid(np.linspace(0, 1, 41)), trapezoid(np.linspace(0, 1, 41)))
    u, p = shown.solution.double().numpy(), shown.prediction.double().numpy()
    error = np.sqrt((w * (p - u) ** 2).sum() / (w * u**2).sum())
    assert shown.error == pytest.approx(error, rel=1e-4)
    assert quick.result["darcy"]["grids"][-1]["median"] == pytest.approx(error, rel=1e-4)
    assert (p[[0, -1]] == 0).all() and (p[:, [0, -1]] == 0).all()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (173_056**2 * 4, "120 GB"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (34_611_200, "34.6 MB"),
        (0, "0 B"),
        (None, "not known"),
    ],
)
def test_sizes(count: int | None, text: str) -> None:
    assert report._bytes(count) == text


def test_json_refuses_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "demo.json", {"median": math.nan})
    assert os.listdir(tmp_path) == []


def test_the_same_seed_trains_the_same_model() -> None:
    def weights(seed: int) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.rand(seed + 1)  # whatever was drawn before
            model = lorenz.train(replace(QUICK, seed=seed, steps=10)).model
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    first = weights(0)
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))


def test_the_same_seed_trains_the_same_pit() -> None:
    settings = replace(QUICK.darcy, steps=20)
    data = darcy.training_data(settings, 0)

    def weights(seed: int) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.rand(seed + 1)
            model = darcy.train(data, settings, seed).model
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    first = weights(0)
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))


def test_a_loss_that_is_no_number_stops_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lorenz, "relative_l2", lambda pred, *args: pred.sum((1, 2)) * math.nan)
    with pytest.raises(RuntimeError, match="the training loss is nan at step 1"):
        lorenz.train(QUICK)


def test_equal_weights_are_those_of_plain_attention() -> None:
    torch.manual_seed(0)
    mesh = lorenz.grid_of(uneven_times(20))
    network = co.models.TNO(1, 1, 1, d_model=16, num_heads=4, num_layers=1)
    model = lorenz.ScaledTNO(network, torch.tensor([2.0, 3.0]))
    u = torch.randn(4, 31, 1)
    plain = 3 * network(u / 2, mesh.points)
    torch.testing.assert_close(model(u, mesh, "equal"), plain)
    assert (model(u, mesh) - plain).abs().max() > 1e-3


def test_large_grid() -> None:
    threads = torch.get_num_threads()
    found = large_grid.measure(13, 16, 0, threads)
    assert found["points"] == 169
    assert found["n_by_n_bytes"] == 169 * 169 * 4
    assert found["inputs_and_output_bytes"] == 169 * (4 * 16 + 1) * 4
    # A few units in the last place of float32, each below 1.2e-7, and not the 0 of comparing with itself.
    assert 0 < found["error_against_float64"] < 2e-6
    with_weights = found["error_against_float64"]
    assert large_grid.measure(13, 16, 0, threads)["error_against_float64"] == with_weights


def test_a_child_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_grid, "_CHILD", "import sys; sys.exit(3)")
    with pytest.raises(RuntimeError, match="attention on 32 x 32 failed: its process ended with code 3"):
        large_grid.measure_in_child(QUICK)


def test_ctrl_c_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    popen = large_grid.subprocess.Popen

    class Interrupted(popen):
        def communicate(self, *args: Any, **kwargs: Any) -> Any:
            started.append(self.pid)
            raise KeyboardInterrupt

    monkeypatch.setattr(large_grid, "_CHILD", "import time; time.sleep(600)")
    monkeypatch.setattr(large_grid.subprocess, "Popen", Interrupted)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        large_grid.measure_in_child(QUICK)
    assert time.monotonic() - start < 300
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_peak_memory_sees_what_is_gone_again() -> None:
    # The second time the allocator could serve the block from what it kept of the first.
    for _ in range(2):
        with PeakMemory() as memory:
            parts = [torch.ones(2**20, dtype=torch.uint8) for _ in range(64)]
            del parts
        if memory.bytes is None:
            pytest.skip("the kernel does not reset the high-water mark of a process")
        assert 60 * 2**20 < memory.bytes < 80 * 2**20
