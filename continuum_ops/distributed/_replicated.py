"""Queries that every rank holds: partial results are merged by all-reduces instead of a ring."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ._group import Link, sum_over


def merged_over_ranks(out: Tensor, lse: Tensor, at: Link) -> tuple[Tensor, Tensor]:
    """Output and lse over the keys of all ranks, from those over the keys of each; differentiable."""
    if at.size == 1:
        return out, lse
    top = lse.detach().clone(memory_format=torch.contiguous_format)
    with at.talking():
        dist.all_reduce(top, dist.ReduceOp.MAX, group=at.group)
    top = top.masked_fill(top == -math.inf, 0.0)
    mass = (lse - top).exp().unsqueeze(-1)
    # A rank without keys has e^-inf = 0 and a derivative of 0.
    sums = sum_over(torch.cat([mass * out, mass], -1), at)
    total = sums[..., -1:]
    dead = total == 0
    safe = torch.where(dead, 1.0, total)
    merged = torch.where(dead.squeeze(-1), -math.inf, (top + safe.squeeze(-1).log()))
    return sums[..., :-1] / safe, merged
