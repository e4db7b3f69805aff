"""Files cut short, foreign, pickled, too large, or wrong: one line, exit code 2, nothing run or touched."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiment_cases import tiny

from continuum_ops.cli import main
from continuum_ops.data import lorenz63, read_arrays
from continuum_ops.experiments import ConfigError, load, open_run, train
from continuum_ops.training import CheckpointError, load_checkpoint, save_checkpoint

h5py = pytest.importorskip("h5py", reason="the extra files")
scipy_io = pytest.importorskip("scipy.io", reason="the extra files")
posix = pytest.mark.skipif(os.name != "posix", reason="named pipes are Unix's")

CONFIG = tiny("tno-cde", training={"steps": 10, "validate_every": 5, "checkpoint_every": 10})


class Trap:
    """Unpickled, it would make a directory in the working directory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("trap-was-sprung",)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and its data."""
    folder = tmp_path_factory.mktemp("trained")
    train(CONFIG, folder / "run", data=folder / "data")
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that, as the working directory."""
    shutil.copytree(trained, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line with which a command ends with exit code 2, leaving every file as it is."""
    before = files(folder)
    with pytest.raises(SystemExit) as ended:
        main(args)
    out, err = capsys.readouterr()
    assert ended.value.code == 2, err
    assert err.startswith("Error: ") and err.count("\n") == 1 and "Traceback" not in err + out, err
    assert files(folder) == before
    assert not (folder / "trap-was-sprung").exists()
    return err


# ---- configurations ----------------------------------------------------------------------------------
WHOLE = json.dumps(CONFIG.to_dict())


def changed(section: str, key: str, text: str) -> str:
    """WHOLE with a value as it stands in a file, which Python's json would perhaps not write."""
    content = CONFIG.to_dict()
    content[section][key] = "HERE"
    return json.dumps(content).replace('"HERE"', text)


CONFIGS = {
    "cut.json": (WHOLE[: len(WHOLE) // 2], "cut.json cannot be read"),
    "cut.toml": ("[data]\nsource = ", "cut.toml cannot be read"),
    "bytes.toml": (b"\xff\xfe\x00\x01", "bytes.toml cannot be read"),
    "zeros.json": (b"\0" * 100, "zeros.json cannot be read"),
    "pickle.toml": (pickle.dumps(Trap()), "pickle.toml cannot be read"),
    "deep.toml": ("a = " + "[" * 100_000, "nested too deeply"),
    "deep.json": ("[" * 100_000, "nested too deeply"),
    "large.toml": ("#" * 2_000_000, "at most 1,048,576 bytes"),
    "digits.json": (changed("training", "seed", "1" * 5000), "digits.json cannot be read"),
    "int.json": (
        changed("training", "seed", "1" + "0" * 30),
        r"training.seed must be between -2^53 and 2^53",
    ),
    "float.json": (changed("optimizer", "learning_rate", "1" + "0" * 400), "optimizer.learning_rate must be"),
    "nan.json": (
        changed("optimizer", "learning_rate", "NaN"),
        "optimizer.learning_rate must be finite, was nan",
    ),
    "infinity.json": (changed("loss", "gamma", "1e999"), "loss.gamma must be finite, was inf"),
    "model.json": (changed("model", "dim_feedforward", "NaN"), "model must hold finite numbers"),
    "list.json": ("[1, 2]", "must hold a table, was a list"),
    "string.json": (changed("training", "steps", '"4"'), "training.steps must be an int, was '4'"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, message = CONFIGS[name]
    (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for command in ("train", "generate"):
        assert message in refused(here, capsys, command, name)


@posix
def test_a_pipe_or_a_directory_is_not_waited_for(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(here / "pipe.toml")
    (here / "folder.toml").mkdir()
    assert "pipe.toml cannot be read: it is no regular file" in refused(here, capsys, "train", "pipe.toml")
    assert "folder.toml cannot be read" in refused(here, capsys, "train", "folder.toml")
    for special in ("pipe.toml", "folder.toml"):
        said = refused(here, capsys, "evaluate", "run", "--checkpoint", special, "--no-plots")
        assert f"{special} is no checkpoint of continuum_ops: it is no regular file" in said
        with pytest.raises(ValueError, match="it is no regular file"):
            read_arrays(here / special)


def test_a_run_with_another_files_configuration(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, message in (("{", "cannot be read"), ("{}", "the section [data] is missing")):
        (here / "run" / "config.json").write_text(content)
        assert message in refused(here, capsys, "evaluate", "run", "--no-plots")


# ---- checkpoints -------------------------------------------------------------------------------------
def with_parts(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        content = load_checkpoint(path)
        change(content)
        save_checkpoint(path, content)

    return write


def cut(share: float) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)]) and None


def first_weight(content: dict[str, Any]) -> str:
    return next(name for name, t in content["model"].items() if t.is_floating_point())


def set_weight(function: Callable[[torch.Tensor], Any]) -> Callable[[Path], None]:
    def change(content: dict[str, Any]) -> None:
        name = first_weight(content)
        content["model"][name] = function(content["model"][name])

    return with_parts(change)


def nan_in(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.view(-1)[-1] = torch.nan
    return t


def foreign_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "<w/>")


def huge_storage(path: Path) -> None:
    """Its pickle asks for 2^40 numbers, of which the archive holds 7."""
    torch.save({"format": "continuum_ops checkpoint 1", "w": torch.zeros(7)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in parts if name.endswith("data.pkl"))
    assert parts[name].count(b"K\x07") == 2
    parts[name] = parts[name].replace(b"K\x07", b"\x8a\x06" + (2**40).to_bytes(6, "little"))
    with zipfile.ZipFile(path, "w") as archive:
        for key, value in parts.items():
            archive.writestr(key, value)


NO_CHECKPOINT = "is no checkpoint of continuum_ops"
CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), NO_CHECKPOINT),
    "text": (lambda path: path.write_text("hello"), NO_CHECKPOINT),
    "cut early": (cut(0.1), NO_CHECKPOINT),
    "cut late": (cut(0.99), NO_CHECKPOINT),
    "another archive": (foreign_zip, NO_CHECKPOINT),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps(Trap())), NO_CHECKPOINT),
    "code": (
        lambda path: torch.save({"format": "continuum_ops checkpoint 1", "x": Trap()}, path),
        NO_CHECKPOINT,
    ),
    "a module": (lambda path: torch.save(torch.nn.Linear(2, 2), path), NO_CHECKPOINT),
    "a tensor": (lambda path: torch.save(torch.ones(3), path), NO_CHECKPOINT),
    "too large": (huge_storage, NO_CHECKPOINT),
    "without a model": (with_parts(lambda c: c.pop("model")), "must hold 'model', a dict, was NoneType"),
    "a list for a model": (with_parts(lambda c: c.update(model=[1])), "must hold 'model', a dict, was list"),
    "no configuration": (with_parts(lambda c: c.update(config={})), "must hold 'model' of its configuration"),
    "NaN": (set_weight(nan_in), "holds NaN"),
    "integers": (set_weight(lambda t: t.long()), "must hold torch.float32, was torch.int64"),
    "a number": (set_weight(lambda t: 3), "must hold torch.float32, was int"),
    "another shape": (set_weight(lambda t: t[None]), "must have shape"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, message = CHECKPOINTS[name]
    write(here / "run" / "checkpoint.pt")
    assert message in refused(here, capsys, "evaluate", "run", "--data", "data", "--no-plots")
    assert message in refused(here, capsys, "train", "run/config.json", "--out", "run", "--data", "data")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"random": None}, "by no processes, not 1"),
        ({"random": [torch.zeros(3)]}, "does not fit this training"),
        ({"optimizer": {"state": {}, "param_groups": []}}, "does not fit this training"),
        ({"step": "many"}, "does not fit this training"),
    ],
)
def test_checkpoints_to_go_on_from(
    change: dict[str, Any], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_parts(lambda content: content["training"].update(change))(here / "run" / "checkpoint.pt")
    assert message in refused(here, capsys, "train", "run/config.json", "--out", "run", "--data", "data")


def test_a_changed_byte_of_a_checkpoint(here: Path) -> None:
    path = here / "run" / "checkpoint.pt"
    whole, first = path.read_bytes(), load_checkpoint(path)["model"]
    draw = random.Random(0)
    for _ in range(40):
        place = draw.randrange(len(whole))
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << draw.randrange(8))]) + whole[place + 1 :]
        )
        try:
            content = load_checkpoint(path)
        except CheckpointError:
            continue
        # What lies between the parts of the archive belongs to nothing.
        assert all(torch.equal(content["model"][name], first[name]) for name in first)


