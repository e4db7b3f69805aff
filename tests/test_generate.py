"""Samples on disk: a generation that is killed and started again ends with the same files."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from continuum_ops.cli import main
from continuum_ops.training import load_checkpoint

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL and the forkserver are Unix's")
KILLS = int(os.environ.get("CONTINUUM_OPS_KILLS", "4"))
# Ten chunks of the training samples, one of each other split.
ARGUMENTS = ["generate", "pit-shock-tube", "--small"]
ARGUMENTS += [
    f"--set=data.{k}={v}" for k, v in (("train", 640), ("validation", 3), ("test", 3), ("cells", 64))
]
ARGUMENTS += ["--set=data.resolutions=[]"]


def work(folder: str, kill_at: tuple[str, int] | None) -> None:
    """Generate; with kill_at, die by SIGKILL at the n-th call of a function of os."""
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
    main([*ARGUMENTS, "--data", folder])


@pytest.fixture(scope="module")
def server() -> Any:
    """Processes start from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["continuum_ops.experiments", "continuum_ops.commands", "tqdm", "scipy.optimize"]
    )
    return context


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, server: Any) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("data")
    process = server.Process(target=work, args=(str(folder), None))
    process.start()
    process.join()
    assert process.exitcode == 0
    files = content(folder)
    assert len(files) == 12 and all(path.endswith(".pt") for path in files)
    return files


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def finish(folder: Path, server: Any) -> None:
    process = server.Process(target=work, args=(str(folder), None))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_killed_at_random_moments(undisturbed: dict[str, bytes], tmp_path: Path, server: Any) -> None:
    generator, killed = random.Random(), 0
    moments = sorted(generator.choices(range(10), k=KILLS))
    print("killed after chunks", moments)
    for moment in moments:
        process = server.Process(target=work, args=(str(tmp_path), None))
        process.start()
        while process.is_alive() and len(list(tmp_path.rglob("train-*.pt"))) < moment:
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.05))
        process.kill()
        process.join()
        # On a busy machine it may have ended before.
        assert process.exitcode in (-signal.SIGKILL, 0)
        killed += process.exitcode != 0
    assert killed > 0
    finish(tmp_path, server)
    assert content(tmp_path) == undisturbed


@pytest.mark.parametrize("kill_at", [("fsync", 1), ("replace", 3), ("replace", 11)])
def test_killed_while_a_file_is_written(
    undisturbed: dict[str, bytes], tmp_path: Path, server: Any, kill_at: tuple[str, int]
) -> None:
    """Its bytes have not reached the disk; they have, and are not in their place yet."""
    process = server.Process(target=work, args=(str(tmp_path), kill_at))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    there = content(tmp_path)
    assert sum(name.endswith(".tmp") for name in there) == 1
    assert {name: there[name] for name in there if name.endswith(".pt")}.items() <= undisturbed.items()
    finish(tmp_path, server)
    assert content(tmp_path) == undisturbed


def test_chunks_hold_different_samples(undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    seen = []
    for i, data in enumerate(undisturbed.values()):
        (tmp_path / f"{i}.pt").write_bytes(data)
        seen.append(load_checkpoint(tmp_path / f"{i}.pt")["tensors"]["input"][:, 0, 0])
    values = torch.cat(seen)
    assert len(values) == 646 and len(values.unique()) == 646
