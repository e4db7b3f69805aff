"""A training by two processes is that of one: each takes half of every batch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from experiment_cases import tiny

from continuum_ops.experiments import ConfigError, load, open_run, read_log, train
from continuum_ops.experiments.ranks import Ranks
from continuum_ops.training import CheckpointError

RANKS = 2


def work(rank: int, folder: str) -> None:
    os.environ.update(WORLD_SIZE=str(RANKS), RANK=str(rank), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    asked = tiny("tno-cde")
    with pytest.raises(ConfigError, match=r"batch_size must be a multiple of the 2 processes, was 3"):
        train(tiny("tno-cde", training={"batch_size": 3}), f"{folder}/odd")
    run = train(asked, f"{folder}/run", data=f"{folder}/data")
    # Dropout draws random numbers of each process: stopped half-way, the same bits.
    noisy = tiny("tno-cde", model={"dropout": 0.2})
    whole = train(noisy, f"{folder}/whole", data=f"{folder}/data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("continuum_ops.experiments.running._content", stop_at(8))
        with pytest.raises(Stopped):
            train(noisy, f"{folder}/parts", data=f"{folder}/data")
    parts = train(noisy, f"{folder}/parts", data=f"{folder}/data")
    assert all(map(torch.equal, whole.operator.state_dict().values(), parts.operator.state_dict().values()))
    torch.save(run.operator.state_dict(), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


class Stopped(Exception):
    pass


def stop_at(step: int):
    from continuum_ops.experiments import running

    content = running._content

    def stop(config, operator, training, processes):
        if training.step == step:
            raise Stopped
        return content(config, operator, training, processes)

    return stop


@pytest.mark.slow  # two processes that import torch
def test_two_processes(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path),), nprocs=RANKS)
    states = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]
    assert all(map(torch.equal, states[0].values(), states[1].values()))
    one = train(tiny("tno-cde"), tmp_path / "one", data=tmp_path / "data")
    both = read_log(tmp_path / "run" / "log.jsonl")
    assert [e["step"] for e in both] == [e["step"] for e in one.log]
    assert both[0]["loss"] == pytest.approx(one.log[0]["loss"], rel=1e-6)
    for a, b in zip(both, one.log, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
        assert a.get("validation", 0.0) == pytest.approx(b.get("validation", 0.0), rel=1e-3)
    opened = open_run(tmp_path / "run").operator.state_dict()
    assert all(map(torch.equal, opened.values(), states[0].values()))
    with pytest.raises(CheckpointError, match="is a checkpoint of a training by 2 processes, not 1"):
        train(load(tmp_path / "run" / "config.json"), tmp_path / "run", data=tmp_path / "data")


def test_shares_cover_a_batch() -> None:
    rows = torch.arange(6)
    shares = [Ranks(rank, 3, torch.device("cpu")).share(rows).tolist() for rank in range(3)]
    assert shares == [[0, 3], [1, 4], [2, 5]]
    alone = Ranks(0, 1, torch.device("cpu"))
    value = torch.tensor(3.0)
    assert alone.mean(value) is value and alone.gather("x") == ["x"] and alone.first
