"""Continuum attention in PyTorch, a block of queries at a time: O(N * chunk) memory.

Serves what has no kernel: float masks, float64 positions of shorter queries, second derivatives, and devices
without a compiled kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._philox import dropout_keep, dropout_keep_at

# Scores held at a time, over all leading dimensions: 2^22 float32 numbers are 16 MB.
CHUNK_SCORES = 2**22


class Inputs(NamedTuple):
    """The arguments, as in the schema: first the eight that have gradients, then the others."""

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor | None
    attn_mask: Tensor | None
    query_pos: Tensor | None
    key_pos: Tensor | None
    rate: Tensor | None
    radius: Tensor | None
    seed: Tensor | None
    period: list[float] | None
    scale: float
    dropout_p: float
    is_causal: bool

    def tensors(self) -> list[Tensor | None]:
        """The eight that have gradients."""
        geometry = [self.query_pos, self.key_pos, self.rate]
        return [self.query, self.key, self.value, self.weights, self.attn_mask, *geometry]


DIFFERENTIABLE = 8


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _at_least(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None or x.dtype == torch.bool else x.to(torch.promote_types(x.dtype, dtype))


def _reduced(dead: Tensor, leads: torch.Size) -> Tensor:
    """dead (*L, M) for a tensor shared over some leading dimensions: dead only if dead for all sharers."""
    shared = [axis for axis, size in enumerate(leads) if size == 1]
    return dead.all(shared, keepdim=True) if shared else dead


def _prepared(x: Inputs) -> Inputs:
    """Accumulation dtype everywhere, and the rows of dead keys blanked, so that NaN there cannot spread."""
    dtype = accumulation_dtype(x.query.dtype)
    mask = x.attn_mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    key, value, key_pos = x.key.to(dtype), x.value.to(dtype), _at_least(x.key_pos, dtype)
    if x.weights is not None:
        dead = x.weights == 0
        key = key.masked_fill(dead[..., None], 0.0)
        value = value.masked_fill(dead[..., None], 0.0)
        if key_pos is not None:
            key_pos = key_pos.masked_fill(_reduced(dead, key_pos.shape[:-2])[..., None], 0.0)
    return x._replace(
        query=x.query.to(dtype),
        key=key,
        value=value,
        attn_mask=mask,
        query_pos=_at_least(x.query_pos, dtype),
        key_pos=key_pos,
        rate=None if x.rate is None else x.rate.to(dtype),
    )


def _check_values(x: Inputs) -> None:
    """Only on the CPU: elsewhere a look at the values would synchronise, and NaN comes out instead."""
    if x.query.device.type != "cpu":
        return
    for name, tensor in (("weights", x.weights), ("rate", x.rate), ("radius", x.radius)):
        if tensor is not None and not bool((tensor >= 0).all()):
            raise ValueError(
                f"continuum_attention: {name} must be >= 0 and not NaN, got a smallest value of "
                f"{tensor.detach().min().item()}"
            )
    if x.weights is not None and bool(x.weights.isinf().any()):
        raise ValueError("continuum_attention: weights must be >= 0 and finite, got inf")


def _blocks(x: Inputs) -> Iterator[tuple[int, int]]:
    rows, per_row = x.query.shape[-2], math.prod(x.query.shape[:-2]) * x.key.shape[-2]
    step = max(1, min(rows, CHUNK_SCORES // max(1, per_row)))
    return ((start, min(rows, start + step)) for start in range(0, rows, step))


def _rows(tensor: Tensor | None, start: int, stop: int, axis: int = -2) -> Tensor | None:
    """The rows of a tensor that has one for each query; a tensor with one for all is returned whole."""
    if tensor is None or tensor.shape[axis] == 1:
        return tensor
    return tensor.narrow(axis, start, stop - start)


def _block(x: Inputs, start: int, stop: int) -> Inputs:
    return x._replace(
        query=x.query[..., start:stop, :],
        attn_mask=_rows(x.attn_mask, start, stop),
        query_pos=_rows(x.query_pos, start, stop),
        radius=_rows(x.radius, start, stop, axis=-1),
    )


def _difference(x: Inputs, axis: int) -> Tensor:
    """x_i - y_k along one axis, to the nearest periodic image. Expansion would cancel far from 0."""
    assert x.query_pos is not None and x.key_pos is not None
    difference = x.query_pos[..., :, None, axis] - x.key_pos[..., None, :, axis]
    if x.period is not None and math.isfinite(x.period[axis]):
        difference = difference - x.period[axis] * torch.round(difference / x.period[axis])
    return difference


def _squared_distance(x: Inputs) -> Tensor:
    assert x.query_pos is not None and x.key_pos is not None
    total = x.query_pos.new_zeros(())
    for axis in range(x.query_pos.shape[-1]):
        total = total + _difference(x, axis).square()
    return total


def _softmax_parts(x: Inputs, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """w_k e^{s_ik - shift_i}, its sum over k (1 for a row with no key left) and shift_i (-inf there)."""
    # Scaled after the product: rounding scale * q would move all scores of a row together, and by more.
    scores = x.scale * (x.query @ x.key.mT)
    if x.query_pos is not None:
        d2 = _squared_distance(x)
        if x.rate is not None:
            scores = scores - x.rate[..., None, None] * d2.to(scores.dtype)
        if x.radius is not None:
            reach = x.radius.to(d2.dtype)[..., None].square() * (1.0 + 8.0 * torch.finfo(d2.dtype).eps)
            scores = scores.masked_fill(d2 > reach, -math.inf)
    if x.attn_mask is not None:
        if x.attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~x.attn_mask, -math.inf)
        else:
            scores = scores + x.attn_mask
    if x.is_causal:
        row = torch.arange(start, start + scores.shape[-2], device=scores.device)
        column = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores.masked_fill(column > row[:, None], -math.inf)
    logits = scores.detach()
    if x.weights is not None:
        scores = scores.masked_fill(x.weights[..., None, :] == 0, -math.inf)
        logits = scores.detach() + x.weights.detach()[..., None, :].log()
    # The largest term becomes 1 whatever the weights are; a constant of the row, so it has no derivative.
    shift = logits.amax(-1, keepdim=True)
    empty = shift == -math.inf
    exponents = scores - shift.masked_fill(empty, 0.0)
    if x.weights is None:
        terms = exponents.exp()
    else:
        # In two factors: where a weight is below 1e-38, e^exponent alone may be beyond the largest float.
        half = (0.5 * exponents).exp()
        terms = half * (half * x.weights[..., None, :])
    total = terms.sum(-1, keepdim=True)
    return terms, torch.where(empty, 1.0, total), shift


def _dropout(x: Inputs, start: int) -> Tensor | None:
    """The factor of each probability, 0 or 1 / (1 - p); None without dropout."""
    if x.seed is None:
        return None
    leads, rows, keys = tuple(x.query.shape[:-2]), x.query.shape[-2], x.key.shape[-2]
    if x.seed.numel() == 1:
        keep = dropout_keep(x.seed, x.dropout_p, leads, start, rows, keys)
    else:  # of a part of the queries and keys: the seed, and their places in the whole
        row, key = x.seed[1 + start : 1 + start + rows], x.seed[-keys:]
        keep = dropout_keep_at(x.seed[:1], x.dropout_p, leads, row, key)
    return keep.to(x.query.dtype) * (1.0 / (1.0 - x.dropout_p) if x.dropout_p < 1.0 else 0.0)


def _attend(x: Inputs, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse and (shift, sum) of a block of queries that begins at `start`; differentiable twice."""
    terms, total, shift = _softmax_parts(x, start)
    lse = (shift + total.log()).squeeze(-1)
    factor = _dropout(x, start)
    out = (terms if factor is None else terms * factor) @ x.value / total
    return out, lse, torch.cat([shift, total], -1).detach()


