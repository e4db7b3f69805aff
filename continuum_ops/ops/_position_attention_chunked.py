"""Position attention in PyTorch, a block of queries at a time: O(N * chunk) memory.

Serves what has no kernel: second derivatives, and devices without a compiled kernel. With one geometry for
the batch, probabilities are computed once and meet all batch entries and channels in one matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ._continuum_attention_chunked import accumulation_dtype

# Scores held at a time, over groups and heads: 2^22 float32 numbers are 16 MB.
CHUNK_SCORES = 2**22
DIFFERENTIABLE = 5


class Inputs(NamedTuple):
    """The arguments, as in the schema: first the five that have gradients."""

    query_pos: Tensor  # (P, N, d), P, W, R = 1 or B
    key_pos: Tensor  # (P, M, d)
    value: Tensor  # (B, HV, M, C), HV = 1 or H
    rate: Tensor  # (H,)
    weights: Tensor | None  # (W, M)
    radius: Tensor | None  # (R, N)
    period: list[float] | None

    def tensors(self) -> list[Tensor | None]:
        """The five that have gradients."""
        return [self.query_pos, self.key_pos, self.value, self.rate, self.weights]

    @property
    def groups(self) -> int:
        """B if positions, weights or radius differ within the batch, else 1."""
        shared = [t for t in (self.query_pos, self.key_pos, self.weights, self.radius) if t is not None]
        return 1 if all(t.shape[0] == 1 for t in shared) else self.value.shape[0]

    def rows(self) -> tuple[int, int, int]:
        """Shape of lse, (G, H, N)."""
        return self.groups, self.rate.shape[0], self.query_pos.shape[-2]

    def stats_shape(self) -> tuple[int, int, int, int]:
        """On CUDA with the shift of each row's exponents, which the backward of the CPU finds again."""
        return *self.rows(), 3 if self.value.device.type == "cuda" else 2

    def out_shape(self) -> tuple[int, int, int, int]:
        return self.value.shape[0], *self.rows()[1:], self.value.shape[-1]

    def empty(self) -> bool:
        return 0 in (*self.rows(), self.value.shape[0], self.key_pos.shape[-2])


def _blanked(x: Inputs) -> Inputs:
    """Accumulation dtype, and the rows of keys of weight 0 blanked, so that NaN there cannot spread."""
    value = x.value.to(accumulation_dtype(x.value.dtype))
    if x.weights is None:
        return x._replace(value=value)
    dead = x.weights == 0
    gone = dead if x.key_pos.shape[0] == dead.shape[0] else dead.all(0, keepdim=True)
    return x._replace(
        value=value.masked_fill(dead[:, None, :, None], 0.0),
        key_pos=x.key_pos.masked_fill(gone[..., None], 0.0),
    )


def _check_values(x: Inputs) -> None:
    """Only on the CPU: elsewhere a look at the values would synchronise, and NaN comes out instead."""
    if x.value.device.type != "cpu":
        return
    for name, tensor in (("weights", x.weights), ("rate", x.rate), ("radius", x.radius)):
        if tensor is not None and not bool((tensor >= 0).all()):
            raise ValueError(
                f"position_attention: {name} must be >= 0 and not NaN, got a smallest value of "
                f"{tensor.detach().min().item()}"
            )
    for name, tensor in (("weights", x.weights), ("rate", x.rate)):
        if tensor is not None and bool(tensor.isinf().any()):
            raise ValueError(f"position_attention: {name} must be >= 0 and finite, got inf")


