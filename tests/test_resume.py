"""A training that is killed and started again ends with the bits of one that was not."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from experiment_cases import tiny
from tqdm import tqdm

from continuum_ops.experiments import ConfigError, train
from continuum_ops.training import load_checkpoint

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL and the forkserver are Unix's")
# `make kill-test` asks for 20 kills.
KILLS = int(os.environ.get("CONTINUUM_OPS_KILLS", "5"))
# Dropout and noise draw random numbers at every step; a checkpoint every second step, validation every tenth.
NAME, STEPS = "galerkin-darcy-inverse", 60 if KILLS <= 5 else 12 * KILLS


def config() -> Any:
    return tiny(NAME, training={"steps": STEPS})


def work(folder: str, data: str, kill_at: tuple[str, int] | None) -> None:
    """Train; with kill_at, die by SIGKILL at the n-th call of a function of os."""
    if kill_at is not None:
        name, left = kill_at
        original = getattr(os, name)

        def killer(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(os, name, killer)
    tqdm.set_lock(threading.RLock())  # its own is shared between processes, and a killed one leaves it behind
    train(config(), folder, data=data)


@pytest.fixture(scope="module")
def server() -> Any:
    """Processes start from one that has imported everything, and has no threads yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["continuum_ops.experiments", "experiment_cases", "tqdm", "scipy.sparse.linalg"]
    )
    return context


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, server: Any) -> tuple[Path, Path]:
    folder, data = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("data")
    process = server.Process(target=work, args=(str(folder), str(data), None))
    process.start()
    process.join()
    assert process.exitcode == 0
    return folder, data


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def check_the_same(folder: Path, undisturbed: Path) -> None:
    found, expected = (load_checkpoint(f / "checkpoint.pt") for f in (folder, undisturbed))
    assert found["training"]["step"] == STEPS
    assert same(found, expected)
    lines = [[line.rsplit(', "seconds"')[0] for line in (f / "log.jsonl").read_text().splitlines()]
             for f in (folder, undisturbed)]  # fmt: skip
    assert len(lines[0]) == STEPS and lines[0] == lines[1]
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint.pt", "config.json", "log.jsonl"]


def test_killed_at_random_moments(undisturbed: tuple[Path, Path], tmp_path: Path, server: Any) -> None:
    expected, data = undisturbed
    log, generator = tmp_path / "log.jsonl", random.Random()
    moments, killed = sorted(generator.sample(range(STEPS * 2 // 3), KILLS)), 0
    print("killed after steps", moments)
    for moment in moments:
        process = server.Process(target=work, args=(str(tmp_path), str(data), None))
        process.start()
        while process.is_alive() and not (log.exists() and log.read_bytes().count(b"\n") >= moment):
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.01))
        process.kill()
        process.join()
        # On a busy machine it may have ended before.
        assert process.exitcode in (-signal.SIGKILL, 0)
        killed += process.exitcode != 0
    print(killed, "of", KILLS, "were killed")
    assert killed > (0 if KILLS <= 5 else KILLS - 1)
    process = server.Process(target=work, args=(str(tmp_path), str(data), None))
    process.start()
    process.join()
    assert process.exitcode == 0
    check_the_same(tmp_path, expected)


@pytest.mark.parametrize(
    "kill_at",
    [
        ("replace", 1),  # the configuration is written, not yet in its place
        ("replace", 2),  # the log of a run that starts
        ("fsync", 3),  # the first checkpoint: its bytes have not reached the disk
        ("replace", 20),
    ],
)
def test_killed_while_a_file_is_written(
    undisturbed: tuple[Path, Path], tmp_path: Path, server: Any, kill_at: tuple[str, int]
) -> None:
    expected, data = undisturbed
    for at, code in ((kill_at, -signal.SIGKILL), (None, 0)):
        process = server.Process(target=work, args=(str(tmp_path), str(data), at))
        process.start()
        process.join()
        assert process.exitcode == code
        if at is not None:
            assert any(p.name.endswith(".tmp") for p in tmp_path.iterdir())
    check_the_same(tmp_path, expected)


def test_a_log_that_was_cut_off(undisturbed: tuple[Path, Path], tmp_path: Path, server: Any) -> None:
    """Lines beyond the checkpoint, and half a line, are not kept."""
    expected, data = undisturbed
    process = server.Process(target=work, args=(str(tmp_path), str(data), ("fsync", 15)))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    step = load_checkpoint(tmp_path / "checkpoint.pt")["training"]["step"]
    log = tmp_path / "log.jsonl"
    lines = log.read_text().splitlines()
    assert len(lines) > step > 0
    log.write_text("\n".join(lines) + "\n" + lines[-1][:17])
    process = server.Process(target=work, args=(str(tmp_path), str(data), None))
    process.start()
    process.join()
    assert process.exitcode == 0
    check_the_same(tmp_path, expected)


def test_the_state_goes_on_with_every_optimiser_and_schedule(tmp_path: Path) -> None:
    """Stopped between two steps: Adam and AdamW with each learning rate."""
    for i, (optimizer, schedule) in enumerate(
        (("adam", "cosine"), ("adamw", "constant"), ("adamw", "one-cycle"))
    ):
        whole, parts = tmp_path / f"whole{i}", tmp_path / f"parts{i}"
        asked = tiny(
            "tno-cde", optimizer={"name": optimizer}, schedule={"name": schedule}, model={"dropout": 0.1}
        )
        train(asked, whole, data=tmp_path / "data")
        with pytest.raises(Stopped), pytest.MonkeyPatch.context() as patch:
            patch.setattr("continuum_ops.experiments.running.save_checkpoint", stop_after(3))
            train(asked, parts, data=tmp_path / "data")
        assert load_checkpoint(parts / "checkpoint.pt")["training"]["step"] == 6
        train(asked, parts, data=tmp_path / "data")
        assert same(*(load_checkpoint(f / "checkpoint.pt") for f in (parts, whole)))


class Stopped(Exception):
    pass


def stop_after(count: int) -> Any:
    from continuum_ops.training import save_checkpoint

    def save(*args: Any) -> None:
        nonlocal count
        save_checkpoint(*args)
        count -= 1
        if count == 0:
            raise Stopped

    return save


def test_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would take the first one's half-written files for leftovers."""

    def meanwhile(*_: Any) -> None:
        with pytest.raises(ConfigError, match=re.escape(f"{tmp_path} is being trained by another process")):
            train(config(), tmp_path)
        raise Stopped

    monkeypatch.setattr("continuum_ops.experiments.running.generate", meanwhile)
    with pytest.raises(Stopped):
        train(config(), tmp_path)
    monkeypatch.setattr("continuum_ops.experiments.running.generate", lambda *_: stop_now())
    with pytest.raises(Stopped):
        train(config(), tmp_path)


def stop_now() -> None:
    raise Stopped