def forward(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Output in query's dtype; lse and stats in the accumulation dtype."""
    leads, rows = x.query.shape[:-2], x.query.shape[-2]
    dtype = accumulation_dtype(x.query.dtype)
    out = x.query.new_zeros(*leads, rows, x.value.shape[-1])
    lse = x.query.new_full((*leads, rows), -math.inf, dtype=dtype)
    stats = x.query.new_zeros(*leads, rows, 2, dtype=dtype)
    _check_values(x)
    if 0 in (*leads, rows, x.key.shape[-2]):
        return out, lse, stats
    with torch.no_grad(), torch.autocast(x.query.device.type, enabled=False):
        x = _prepared(x)
        for start, stop in _blocks(x):
            block_out, lse[..., start:stop], stats[..., start:stop, :] = _attend(
                _block(x, start, stop), start
            )
            out[..., start:stop, :] = block_out
    return out, lse, stats


def _zeros_like_inputs(x: Inputs) -> list[Tensor | None]:
    return [None if t is None or not t.is_floating_point() else t.new_zeros(t.shape) for t in x.tensors()]


def _finished(grads: list[Tensor | None], x: Inputs, dtypes: list[torch.dtype | None]) -> list[Tensor | None]:
    """Each gradient in its input's dtype; those of dead keys exactly 0 even where a query was NaN."""
    if x.weights is not None:
        dead = x.weights == 0
        for index in (1, 2, 3):
            total = grads[index]
            assert total is not None
            total.masked_fill_(dead if index == 3 else dead[..., None], 0.0)
    return [None if g is None else g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)]