def _blocks(x: Inputs) -> Iterator[tuple[int, int]]:
    groups, heads, rows = x.rows()
    step = max(1, min(rows, CHUNK_SCORES // max(1, groups * heads * x.key_pos.shape[-2])))
    return ((start, min(rows, start + step)) for start in range(0, rows, step))


def _block(x: Inputs, start: int, stop: int) -> Inputs:
    radius = None if x.radius is None else x.radius[:, start:stop]
    return x._replace(query_pos=x.query_pos[:, start:stop], radius=radius)


def _difference(x: Inputs, axis: int) -> Tensor:
    """x_i - y_k along one axis, (P, n, M), to the nearest periodic image."""
    difference = x.query_pos[:, :, None, axis] - x.key_pos[:, None, :, axis]
    if x.period is not None and math.isfinite(x.period[axis]):
        difference = difference - x.period[axis] * torch.round(difference / x.period[axis])
    return difference


def _squared_distance(x: Inputs) -> Tensor:
    """(P, 1, n, M) in the accumulation dtype. Expansion of the square would cancel far from 0."""
    total = x.query_pos.new_zeros(*x.query_pos.shape[:2], x.key_pos.shape[1])
    for axis in range(x.query_pos.shape[-1]):
        total = total + _difference(x, axis).square()
    return total.to(x.rate.dtype)[:, None]


def _columns(value: Tensor) -> Tensor:
    """(B, HV, M, C) as (HV, M, B C): one matrix for the whole batch."""
    return value.permute(1, 2, 0, 3).reshape(*value.shape[1:3], value.shape[0] * value.shape[3])


def _mix(p: Tensor, value: Tensor) -> Tensor:
    """p (G, H, n, M) times value (B, HV, M, C): (B, H, n, C)."""
    batch, value_heads, keys, channels = value.shape
    if p.shape[0] == batch:
        return p @ value
    heads, rows = p.shape[1:3]
    columns = _columns(value)
    mixed = p.reshape(heads * rows, keys) @ columns[0] if value_heads == 1 else p[0] @ columns
    return mixed.reshape(heads, rows, batch, channels).permute(2, 0, 1, 3)


def _log_ratios(weights: Tensor) -> tuple[Tensor, Tensor]:
    """log(w_k / max w), 0 where w is 0, and log max w; the logarithm of a quotient, not a difference.

    A factor common to all weights, large or small, then leaves no rounding behind.
    """
    top = weights.detach().amax(-1, keepdim=True)
    top = torch.where(top == 0, 1.0, top)
    ratios = weights / top
    tiny = (ratios < torch.finfo(weights.dtype).tiny) & (weights > 0)
    dead = weights == 0
    near = torch.where(tiny | dead, 1.0, ratios).log()
    far = torch.where(tiny, weights, top).log() - top.log()
    return near + far, top.log()


def _probabilities(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """p_ik, (G, H, n, M); the sum over k of w_k / max w e^{s_ik - shift_i}, 1 if there is no key; shift_i."""
    d2 = _squared_distance(x)
    scores = -x.rate[:, None, None] * d2
    if x.weights is not None:
        log_ratios, _ = _log_ratios(x.weights)
        scores = scores + log_ratios[:, None, None, :]
        scores = scores.masked_fill(x.weights[:, None, None, :] == 0, -math.inf)
    if x.radius is not None:
        reach = x.radius.square()[:, None, :, None] * (1.0 + 8.0 * torch.finfo(d2.dtype).eps)
        scores = scores.masked_fill(d2 > reach, -math.inf)
    # The largest term becomes 1; a constant of the row, so it has no derivative.
    shift = scores.detach().amax(-1, keepdim=True)
    empty = shift == -math.inf
    terms = (scores - shift.masked_fill(empty, 0.0)).exp()
    total = torch.where(empty, 1.0, terms.sum(-1, keepdim=True))
    return terms / total, total, shift


def _attend(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse and (shift, sum) of a block of queries; differentiable twice."""
    p, total, shift = _probabilities(x)
    lse = (shift + total.log()).squeeze(-1)
    if x.weights is not None:
        lse = lse + _log_ratios(x.weights)[1][..., None]
    return _mix(p, x.value), lse, torch.cat([shift, total], -1).detach()


def forward(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Output in value's dtype; lse and stats in the accumulation dtype."""
    out = x.value.new_zeros(x.out_shape())
    lse = x.rate.new_full(x.rows(), -math.inf)
    stats = x.rate.new_zeros(x.stats_shape())
    _check_values(x)
    if x.empty():
        return out, lse, stats
    with torch.no_grad(), torch.autocast(x.value.device.type, enabled=False):
        x = _blanked(x)
        for start, stop in _blocks(x):
            part, lse[..., start:stop], stats[..., start:stop, :2] = _attend(_block(x, start, stop))
            out[..., start:stop, :] = part
    return out, lse, stats


class _Sums:
    """Gradients of the five inputs, added up over blocks of queries."""

    def __init__(self, given: Inputs, needs: list[bool]) -> None:
        self.given, self.needs = given, needs
        self.totals = [
            None if t is None or not need else torch.zeros_like(t, memory_format=torch.contiguous_format)
            for t, need in zip(given.tensors(), needs, strict=True)
        ]
        value = self.totals[2]
        if value is not None:  # sums of 16-bit numbers are kept in float32
            self.totals[2] = value.to(accumulation_dtype(value.dtype))

    def add(self, parts: list[Tensor | None], start: int, stop: int) -> None:
        for index, (total, part) in enumerate(zip(self.totals, parts, strict=True)):
            if total is None or part is None:
                continue
            target = total[:, start:stop] if index == 0 else total
            target += part

    def finished(self) -> list[Tensor | None]:
        """Each in its input's dtype; those of keys of weight 0 exactly 0 even where a query was NaN."""
        if self.given.weights is not None:
            dead = self.given.weights == 0
            _, key_pos, value, _, weights = self.totals
            if key_pos is not None:
                gone = dead if key_pos.shape[0] == dead.shape[0] else dead.all(0, keepdim=True)
                key_pos.masked_fill_(gone[..., None], 0.0)
            if value is not None:
                value.masked_fill_(dead[:, None, :, None], 0.0)
            if weights is not None:
                weights.masked_fill_(dead, 0.0)
        inputs = self.given.tensors()
        return [
            None if g is None or t is None else g.to(t.dtype)
            for g, t in zip(self.totals, inputs, strict=True)
        ]


def _block_gradients(
    x: Inputs, grad_out: Tensor, grad_lse: Tensor | None, needs: list[bool]
) -> list[Tensor | None]:
    p, _, shift = _probabilities(x)
    empty = shift == -math.inf  # no gradient, whatever comes in
    grad_out = torch.where(empty, 0.0, grad_out)
    batch, value_heads, _, channels = x.value.shape
    grads: list[Tensor | None] = [None] * DIFFERENTIABLE
    shared = p.shape[0] != batch
    columns = _columns(grad_out) if shared else grad_out  # (H, n, B C) or (B, H, n, C)
    if needs[2]:
        mixed = p.mT @ columns
        mixed = mixed if value_heads > 1 else mixed.sum(-3, keepdim=True)
        if shared:
            mixed = mixed.reshape(*mixed.shape[-3:-1], batch, channels).permute(2, 0, 1, 3)
        grads[2] = mixed
    if not (any(needs[:2]) or any(needs[3:])):
        return grads
    grad_p = columns @ (_columns(x.value) if shared else x.value).mT
    grad_row = (p * grad_p).sum(-1, keepdim=True)
    if grad_lse is not None:
        grad_row = grad_row - torch.where(empty, 0.0, grad_lse[..., None])
    grad_scores = p * (grad_p - grad_row)
    if needs[0] or needs[1]:
        grads[0], grads[1] = _position_gradients(x, (-x.rate[:, None, None] * grad_scores).sum(1))
    if needs[3]:
        grads[3] = -(grad_scores * _squared_distance(x)).sum((0, 2, 3))
    if needs[4] and x.weights is not None:
        grads[4] = (grad_scores.sum((1, 2)) / x.weights).sum_to_size(x.weights.shape)  # 0 / 0 cleared later
    return grads


def _position_gradients(x: Inputs, grad_d2: Tensor) -> tuple[Tensor, Tensor]:
    grad_d2 = grad_d2.sum_to_size(x.query_pos.shape[0], *grad_d2.shape[1:])
    grad_query_pos, grad_key_pos = torch.zeros_like(x.query_pos), torch.zeros_like(x.key_pos)
    for axis in range(x.query_pos.shape[-1]):
        moment = 2.0 * grad_d2 * _difference(x, axis)
        grad_query_pos[..., axis] = moment.sum(-1)
        grad_key_pos[..., axis] = -moment.sum(-2)
    return grad_query_pos, grad_key_pos


def backward(x: Inputs, grad_out: Tensor, grad_lse: Tensor | None, needs: list[bool]) -> list[Tensor | None]:
    """Gradients of the five differentiable inputs in their dtypes; None where not needed or absent."""
    sums = _Sums(x, needs)
    if not x.empty():
        with torch.no_grad(), torch.autocast(x.value.device.type, enabled=False):
            x = _blanked(x)
            for start, stop in _blocks(x):
                block_out = grad_out[..., start:stop, :].to(x.rate.dtype)
                block_lse = None if grad_lse is None else grad_lse[..., start:stop].to(x.rate.dtype)
                sums.add(_block_gradients(_block(x, start, stop), block_out, block_lse, needs), start, stop)
    return sums.finished()


def _leaves(x: Inputs) -> Inputs:
    """x as the inputs of a new graph."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in x.tensors()]
    return Inputs(*(*leaves, x.radius, x.period))  # type: ignore[arg-type]


def _gradients(x: Inputs, cotangents: list[Tensor]) -> list[Tensor | None]:
    """Differentiable gradients of one block with respect to the five inputs."""
    with torch.enable_grad(), torch.autocast(x.value.device.type, enabled=False):
        out, lse, _ = _attend(x)
        empty = lse == -math.inf
        seeds = [torch.where(empty.expand(out.shape[:-1])[..., None], 0.0, cotangents[0])]
        seeds += [torch.where(empty, 0.0, c) for c in cotangents[1:]]
        wanted = [t for t in x.tensors() if t is not None]
        found = iter(
            torch.autograd.grad((out, lse)[: len(seeds)], wanted, seeds, create_graph=True, allow_unused=True)
        )
    return [None if t is None else next(found) for t in x.tensors()]


def double_backward(
    x: Inputs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: list[bool],
    grad_grads: list[Tensor | None],
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Gradients of `backward`'s outputs with respect to grad_out, grad_lse and the five inputs.

    grad_grads: what arrives for each of backward's five outputs. Every block is computed again under autograd
    and differentiated twice, so memory stays O(N * chunk).
    """
    sums = _Sums(x, [True] * DIFFERENTIABLE)
    grad_grad_out = grad_out.new_zeros(grad_out.shape, dtype=x.rate.dtype)
    grad_grad_lse = None if grad_lse is None else grad_lse.new_zeros(grad_lse.shape, dtype=x.rate.dtype)
    if not x.empty():
        x = _blanked(x)
        for start, stop in _blocks(x):
            block = _leaves(_block(x, start, stop))
            cotangents = [grad_out[..., start:stop, :].to(x.rate.dtype).detach().requires_grad_()]
            if grad_lse is not None:
                cotangents.append(grad_lse[..., start:stop].to(x.rate.dtype).detach().requires_grad_())
            first = _gradients(block, cotangents)
            pairs = []
            for index, (f, need, gg) in enumerate(zip(first, needs, grad_grads, strict=True)):
                if f is None or not need or gg is None or not f.requires_grad:
                    continue
                incoming = gg[:, start:stop] if index == 0 else gg
                pairs.append((f, incoming.to(f.dtype)))
            if not pairs:
                continue
            inputs = [t for t in block.tensors() if t is not None]
            second = torch.autograd.grad(
                [f for f, _ in pairs], inputs + cotangents, [gg for _, gg in pairs], allow_unused=True
            )
            found = iter(second)
            sums.add([None if t is None else next(found) for t in block.tensors()], start, stop)
            part = next(found)
            if part is not None:
                grad_grad_out[..., start:stop, :] += part
            if grad_grad_lse is not None and (part := next(found)) is not None:
                grad_grad_lse[..., start:stop] += part
    if grad_lse is not None and grad_grad_lse is not None:
        grad_grad_lse = grad_grad_lse.to(grad_lse.dtype)
    return grad_grad_out.to(grad_out.dtype), grad_grad_lse, sums.finished()
