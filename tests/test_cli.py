"""The command line: what is said, and the exit codes."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import continuum_ops as co
from continuum_ops.cli import main
from continuum_ops.data import uneven_times
from continuum_ops.demo import experiment, plots
from continuum_ops.demo.darcy import Field
from continuum_ops.demo.lorenz import Evaluation

FILES = ["demo.json", "resolution.png", "trajectories.png", "darcy.png"]  # as they are written
GRIDS = [
    {
        "resolution": n,
        "points": n * n,
        "mean": 0.1,
        "worst": 0.2,
        "seconds": 1.0,
        "peak_memory_bytes": 10**6,
    }
    for n in (3, 5)
]
ROW = {"seconds": 0.5, "peak_memory_bytes": None, "n_by_n_bytes": 10**6}


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(args)
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Takes the place of the work: the settings asked for are kept, made-up numbers are reported."""
    asked: list[Any] = []

    def measure(settings: Any) -> tuple[dict[str, Any], experiment.Pictures]:
        asked.append(settings)
        rows = [
            {**ROW, "mesh": mesh, "points": points, "weights": w, "median": 0.01, "worst": 0.1}
            for mesh, points in (("dt = 0.1", 21), ("uneven", 31))
            for w in ("trapezoid", "equal")
        ]
        result = {
            "settings": {
                "test_trajectories": 4,
                "test_batch_size": 4,
                "num_heads": 1,
                "steps": 1,
                "threads": 1,
                "learns": False,
                "darcy": {"test_samples": 2, "steps": 1},
            },
            "machine": {"backends": co.backends()},
            "training": {"parameters": 1, "seconds": 1.0},
            "meshes": rows,
            "uneven_equal_over_trapezoid": 1.0,
            "darcy": {"training": {"parameters": 1, "seconds": 1.0}, "grids": GRIDS},
            "large_grid": {**ROW, "mesh": "4 x 4", "points": 16, "error_against_float64": 1e-7},
            "seconds": 2.0,
        }
        y = torch.rand(4, 31, 1)
        uneven = plots.Uneven(uneven_times(20), y, y, Evaluation(y, torch.rand(4), 0.1, None), y)
        field = Field(*torch.rand(3, 5, 5), error=0.1)
        return result, experiment.Pictures(uneven, field, GRIDS)

    monkeypatch.setattr(experiment, "measure", measure)
    return asked


def test_demo_takes_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: list[Any]
) -> None:
    code, out, err = call(
        capsys, "demo", "--out", f"{tmp_path}/x", "--seed", "5", "--threads", "1", "--quick"
    )
    assert (code, err) == (0, "")
    assert out.count("wrote ") == 4
    assert "these figures mean nothing" in out
    assert sorted(os.listdir(tmp_path / "x")) == sorted(FILES)
    call(capsys, "demo", "--out", f"{tmp_path}/x")
    quick, full = measured
    assert (quick.seed, quick.threads, full.seed, full.threads) == (5, 1, 0, 2)
    assert (quick.grid_side, full.grid_side) == (32, 416)
    assert full.steps > 100 * quick.steps // 2


