"""Blocks of queries on a grid, each with the box of keys that may be within its radius."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Scores held at a time: 2^22 float32 numbers are 16 MB.
BLOCK_SCORES = 2**22


class Inputs(NamedTuple):
    """The arguments, as in the schema."""

    value: Tensor
    query_axes: list[Tensor]
    key_axes: list[Tensor]
    rate: Tensor
    weights: Tensor | None
    radius: Tensor
    period: list[float]
    eps: float

    @property
    def axes(self) -> tuple[Tensor, ...]:
        return (*self.query_axes, *self.key_axes)

    @property
    def query_shape(self) -> tuple[int, ...]:
        return tuple(x.numel() for x in self.query_axes)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return tuple(y.numel() for y in self.key_axes)

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.value.dtype, torch.float32)


class Block(NamedTuple):
    """Indices of a box of queries and of the keys that may be within its radius: of each axis, and flat."""

    queries: list[Tensor]
    keys: list[Tensor]
    rows: Tensor
    columns: Tensor


class _Axis:
    """The keys of one axis for bisection: sorted, and over three periods if it is periodic."""

    def __init__(self, x: Tensor, y: Tensor, period: float) -> None:
        self.x, self.n, self.period = x.detach().double().cpu(), y.numel(), period
        y = y.detach().double().cpu()
        self.order = torch.arange(self.n)
        if math.isfinite(period):
            y, self.order = (y - period * (y / period).floor()).sort()
            y = torch.cat([y - period, y, y + period])
        self.y = y
        # Generous, as every pair is tested again.
        size = max(y.abs().max().item(), self.x.abs().max().item())
        self.slack = 16 * torch.finfo(torch.float64).eps * size
        self.last: dict[tuple[int, int], tuple[float, Tensor]] = {}

    def keys(self, start: int, stop: int, radius: float) -> Tensor:
        """Indices of the keys within the radius of some query in [start, stop)."""
        last = self.last.get((start, stop))
        if last is None or last[0] != radius:  # one radius for all: the next block along another axis
            last = self.last[start, stop] = (radius, self._find(start, stop, radius))
        return last[1]

    def _find(self, start: int, stop: int, radius: float) -> Tensor:
        reach = radius * (1 + 1e-5) + self.slack
        low, high = self.x[start].item(), self.x[stop - 1].item()
        if math.isfinite(self.period):
            if not high - low + 2 * reach < self.period * (1 - 1e-9):
                return torch.arange(self.n)
            turns = math.floor((low - reach) / self.period) + 1  # low - reach then lies in [-period, 0)
            low, high = low - turns * self.period, high - turns * self.period
        bounds = torch.tensor([low - reach, high + reach], dtype=torch.float64)
        first = int(torch.searchsorted(self.y, bounds[0]))
        last = int(torch.searchsorted(self.y, bounds[1], right=True))
        return self.order[torch.arange(first, last) % self.n].sort().values


def _flat(indices: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    flat = indices[0]
    for index, n in zip(indices[1:], shape[1:], strict=True):
        flat = (flat[:, None] * n + index).flatten()
    return flat


def _block_size(x: Inputs, radius: float) -> list[int]:
    """Queries of a block along each axis: what is estimated to take the least time.

    Larger blocks waste scores on keys that no single query reaches, smaller ones waste calls.
    """
    channels, heads = x.value.shape[0] * x.value.shape[-1], x.rate.numel()
    spans = [(y.detach()[-1] - y.detach()[0]).item() for y in x.key_axes]
    windows = [2 * radius / span * n if span > 0 else n for span, n in zip(spans, x.key_shape, strict=True)]
    best = (math.inf, [1] * len(windows))
    for edge in (2**k for k in range(10)):
        sizes = [min(edge, m) for m in x.query_shape]
        shares = [size / m for size, m in zip(sizes, x.query_shape, strict=True)]
        keys = [min(n, 2 + w + n * s) for w, n, s in zip(windows, x.key_shape, shares, strict=True)]
        rows, columns = math.prod(sizes), math.prod(keys)
        if rows * columns * heads > BLOCK_SCORES:
            break
        # Nanoseconds for the calls of a block, for a score, for its product and for a number gathered.
        one = 3e5 + heads * rows * columns * (3 + 0.03 * channels) + columns * channels
        best = min(best, (one * math.prod(math.ceil(1 / s) for s in shares), sizes))
    return best[1]


def blocks(x: Inputs) -> Iterator[Block]:
    radius = x.radius.double().cpu()
    axes = [_Axis(*args) for args in zip(x.query_axes, x.key_axes, x.period, strict=True)]
    sizes = _block_size(x, radius.max().item())
    ranges = [
        [(start, min(m, start + size)) for start in range(0, m, size)]
        for m, size in zip(x.query_shape, sizes, strict=True)
    ]
    boxes = list(itertools.product(*ranges))[::-1]
    while boxes:
        box = boxes.pop()
        queries = [torch.arange(*span) for span in box]
        rows = _flat(queries, x.query_shape)
        reach = radius if radius.dim() == 0 else radius[rows].max()
        keys = [axis.keys(*span, reach.item()) for axis, span in zip(axes, box, strict=True)]
        scores = math.prod(map(len, keys)) * rows.numel() * x.rate.numel()
        if scores > 2 * BLOCK_SCORES and rows.numel() > 1:  # keys that are denser here than on average
            longest = max(range(len(box)), key=lambda i: box[i][1] - box[i][0])
            start, stop = box[longest]
            middle = (start + stop) // 2
            halves = ((middle, stop), (start, middle))
            boxes += [(*box[:longest], half, *box[longest + 1 :]) for half in halves]
        elif scores > 0:
            device = x.value.device
            yield Block(
                [q.to(device) for q in queries],
                [k.to(device) for k in keys],
                rows.to(device),
                _flat(keys, x.key_shape).to(device),
            )
