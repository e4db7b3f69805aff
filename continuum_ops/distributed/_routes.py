"""How blocks of keys go from rank to rank, and their gradients back to their owners.

Each step's sends and the receives that match them are one batch on every rank, posted before the step's
computation and waited for after it: communication overlaps with computing, and no backend can deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ._group import Link

Block = list[Tensor]
Shapes = Sequence[Sequence[tuple[int, ...]]]  # of the tensors of each rank's block
Compute = Callable[[int, Block], Block]


class _Batch:
    """Messages in flight; holds the tensors until they are through."""

    def __init__(self, at: Link, sends: Block, to: int, receives: Block, source: int) -> None:
        self._at = at
        self._tensors = (sends, receives)
        self._peers = f"rank {source} or {to}" if source != to else f"rank {to}"
        ops = [dist.P2POp(dist.isend, t, group=at.group, group_peer=to) for t in sends if t.numel()]
        ops += [dist.P2POp(dist.irecv, t, group=at.group, group_peer=source) for t in receives if t.numel()]
        with at.talking(self._peers):
            self._works = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> None:
        with self._at.talking(self._peers):
            for work in self._works:
                work.wait()


def _empty(like: Block, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype | None = None) -> Block:
    return [t.new_empty(shape, dtype=dtype) for t, shape in zip(like, shapes, strict=True)]


def _sum(a: Block | None, b: Block) -> Block:
    return b if a is None else [x.add_(y) for x, y in zip(a, b, strict=True)]


class Ring:
    """Every block visits every rank, from neighbour to neighbour: rank r has that of r - t at step t.

    A block goes in `pieces`, cut along the axes of its points, one after the other: what is in flight is a
    fraction of it. A piece's gradient travels one step behind it and collects the contributions in the order
    of its visits, the owner's first, so that the same number of ranks gives the same bits.
    """

    def __init__(self, at: Link, shapes: Shapes, axes: Sequence[int], pieces: int = 1) -> None:
        self.at, self.shapes, self.axes = at, shapes, axes
        self.pieces = pieces if at.size > 1 else 1
        self.next, self.previous = (at.rank + 1) % at.size, (at.rank - 1) % at.size

    def _piece_shapes(self, rank: int, piece: int) -> list[tuple[int, ...]]:
        """Those of Tensor.tensor_split."""
        shapes = []
        for shape, axis in zip(self.shapes[rank], self.axes, strict=True):
            sizes = list(shape)
            sizes[axis] = sizes[axis] // self.pieces + (piece < sizes[axis] % self.pieces)
            shapes.append(tuple(sizes))
        return shapes

    def _piece(self, tensors: Block, axes: Sequence[int], piece: int) -> Block:
        if self.pieces == 1:
            return tensors
        return [t.tensor_split(self.pieces, axis)[piece] for t, axis in zip(tensors, axes, strict=True)]

    def _steps(self, own: Block) -> Iterator[tuple[int, int, Block]]:
        """(piece, owner, block) of each step; the work with a block overlaps with the next one's journey."""
        at = self.at
        for piece in range(self.pieces):
            current = [t.contiguous() for t in self._piece(own, self.axes, piece)]
            for step in range(at.size):
                source = (at.rank - step) % at.size
                if step + 1 == at.size:
                    yield piece, source, current
                    break
                coming = _empty(own, self._piece_shapes((source - 1) % at.size, piece))
                batch = _Batch(at, current, self.next, coming, self.previous)
                yield piece, source, current
                batch.wait()
                current = coming

    def blocks(self, own: Block) -> Iterator[tuple[int, Block]]:
        """(owner, a piece of its block) of each step."""
        return ((source, block) for _, source, block in self._steps(own))

    def returned(self, own: Block, places: Sequence[int], dtype: torch.dtype, compute: Compute) -> Block:
        """Gradients of the tensors of `own` at `places`; `compute` gives those of a block on this rank."""
        at, axes = self.at, [self.axes[place] for place in places]
        result = (
            [] if at.size == 1 else [own[place].new_empty(own[place].shape, dtype=dtype) for place in places]
        )
        batch: _Batch | None = None
        arrived: Block | None = None

        def keep(piece: int, sums: Block) -> None:
            for to, part in zip(self._piece(result, axes, piece), sums, strict=True):
                to.copy_(part)

        for piece, source, block in self._steps(own):
            grads = [g.to(dtype).contiguous() for g in compute(source, block)]
            if at.size == 1:
                return grads
            if batch is not None:
                batch.wait()
            if source == at.rank and arrived is not None:  # the last piece's gradient is home
                keep(piece - 1, arrived)
                arrived = None
            sums = _sum(arrived, grads)
            shapes = self._piece_shapes((source - 1) % at.size, piece)
            arrived = _empty(sums, [shapes[place] for place in places], dtype)
            batch = _Batch(at, sums, self.next, arrived, self.previous)
        assert batch is not None and arrived is not None
        batch.wait()
        keep(self.pieces - 1, arrived)
        return result


