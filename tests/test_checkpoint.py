"""Checkpoints are whole, and nothing in them is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from continuum_ops.training import CheckpointError, load_checkpoint, save_checkpoint
from continuum_ops.training.files import atomic_write, remove_leftovers


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm-was-done",)


def test_tensors_and_plain_data_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save_checkpoint(path, {"w": torch.arange(3.0), "n": 3, "list": [1.5, None, "x"], "dict": {"a": (1, 2)}})
    back = load_checkpoint(path)
    assert torch.equal(back["w"], torch.arange(3.0))
    assert (back["n"], back["list"], back["dict"]) == (3, [1.5, None, "x"], {"a": (1, 2)})


def test_code_in_a_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"format": "continuum_ops checkpoint 1", "w": Harmful()}, "a.pt")
    Path("b.pt").write_bytes(pickle.dumps(Harmful()))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(
            CheckpointError, match=f"{name} is no checkpoint of continuum_ops: it is damaged or"
        ):
            load_checkpoint(name)
    assert not Path("harm-was-done").exists()


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save_checkpoint(path, {"w": torch.randn(1000)})
    whole = path.read_bytes()
    for content in (b"", b"text", whole[:100], whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is no checkpoint of continuum_ops"):
            load_checkpoint(path)
    for content in ({"w": torch.ones(1)}, torch.ones(3)):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match="is no checkpoint of continuum_ops"):
            load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none.pt")


def test_leftovers_of_a_killed_write_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "a[1].pt"
    with atomic_write(path) as file:
        file.write(b"whole")
        left = [p for p in tmp_path.iterdir() if p != path]
        copies = [p.rename(p) for p in left]
        (tmp_path / ".a[1].pt.killed.tmp").write_bytes(b"half")
        (tmp_path / ".a[1].pt.notes").write_bytes(b"mine")
    assert len(copies) == 1
    remove_leftovers(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a[1].pt.notes", "a[1].pt"]
