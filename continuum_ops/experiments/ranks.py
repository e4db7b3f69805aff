"""The processes of a training: one, or those that torchrun started, each with its share of every batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(NamedTuple):
    """This process, how many there are, and the device that this one works on."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes the files and shows the progress."""
        return self.rank == 0

    def share(self, rows: Tensor) -> Tensor:
        """Those of some rows that this process works on."""
        return rows[self.rank :: self.size]

    def mean(self, value: Tensor) -> Tensor:
        """Over the processes, the same bits on each."""
        if self.size == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    def gather(self, value: Any) -> list[Any]:
        """Plain data of all processes, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            self.mean(torch.zeros(1, device=self.device))


@contextmanager
def ranks(device: torch.device) -> Iterator[Ranks]:
    """The processes that the variables of torchrun tell of: gloo on the CPU, NCCL on GPUs, one for each."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks(0, 1, device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), size, device)
    finally:
        if ours:
            dist.destroy_process_group()