# ---- samples and logs --------------------------------------------------------------------------------
def set_samples(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def change(content: dict[str, Any]) -> None:
        content["tensors"]["input"] = function(content["tensors"]["input"])

    return with_parts(change)


NO_SAMPLES = "does not hold 9 samples: delete it, and it is drawn again"
SAMPLES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (cut(0.5), NO_CHECKPOINT),
    "code": (CHECKPOINTS["code"][0], NO_CHECKPOINT),
    "NaN": (set_samples(nan_in), NO_SAMPLES),
    "fewer": (set_samples(lambda t: t[:4]), NO_SAMPLES),
    "other times": (set_samples(lambda t: t[:, :-1]), NO_SAMPLES),
    "integers": (set_samples(lambda t: t.long()), NO_SAMPLES),
    "another name": (with_parts(lambda c: c["tensors"].update(u=c["tensors"].pop("input"))), NO_SAMPLES),
    "a list": (with_parts(lambda c: c.update(tensors=[1])), NO_SAMPLES),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, message = SAMPLES[name]
    (path,) = (here / "data").glob("*/train-00000.pt")
    write(path)
    for args in (("generate", "run/config.json"), ("train", "run/config.json", "--out", "run")):
        assert message in refused(here, capsys, *args, "--data", "data")


@pytest.mark.parametrize(
    "tail", [b"\xff\xfe", b"3\n", b"{}\n", b'{"step": "x", "seconds": 1}\n', b"[" * 100_000]
)
def test_a_log_ends_where_it_is_none(tail: bytes, here: Path) -> None:
    whole = open_run("run").log
    assert len(whole) == 10
    with (here / "run" / "log.jsonl").open("ab") as file:
        file.write(tail)
    assert open_run("run").log == whole


def test_times_in_another_unit() -> None:
    """Milliseconds where seconds are asked for; and times that carry their unit."""
    with pytest.raises(
        ValueError, match=r"times must lie in \[0, T\] = \[0, 2.0\], got values from 0.0 to 2000.0"
    ):
        lorenz63(1, torch.linspace(0, 2000, 5), seed=0)
    with pytest.raises(TypeError, match="times must hold real numbers"):
        lorenz63(1, np.arange(3).astype("timedelta64[ms]"), seed=0)
    with pytest.raises(ConfigError, match=r"data\.intervals must be an int, was '2 s'"):
        load("tno-cde", sections={"data": {"intervals": "2 s"}})


# ---- data files --------------------------------------------------------------------------------------
A = np.arange(24.0).reshape(2, 3, 4)


def test_other_byte_orders(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", A.astype(">f8"))
    np.savez(tmp_path / "a.npz", a=A.astype(">i4"))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", data=A, dtype=">f4")
    torch.save({"a": torch.from_numpy(A.byteswap())}, tmp_path / "little.pt")
    with zipfile.ZipFile(tmp_path / "little.pt") as little, zipfile.ZipFile(tmp_path / "a.pt", "w") as big:
        for name in little.namelist():
            content = little.read(name)
            big.writestr(name, b"big" if name.endswith("byteorder") else content)
    for name in ("a.npy", "a.npz", "a.h5", "a.pt"):
        found = read_arrays(tmp_path / name)["a"]
        assert torch.equal(found.double(), torch.from_numpy(A)), name


def test_times_with_a_unit_are_no_numbers(tmp_path: Path) -> None:
    times = np.arange(3).astype("timedelta64[ms]")
    np.save(tmp_path / "t.npy", times)
    with pytest.raises(ValueError, match=r"t\.npy must hold an array of numbers, it holds timedelta64\[ms\]"):
        read_arrays(tmp_path / "t.npy")
    np.savez(tmp_path / "t.npz", t=times, a=A)
    assert list(read_arrays(tmp_path / "t.npz")) == ["a"]
    with pytest.raises(ValueError, match=r"'t' of .* must be an array of numbers, it is something else"):
        read_arrays(tmp_path / "t.npz", ["t"])


def test_a_header_that_asks_for_more_than_there_is(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    whole = (tmp_path / "a.npy").read_bytes()
    for n in (4, 10**15):
        shape = f"({n},), }}"
        head = whole[:128].replace(b"(3,), }" + b" " * (len(shape) - 7), shape.encode())
        assert len(head) == 128 and shape.encode() in head
        (tmp_path / "a.npy").write_bytes(head + whole[128:])
        with pytest.raises(ValueError, match=r"a\.npy is damaged"):
            read_arrays(tmp_path / "a.npy")
    huge_storage(tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt is damaged"):
        read_arrays(tmp_path / "a.pt")


def test_data_in_another_file_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"12345678")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", (1,), "f8", external=[(str(tmp_path / "secret"), 0, 8)])
    with h5py.File(tmp_path / "b.h5", "w") as file:
        layout = h5py.VirtualLayout((1,), "f8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "c.h5"), "a", (1,))
        file.create_virtual_dataset("a", layout)
    for name in ("a.h5", "b.h5"):
        with pytest.raises(ValueError, match=f"'a' of .*{name} names data in another file"):
            read_arrays(tmp_path / name)
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["a"] = A
        file["link"] = h5py.ExternalLink("a.h5", "a")
        file["loop"] = h5py.SoftLink("/")
    assert list(read_arrays(tmp_path / "d.h5")) == ["a"]


def test_a_list_that_holds_itself(tmp_path: Path) -> None:
    endless: list[Any] = [torch.ones(1)]
    endless.append(endless)
    torch.save(endless, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt is damaged"):
        read_arrays(tmp_path / "a.pt")


@pytest.mark.parametrize("compressed", [False, True])
def test_types_that_matlab_does_not_have(compressed: bool, tmp_path: Path) -> None:
    """scipy takes the type of an element as an index, and the process ends: found by changing bytes."""
    path = tmp_path / "a.mat"
    scipy_io.savemat(path, {"a": A, "s": "text"})
    whole = path.read_bytes()
    for place, value in ((184, 71), (185, 96), (145, 110), (412, 3), (432, 130), (433, 25)):
        content = bytearray(whole)
        assert content[place] != value
        content[place] = value
        if compressed:  # each of the two variables
            content = content[:128] + b"".join(
                deflated(bytes(content[i:j])) for i, j in ((128, 384), (384, 440))
            )
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.mat is damaged: ValueError"):
            read_arrays(path)


def deflated(element: bytes) -> bytes:
    data = zlib.compress(element)
    return (15).to_bytes(4, "little") + len(data).to_bytes(4, "little") + data


@pytest.mark.parametrize("suffix", ["npy", "npz", "mat", "h5", "pt"])
def test_changed_bytes(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays, or a ValueError that names the file: nothing else leaves the reader, whatever a byte is."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"a.{suffix}"
    if suffix == "npy":
        np.save(path, A)
    elif suffix == "npz":
        np.savez_compressed(path, a=A, b=A[0])
    elif suffix == "mat":
        scipy_io.savemat(path, {"a": A, "s": "text"})
    elif suffix == "h5":
        with h5py.File(path, "w") as file:
            file.create_dataset("g/a", data=A, compression="gzip")
    else:
        torch.save({"a": torch.from_numpy(A), "b": [torch.ones(3)]}, path)
    whole, draw, refusals = path.read_bytes(), random.Random(suffix), 0
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(draw.choice((1, 1, 8))):
            content[draw.randrange(min(len(content), 600) if draw.random() < 0.5 else len(content))] = (
                draw.randrange(256)
            )
        path.write_bytes(content)
        try:
            found = read_arrays(path)
        except ValueError as error:
            assert str(path) in str(error)
            refusals += 1
        else:
            assert all(isinstance(t, torch.Tensor) for t in found.values())
    assert refusals >= 10
    assert os.listdir(tmp_path) == [path.name]
