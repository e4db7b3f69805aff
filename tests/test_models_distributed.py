"""Every model preset under DistributedDataParallel on two gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from model_cases import PRESETS, by_preset, run
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def train_step(rank: int, folder: str) -> None:
    """One step of each preset on this rank's half of the batch; rank 0 writes gradients and parameters."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    results = {}
    for case in PRESETS:
        # Parameters differ between the ranks until DDP sends those of rank 0 around.
        model = DistributedDataParallel(case.model(torch.float64, seed=rank))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        mine = tuple(t[2 * rank : 2 * rank + 2] for t in case.inputs(torch.float64, batch=2 * RANKS))
        run(model, mine, case.grid(torch.float64)).square().mean().backward()
        optimizer.step()
        results[case.preset] = (
            {name: p.grad for name, p in model.module.named_parameters()},
            model.module.state_dict(),
        )
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    mp.spawn(train_step, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


@by_preset(PRESETS)
def test_gradients_and_the_step_are_those_of_one_process(case, ranks):
    model = case.model(torch.float64, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs = case.inputs(torch.float64, batch=2 * RANKS)
    run(model, inputs, case.grid(torch.float64)).square().mean().backward()
    optimizer.step()
    for gradients, state in (rank[case.preset] for rank in ranks):
        assert gradients.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-9, msg=name)