@pytest.mark.parametrize("failing", FILES)
def test_a_full_disk(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    measured: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
) -> None:
    order = FILES
    (tmp_path / failing).write_bytes(b"old")
    synced: list[int] = []

    def fsync(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == order.index(failing) + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    code, _, err = call(capsys, "demo", "--out", str(tmp_path))
    assert code == 1
    assert err == f"continuum-ops: {tmp_path / failing}: No space left on device\n"
    assert sorted(os.listdir(tmp_path)) == sorted(order[: order.index(failing) + 1])
    assert (tmp_path / failing).read_bytes() == b"old"


def test_ctrl_c_while_a_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    code, _, err = call(capsys, "demo", "--out", str(tmp_path))
    assert code == 130
    assert err.strip() == "continuum-ops: interrupted"
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.name != "posix", reason="signals as on Unix")
def test_ctrl_c_from_outside(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path[:] = {sys.path}; from continuum_ops.cli import main; main()",
            *("demo", "--threads", "1", "--out", str(tmp_path / "x")),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A parent that ignores SIGINT, as a shell's background job does, would hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    seen = b""
    while b"lorenz63" not in seen:  # the progress bar of the data: the work has begun
        byte = process.stderr.read(1)
        assert byte, seen
        seen += byte
    process.send_signal(signal.SIGINT)
    out, rest = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert rest.decode().splitlines()[-1] == "continuum-ops: interrupted"
    assert b"Traceback" not in rest
    assert out == b""
    assert os.listdir(tmp_path / "x") == []


def test_no_permission_for_the_directory(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    measured: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    code, _, err = call(capsys, "demo", "--out", str(tmp_path / "x"))
    assert (code, err) == (1, f"continuum-ops: {tmp_path / 'x'}: Permission denied\n")
    assert measured == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["demo", "--threads", "0"], "Invalid value for '--threads'"),
        (["demo", "--seed", "-1"], "Invalid value for '--seed'"),
        (["demo", "--out", __file__], "is a file"),
        (["demo", "--fast"], "No such option"),
        (["demos"], "No such command"),
    ],
)
def test_usage_errors(
    capsys: pytest.CaptureFixture[str], measured: list[Any], args: list[str], message: str
) -> None:
    code, _, err = call(capsys, *args)
    assert code == 2
    assert message in err
    assert measured == []


@pytest.mark.parametrize(
    "args",
    [
        ("demo", "--quick", "--out"),
        ("convergence", "--small", "--out"),
        ("train", "tno-cde", "--small", "--out"),
        ("train", "tno-cde", "--small", "--data"),
        ("evaluate", "run", "--out"),
        ("evaluate", "run", "--data"),
        ("generate", "tno-cde", "--small", "--data"),
        ("tables", "pit-table-1", "--out"),
        ("tables", "pit-table-1", "--data"),
        ("tables", "pit-table-1", "--train", "--runs"),
    ],
    ids=" ".join,
)
def test_a_directory_below_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"kept")
    for way in ("file/sub", "file/sub/folder"):
        code, out, err = call(capsys, *args, way)
        assert (code, out) == (2, "")
        assert f"Invalid value for '{args[-1]}': Directory '{way}' cannot be made: 'file' is no" in err
    assert os.listdir() == ["file"] and Path("file").read_bytes() == b"kept"


def test_a_directory_below_a_file_that_nobody_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of --out of a training; and a link that leads nowhere."""
    monkeypatch.chdir(tmp_path)
    Path("runs").write_bytes(b"kept")
    code, out, err = call(capsys, "train", "tno-cde", "--small")
    assert (code, out) == (2, "")
    message = "Directory 'runs/tno-cde-small' cannot be made: 'runs' is no directory."
    assert err.endswith(f"\nError: Invalid value: {message}\n")
    assert os.listdir() == ["runs"]
    Path("link").symlink_to("nowhere")
    code, _, err = call(capsys, "convergence", "--small", "--out", "link")
    assert code == 2 and "Directory 'link' cannot be made: 'link' is no directory." in err


def test_without_click(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "click", None)
    code, out, err = call(capsys, "info")
    assert (code, out, err) == (
        2,
        "",
        'continuum-ops: needs click: pip install "continuum_ops[train]"\n',
    )


@pytest.mark.parametrize("missing", ["scipy", "tqdm", "matplotlib"])
def test_without_another_extra(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    measured: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    code, _, err = call(capsys, "demo", "--out", str(tmp_path / "x"))
    assert code == 2
    assert err == f'Error: the demo needs {missing}: pip install "continuum_ops[train]"\n'
    assert not (tmp_path / "x").exists() and measured == []


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "info")
    assert (code, err) == (0, "")
    said = dict(line.split(maxsplit=1) for line in out.splitlines() if "backend" not in line)
    assert said["torch"] == torch.__version__
    assert said["continuum_ops"] == co.__version__
    assert f"cpu backend    {co.backends()['cpu']}" in out.splitlines()


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version")[:2] == (0, f"continuum-ops, version {co.__version__}\n")
    code, out, _ = call(capsys, "--help")
    assert code == 0 and "demo" in out and "info" in out


def test_importing_the_entry_point_needs_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("click", "tqdm", "scipy", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "continuum_ops.cli")
    assert importlib.import_module("continuum_ops.cli").PROGRAM == "continuum-ops"
