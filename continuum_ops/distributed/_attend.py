"""Attention whose keys come block by block: merging of the partial results, and their derivative."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops._continuum_attention_chunked import accumulation_dtype
from ._routes import Block, Direct, Ring

LOG2E = 1.0 / math.log(2.0)


class Rows(NamedTuple):
    """Of each row: the output, and the sum of w_k e^{s_ik} over the keys as total * 2^shift, in float64.

    Two numbers, since the logarithm of the sum alone is too coarse for logits of 1e4. Without keys shift is
    -inf and total 0.
    """

    out: Tensor
    shift: Tensor
    total: Tensor

    def lse(self, dtype: torch.dtype) -> Tensor:
        return ((self.shift + self.total.log2()) * math.log(2.0)).to(dtype)


class Form(ABC):
    """An attention of the `local` tensors of a rank to one block of keys.

    value_at: the place of value among the tensors of a block.
    """

    value_at: int

    @abstractmethod
    def out_shape(self, local: Block, own: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the output and of its rows."""

    @abstractmethod
    def empty(self, local: Block, block: Block) -> bool:
        """Whether there are no queries here or no keys."""

    @abstractmethod
    def parts(self, local: Block, block: Block) -> Iterator[tuple[slice, Rows]]:
        """(rows, what this block gives them) of rows that make up all that see a key of it."""

    @abstractmethod
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
        """Gradients of the tensors of `block`; those of `local` are added to `sums`.

        all_: the result over all blocks. needs: which gradients are asked for, of `local`, then of `block`.
        """

    def spread(self, rows: Tensor) -> Tensor:
        """A number for each row in the layout of the output."""
        return rows.unsqueeze(-1)

    def row_sums(self, x: Tensor) -> Tensor:
        """The adjoint of `spread`."""
        return x.sum(-1)