class Direct:
    """Blocks go straight to the ranks that need them: `needed[r][b]` says that rank r needs rank b's block.

    At step t rank r sends to r + t and receives from r - t; gradients go straight back and are added in the
    order of the steps.
    """

    def __init__(self, at: Link, shapes: Shapes, needed: Sequence[Sequence[bool]]) -> None:
        self.at, self.shapes, self.needed = at, shapes, needed

    def _peers(self, step: int) -> tuple[int, int, bool, bool]:
        """Whom this rank serves, who serves it, and whether they need it."""
        rank, size = self.at.rank, self.at.size
        to, source = (rank + step) % size, (rank - step) % size
        return to, source, self.needed[to][rank], self.needed[rank][source]

    def _post(self, own: Block, step: int) -> tuple[_Batch, Block]:
        to, source, serves, needs = self._peers(step)
        coming = _empty(own, self.shapes[source]) if needs else []
        return _Batch(self.at, own if serves else [], to, coming, source), coming

    def _steps(self, own: Block) -> Iterator[tuple[int, Block | None]]:
        """(owner, block) of every step, None for a block that this rank does not need.

        A step without a block is a step all the same: ranks post their batches in one order.
        """
        at, own = self.at, [t.contiguous() for t in own]
        posted = self._post(own, 1) if at.size > 1 else None
        yield at.rank, own if self.needed[at.rank][at.rank] else None
        for step in range(1, at.size):
            assert posted is not None
            batch, coming = posted
            batch.wait()
            posted = self._post(own, step + 1) if step + 1 < at.size else None
            yield (at.rank - step) % at.size, coming or None

    def blocks(self, own: Block) -> Iterator[tuple[int, Block]]:
        """(owner, block) of the blocks that this rank needs, its own first."""
        return ((source, block) for source, block in self._steps(own) if block is not None)

    def returned(self, own: Block, places: Sequence[int], dtype: torch.dtype, compute: Compute) -> Block:
        """As of `Ring.returned`."""
        at = self.at
        mine = [own[place] for place in places]
        total = [torch.zeros(t.shape, dtype=dtype, device=t.device) for t in mine]
        flying: tuple[_Batch, Block] | None = None
        for source, block in self._steps(own):
            grads = [] if block is None else [g.to(dtype).contiguous() for g in compute(source, block)]
            if flying is not None:
                self._take(flying, total)
            if source == at.rank:
                if grads:
                    _sum(total, grads)
                continue
            to, _, serves, _ = self._peers((at.rank - source) % at.size)
            coming = _empty(mine, [tuple(t.shape) for t in mine], dtype) if serves else []
            flying = _Batch(at, grads, source, coming, to), coming
        if flying is not None:
            self._take(flying, total)
        return total

    @staticmethod
    def _take(entry: tuple[_Batch, Block], total: Block) -> None:
        batch, coming = entry
        batch.wait()
        if coming:
            _sum(total, coming)