def _add_rows(total: Tensor | None, part: Tensor, start: int, stop: int) -> None:
    target = _rows(total, start, stop)
    assert target is not None
    target += part.sum_to_size(target.shape)


def _accumulate(grads: list[Tensor | None], parts: list[Tensor | None], start: int, stop: int) -> None:
    """Add the gradients of one block of queries."""
    for index, (total, part) in enumerate(zip(grads, parts, strict=True)):
        if total is None or part is None:
            continue
        if index in (0, 4, 5):  # query, attn_mask, query_pos have a row for each query
            _add_rows(total, part, start, stop)
        else:
            total += part.sum_to_size(total.shape)


def _block_gradients(
    x: Inputs, start: int, grad_out: Tensor, grad_lse: Tensor | None, needs: list[bool]
) -> list[Tensor | None]:
    terms, total, shift = _softmax_parts(x, start)
    p = terms / total
    factor = _dropout(x, start)
    grad_p = grad_out @ x.value.mT
    kept = p
    if factor is not None:
        grad_p, kept = grad_p * factor, p * factor
    grad_row = (p * grad_p).sum(-1, keepdim=True)
    if grad_lse is not None:
        grad_row = grad_row - torch.where(shift == -math.inf, 0.0, grad_lse[..., None])
    grad_scores = p * (grad_p - grad_row)
    grads: list[Tensor | None] = [None] * DIFFERENTIABLE
    grads[0] = x.scale * (grad_scores @ x.key)
    grads[1] = x.scale * (grad_scores.mT @ x.query)
    grads[2] = kept.mT @ grad_out
    if x.weights is not None:
        grads[3] = grad_scores.sum(-2) / x.weights  # 0 / 0 at dead keys, cleared at the end
    if needs[4] and x.attn_mask is not None:
        grads[4] = grad_scores
    if x.rate is not None and (needs[5] or needs[6]):
        grads[5], grads[6] = _position_gradients(x, -x.rate[..., None, None] * grad_scores)
    if x.rate is not None and needs[7]:
        grads[7] = -(grad_scores * _squared_distance(x)).sum((-2, -1)).to(x.rate.dtype)
    return grads


def _position_gradients(x: Inputs, grad_d2: Tensor) -> tuple[Tensor, Tensor]:
    assert x.query_pos is not None and x.key_pos is not None
    leads = torch.broadcast_shapes(x.query_pos.shape[:-2], x.key_pos.shape[:-2])
    grad_d2 = grad_d2.sum_to_size(*leads, *grad_d2.shape[-2:])
    grad_query_pos, grad_key_pos = [], []
    for axis in range(x.query_pos.shape[-1]):
        moment = 2.0 * grad_d2 * _difference(x, axis)
        grad_query_pos.append(moment.sum(-1))
        grad_key_pos.append(-moment.sum(-2))
    if not grad_query_pos:
        return torch.zeros_like(x.query_pos), torch.zeros_like(x.key_pos)
    return torch.stack(grad_query_pos, -1), torch.stack(grad_key_pos, -1)


