"""Continuum attention of a rank's queries to a block of keys: kernels, any backend, rules by place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import _direct as direct
from ..ops._continuum_attention_autograd import _backward_op, forward_op
from ..ops._continuum_attention_chunked import CHUNK_SCORES, accumulation_dtype
from ._attend import Block, Form, Reduced, Rows

# A kernel may take g . out of a short block of keys from those keys alone, which is right where they are all
# the keys there are.
SHORT = 256
# Exponents up to this size need no shift.
BOUND = 40.0


class Blocks(Reduced):
    """Any backend. local: query, and a floating mask if given; block: key, value, and weights if given.

    mask: a bool one (True: attend) that broadcasts to the scores. seed: as of the registered operators.
    """

    value_at = 1

    def __init__(
        self,
        leads: torch.Size,
        scale: float,
        mask: Tensor | None = None,
        dropout_p: float = 0.0,
        seed: Tensor | None = None,
    ) -> None:
        self.leads, self.scale = leads, scale
        self.mask, self.dropout_p, self.seed = mask, dropout_p, seed

    def out_shape(self, local: Block, own: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rows = (*self.leads, local[0].shape[-2])
        return (*rows, own[1].shape[-1]), rows

    def empty(self, local: Block, block: Block) -> bool:
        return 0 in (*self.leads, local[0].shape[-2], block[0].shape[-2])

    def _tensors(self, local: Block, block: Block) -> list[Tensor | None]:
        """The ten tensors of the operator."""
        query, key, value = (t.expand(*self.leads, *t.shape[-2:]) for t in (local[0], *block[:2]))
        weights = block[2].expand(*self.leads, key.shape[-2]) if len(block) > 2 else None
        mask = local[1] if len(local) > 1 else self.mask
        if mask is not None:
            mask = mask.expand(*self.leads, query.shape[-2], key.shape[-2])
        return [query, key, value, weights, mask, *(None,) * 4, self.seed]

    def attend(self, local: Block, block: Block) -> tuple[Tensor, Tensor]:
        inputs = (*self._tensors(local, block), None, self.scale, self.dropout_p, False)
        if len(local) > 1:  # the kernels take no floating masks
            out, lse = torch.ops.continuum_ops.continuum_attention_chunked(*inputs)
        else:
            out, lse, _ = forward_op(*inputs)
        return out, lse


class Kernel(Blocks):
    """The compiled kernels, whose backward takes the record of all blocks: no block is computed again."""

    def share(self, local: Block, block: Block, shift: Tensor, all_: Rows) -> Tensor:
        # The kernel's record instead of lse, which is too coarse for large logits.
        part = self.forward(self._wide(local), self._wide(block))
        return super().share(local, block, part.shift, all_) * part.total

    def _largest(self, local: Block, block: Block) -> Tensor:
        """log2 max w over the keys of each leading dimension, to which the kernels' records are relative."""
        if len(block) == 2:
            return local[0].new_zeros((*self.leads, 1), dtype=torch.float64)
        weights = block[2].expand(*self.leads, block[0].shape[-2])
        return weights.amax(-1, keepdim=True).double().log2()

    def _removes_keys(self, rows: int) -> bool:
        """A mask that is the same for every query, with which the kernels have fewer keys."""
        mask = self.mask
        return mask is not None and (rows == 1 or mask.shape[-2] == 1 or mask.stride(-2) == 0)

    def forward(self, local: Block, block: Block) -> Rows:
        largest = self._largest(local, block)
        out, _, stats = forward_op(*self._tensors(local, block), None, self.scale, self.dropout_p, False)
        shift, total = stats.double().unbind(-1)
        return Rows(out, torch.where(total == 0, -math.inf, shift + largest), total)

    def backward(
        self, local: Block, block: Block, all_: Rows, g: Tensor, g_lse: Tensor | None, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        inputs, largest = self._tensors(local, block), self._largest(local, block)
        if self._short(local, block):
            return super().backward(local, block, all_, g, g_lse, needs)  # which computes the block again
        shift = all_.shift - largest
        dead = (all_.total == 0) | (largest == -math.inf)
        small = shift.abs() <= BOUND
        # What the kernel's own type cannot hold of the shift goes into the sum.
        kept = torch.where(dead | small, 0.0, shift).to(accumulation_dtype(g.dtype))
        total = all_.total * torch.where(dead, 0.0, shift - kept.double()).exp2()
        stats = torch.stack([kept, torch.where(dead, 0.0, total).to(kept.dtype)], -1)
        grads = direct.call(
            _backward_op,
            *(g, g_lse, *inputs, all_.out, stats),
            *(None, self.scale, self.dropout_p, False),
            *(needs[-1] and len(block) > 2, False, False),
        )
        given = (*local, *block)
        return [
            grad.sum_to_size(t.shape) if need else None
            for grad, t, need in zip(grads, given, needs, strict=False)
        ]

    def _short(self, local: Block, block: Block) -> bool:
        key = block[0]
        if key.device.type != "cpu" or key.shape[-2] <= SHORT or self._removes_keys(local[0].shape[-2]):
            return key.device.type == "cpu"
        return len(block) > 2 and int((block[2] != 0).sum(-1).min()) <= SHORT


class Rule(NamedTuple):
    """What hides scores by the places of queries and keys in the whole."""

    is_causal: bool
    masked: bool  # a mask is given, whose columns are those places
    dropout_p: float
    seed: Tensor | None

    @property
    def placed(self) -> bool:
        return self.is_causal or self.masked or self.seed is not None


class InChunks(Form):
    """Some queries at a time, and scores that depend on the places of their query and key.

    local: query; if `rule` asks for places also those of the queries, and the mask if there is one, with a
    column for each key of all ranks. block: key, value, weights if given; then also the places of the keys.
    `make` gives the form of a chunk from a bool mask and a seed. Partial results and gradients of the queries
    are of a chunk's size; so is the mask of the causal order, of CHUNK_SCORES scores at most. Of a block of
    which nothing is visible nothing is computed.
    """

    value_at = 1

    def __init__(
        self, make: Callable[[Tensor | None, Tensor | None], Blocks], rule: Rule, chunks: int
    ) -> None:
        self.make, self.rule, self.chunks = make, rule, chunks
        self.whole = make(None, None)

    def out_shape(self, local: Block, own: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.whole.out_shape(local, own)

    def empty(self, local: Block, block: Block) -> bool:
        return self.whole.empty(local, block)

    def _chunks(self, local: Block, block: Block) -> Iterator[tuple[slice, Tensor | None]]:
        """(queries, the mask of their scores) of what is visible."""
        rows, keys = local[0].shape[-2], block[0].shape[-2]
        plain = -(-rows // min(rows, self.chunks))
        masked = min(plain, max(1, CHUNK_SCORES // keys))

        def slices(step: int) -> Iterator[slice]:
            return (slice(i, min(rows, i + step)) for i in range(0, rows, step))

        if self.rule.is_causal:
            row, place = local[1], block[-1]
            if bool(place.max() <= row.min()):
                yield from ((chunk, None) for chunk in slices(plain))
            elif bool(place.min() <= row.max()):
                yield from ((chunk, row[chunk, None] >= place) for chunk in slices(masked))
        elif self.rule.masked:
            mask, place = local[2], block[-1]
            columns = _columns(mask, place)
            if columns is None and mask.shape[-2] == 1:
                columns = mask.index_select(-1, place)
            for chunk in slices(masked if columns is None else plain):
                if columns is None:
                    yield chunk, _rows(mask, chunk).index_select(-1, place)
                else:
                    yield chunk, _rows(columns, chunk)
        else:
            yield from ((chunk, None) for chunk in slices(plain))

    def _form(self, local: Block, block: Block, rows: slice, mask: Tensor | None) -> tuple[Blocks, Block]:
        """The form of these queries and its own local tensors."""
        seed = None
        if self.rule.seed is not None:
            seed = torch.cat([self.rule.seed, local[1][rows], block[-1]])
        query = local[0][..., rows, :]
        if mask is not None and mask.dtype != torch.bool:
            return self.make(None, seed), [query, mask]
        return self.make(mask, seed), [query]

    def _tensors(self, block: Block) -> Block:
        return block[:-1] if self.rule.placed else block

    def parts(self, local: Block, block: Block) -> Iterator[tuple[slice, Rows]]:
        for rows, mask in self._chunks(local, block):
            form, own = self._form(local, block, rows, mask)
            yield rows, form.forward(own, self._tensors(block))

    def accumulate(
        self,
        local: Block,
        block: Block,
        all_: Rows,
        g: Tensor,
        g_lse: Tensor | None,
        needs: Sequence[bool],
        sums: Block,
    ) -> list[Tensor | None]:
        tensors, count = self._tensors(block), len(local)
        wanted = needs[count : count + len(tensors)]
        dtype = accumulation_dtype(local[0].dtype)
        totals: list[Tensor | None] = [None] * len(block)
        for rows, mask in self._chunks(local, block):
            form, own = self._form(local, block, rows, mask)
            grads = form.backward(
                own,
                tensors,
                # A kernel takes the outputs as it made them.
                Rows(all_.out[..., rows, :].contiguous(), all_.shift[..., rows], all_.total[..., rows]),
                g[..., rows, :],
                None if g_lse is None else g_lse[..., rows],
                [needs[0], *needs[2:count][: len(own) - 1], *wanted],
            )
            for i, grad in enumerate(grads[len(own) :]):
                if grad is not None:
                    total = totals[i]
                    totals[i] = grad.to(dtype) if total is None else total.add_(grad)
            if grads[0] is not None:
                sums[0][..., rows, :] += grads[0]
            if len(own) > 1 and grads[1] is not None:
                to = _rows(sums[2], rows)
                if to.shape[-1] == grads[1].shape[-1] == 1:
                    to += grads[1]
                else:
                    to.index_add_(-1, block[-1], grads[1])
            del grads
        return [
            t.new_zeros(t.shape, dtype=dtype) if need and total is None else total
            for t, total, need in zip(block, totals, needs[count:], strict=True)
        ]


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    """Of a tensor that has a row for each query, or one for all."""
    return tensor if tensor.shape[-2] == 1 else tensor[..., rows, :]


def _columns(mask: Tensor, place: Tensor) -> Tensor | None:
    """The columns of these keys without a copy, where they are one for all, or neighbours."""
    if mask.shape[-1] == 1:
        return mask
    first, count = int(place[0]), place.numel()
    if torch.equal(place, torch.arange(first, first + count, device=place.device)):
        return mask.narrow(-1, first, count)
    return None