class Reduced(Form):
    """The derivative of a block by the chain rule, from nothing but the operator's own out and lse.

    out = sum_b p_b out_b with p_b = e^{lse_b - lse}, so out_b receives p_b g and lse_b receives
    p_b (g . (out_b - out) + g_lse). The block is computed once more for it.
    """

    @abstractmethod
    def attend(self, local: Block, block: Block) -> tuple[Tensor, Tensor]:
        """(out, lse) of tensors in float32 or wider, differentiable."""

    def share(self, local: Block, block: Block, shift: Tensor, all_: Rows) -> Tensor:
        """p_b of each row, for blocks that sum to 2^shift."""
        exponent = (shift - all_.shift).masked_fill(shift == -math.inf, -math.inf)
        return exponent.exp2() / torch.where(all_.total == 0, 1.0, all_.total)

    def _wide(self, tensors: Block) -> Block:
        """16-bit tensors as float32: partial results that are subtracted need more digits."""
        return [t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in tensors]

    def parts(self, local: Block, block: Block) -> Iterator[tuple[slice, Rows]]:
        yield slice(None), self.forward(local, block)

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
        grads = self.backward(local, block, all_, g, g_lse, needs)
        for to, grad in zip(sums, grads, strict=False):
            if grad is not None:
                to += grad
        return grads[len(local) :]

    def forward(self, local: Block, block: Block) -> Rows:
        with torch.autocast(block[0].device.type, enabled=False):
            out, lse = self.attend(self._wide(local), self._wide(block))
        shift = lse.double() * LOG2E
        return Rows(out, shift, torch.ones_like(shift).masked_fill_(shift == -math.inf, 0.0))

    def backward(
        self, local: Block, block: Block, all_: Rows, g: Tensor, g_lse: Tensor | None, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of the tensors of `local` and `block`."""
        leaves = [
            t.detach().requires_grad_(need)
            for t, need in zip(self._wide([*local, *block]), needs, strict=True)
        ]
        with torch.enable_grad(), torch.autocast(block[0].device.type, enabled=False):
            out, lse = self.attend(leaves[: len(local)], leaves[len(local) :])
        share = self.share(local, block, lse.detach().double() * LOG2E, all_)
        # Rows without keys have no gradient, whatever comes in.
        reached = self.spread(share) != 0.0
        wide = torch.where(reached, g.to(out.dtype), 0.0)
        into_lse = share * self.row_sums(wide * (out.detach() - all_.out.to(out.dtype))).double()
        if g_lse is not None:
            into_lse = into_lse + torch.where(share == 0.0, 0.0, share * g_lse.double())
        cotangents = (self.spread(share).to(out.dtype) * wide, into_lse.to(lse.dtype))
        inputs = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        grads = iter(torch.autograd.grad((out, lse), inputs, cotangents, materialize_grads=True))
        return [next(grads) if need else None for need in needs]


class _Merged:
    """The running sums over blocks, relative to the largest of their shifts."""

    def __init__(self, form: Form, local: Block, own: Block) -> None:
        out_shape, row_shape = form.out_shape(local, own)
        value = own[form.value_at]
        self.form = form
        self.sums = value.new_zeros(out_shape, dtype=accumulation_dtype(value.dtype))
        self.total = value.new_zeros(row_shape, dtype=torch.float64)
        self.shift = torch.full_like(self.total, -math.inf)

    def add(self, part: Rows, rows: slice) -> None:
        sums = self.sums if rows == slice(None) else self.sums[..., rows, :]
        shift, total = self.shift[..., rows], self.total[..., rows]
        top = torch.maximum(shift, part.shift)
        base = top.masked_fill(top == -math.inf, 0.0)
        before, after = (shift - base).exp2(), (part.shift - base).exp2() * part.total
        shift.copy_(top)
        total.mul_(before).add_(after)
        old, new = (self.form.spread(f).to(sums.dtype) for f in (before, after))
        sums.mul_(old).addcmul_(part.out.to(sums.dtype), new)

    def rows(self) -> Rows:
        divisor = self.form.spread(torch.where(self.total == 0, 1.0, self.total))
        return Rows(self.sums.div_(divisor.to(self.sums.dtype)), self.shift, self.total)


class _Attend(torch.autograd.Function):
    """(out, lse) of `form`, the first `count` of the tensors staying here and the others travelling."""

    @staticmethod
    def forward(
        ctx: Any, form: Form, route: Ring | Direct, count: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        local, own = list(tensors[:count]), list(tensors[count:])
        merged = _Merged(form, local, own)
        for _, block in route.blocks(own):
            if not form.empty(local, block):
                for which, part in form.parts(local, block):
                    merged.add(part, which)
                    del part
        rows = merged.rows()
        dtype = own[form.value_at].dtype
        out, lse = rows.out.to(dtype), rows.lse(rows.out.dtype)
        ctx.save_for_backward(*tensors, out, rows.shift, rows.total)
        ctx.form, ctx.route, ctx.count = form, route, count
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, g_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, shift, total = ctx.saved_tensors
        form, count = ctx.form, ctx.count
        local, own = tensors[:count], tensors[count:]
        needs = list(ctx.needs_input_grad[3:])
        rows = Rows(out, shift, total)
        g = out.new_zeros(()).expand(out.shape) if g is None else g
        dtype = accumulation_dtype(out.dtype)
        sums = [
            t.new_zeros(t.shape if need else (0,), dtype=dtype) for t, need in zip(local, needs, strict=False)
        ]
        places = [i for i in range(len(own)) if needs[count + i]]

        def compute(_: int, block: Block) -> Block:
            if form.empty(local, block):
                return [block[i].new_zeros(block[i].shape, dtype=dtype) for i in places]
            grads = form.accumulate(local, block, rows, g, g_lse, needs, sums)
            return [grad for i in places if (grad := grads[i]) is not None]

        travelled = iter(ctx.route.returned(own, places, dtype, compute))
        back: list[Tensor | None] = [
            to.to(t.dtype) if need else None for to, t, need in zip(sums, local, needs, strict=False)
        ]
        back += [next(travelled).to(t.dtype) if needs[count + i] else None for i, t in enumerate(own)]
        return (None, None, None, *back)


def attend(form: Form, route: Ring | Direct, local: Block, own: Block) -> tuple[Tensor, Tensor]:
    return _Attend.apply(form, route, len(local), *local, *own)