def backward(x: Inputs, grad_out: Tensor, grad_lse: Tensor | None, needs: list[bool]) -> list[Tensor | None]:
    """Gradients of the eight differentiable inputs (None where the input is None), in the inputs' dtypes."""
    dtypes = [None if t is None else t.dtype for t in x.tensors()]
    with torch.no_grad(), torch.autocast(x.query.device.type, enabled=False):
        x = _prepared(x)
        grads = _zeros_like_inputs(x)
        if 0 not in (*x.query.shape[:-1], x.key.shape[-2]):
            for start, stop in _blocks(x):
                block_out = grad_out[..., start:stop, :].to(x.query.dtype)
                block_lse = None if grad_lse is None else grad_lse[..., start:stop].to(x.query.dtype)
                parts = _block_gradients(_block(x, start, stop), start, block_out, block_lse, needs)
                _accumulate(grads, parts, start, stop)
    return _finished(grads, x, dtypes)


def double_backward(
    x: Inputs, grad_out: Tensor, grad_lse: Tensor | None, grad_grads: list[Tensor | None]
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Gradients of `backward`'s outputs with respect to grad_out, grad_lse and the eight inputs.

    grad_grads: what arrives for each of backward's eight outputs. Every block is computed again under
        autograd and
    differentiated twice, so memory stays O(N * chunk).
    """
    dtypes = [None if t is None else t.dtype for t in x.tensors()]
    x = _prepared(x)
    grads = _zeros_like_inputs(x)
    grad_grad_out = grad_out.new_zeros(grad_out.shape, dtype=x.query.dtype)
    grad_grad_lse = None if grad_lse is None else grad_lse.new_zeros(grad_lse.shape, dtype=x.query.dtype)
    if 0 in (*x.query.shape[:-1], x.key.shape[-2]):
        return grad_grad_out.to(grad_out.dtype), grad_grad_lse, _finished(grads, x, dtypes)
    for start, stop in _blocks(x):
        block = _block(x, start, stop)
        leaves = [_leaf(t) for t in block.tensors()]
        inputs = [t for t in leaves if t is not None]
        block_out = grad_out[..., start:stop, :].to(x.query.dtype).detach().requires_grad_()
        cotangents = [block_out]
        if grad_lse is not None:
            cotangents.append(grad_lse[..., start:stop].to(x.query.dtype).detach().requires_grad_())
        fields = dict(zip(Inputs._fields, leaves, strict=False))
        if leaves[4] is None:
            fields["attn_mask"] = block.attn_mask  # a bool mask is no leaf
        with torch.enable_grad(), torch.autocast(x.query.device.type, enabled=False):
            outputs = _attend(_replaced(block, fields), start)[: len(cotangents)]
            first = torch.autograd.grad(outputs, inputs, cotangents, create_graph=True, allow_unused=True)
        incoming = [
            _rows(gg, start, stop) if index in (0, 4, 5) else gg
            for index, gg in enumerate(grad_grads)
            if leaves[index] is not None
        ]
        pairs = [
            (f, gg.to(f.dtype).expand(f.shape))
            for f, gg in zip(first, incoming, strict=True)
            if f is not None and gg is not None and f.requires_grad
        ]
        if not pairs:
            continue
        second = torch.autograd.grad(
            [f for f, _ in pairs], inputs + cotangents, [gg for _, gg in pairs], allow_unused=True
        )
        found = iter(second)
        _accumulate(grads, [None if leaf is None else next(found) for leaf in leaves], start, stop)
        _add_rows(grad_grad_out, _or_zeros(next(found), block_out), start, stop)
        if grad_grad_lse is not None:
            part = next(found)
            if part is not None:
                grad_grad_lse[..., start:stop] += part
    if grad_lse is not None and grad_grad_lse is not None:
        grad_grad_lse = grad_grad_lse.to(grad_lse.dtype)
    return grad_grad_out.to(grad_out.dtype), grad_grad_lse, _finished(grads, x, dtypes)


def _replaced(x: Inputs, fields: dict[str, Any]) -> Inputs:
    return x._replace(**fields)


def _leaf(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None or not tensor.is_floating_point() else tensor.detach().requires_grad_()


def _or_zeros(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor
