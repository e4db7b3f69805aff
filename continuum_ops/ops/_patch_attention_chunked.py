"""Patch attention in PyTorch: rearranged matrices and batched products, some query patches at a time.

Serves what has no kernel: second derivatives, machines without a compiler, and CUDA without its library,
where the products are batched BLAS. Memory is O(points) and the scores of one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Scores held at a time, over batch and heads: 2^22 float32 numbers are 16 MB.
CHUNK_SCORES = 2**22
DIFFERENTIABLE = 4


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def cell_volume(query: Tensor) -> float:
    """1 / (points of the grid), which no scale stands for."""
    return 1.0 / max(1, math.prod(query.shape[1:-2]))


class Inputs(NamedTuple):
    """The arguments, as in the schema: first the four that have gradients."""

    query: Tensor  # (B, *grid, H, D)
    key: Tensor  # (B, *kgrid, H, D)
    value: Tensor  # (B, *kgrid, H, Dv)
    weights: Tensor | None  # (W, *grid), W = 1 or B
    patch_size: list[int]
    scale: float | None

    def tensors(self) -> list[Tensor | None]:
        """The four that have gradients."""
        return [self.query, self.key, self.value, self.weights]

    @property
    def dtype(self) -> torch.dtype:
        return accumulation_dtype(self.query.dtype)

    @property
    def factor(self) -> float:
        """Of the scores."""
        return cell_volume(self.query) if self.scale is None else self.scale

    def patches(self, tensor: Tensor) -> int:
        """How many patches a tensor (B, *grid, H, C) has."""
        return math.prod(n // p for n, p in zip(tensor.shape[1:-2], self.patch_size, strict=True))

    def rows(self) -> tuple[int, int, int]:
        """Shape of lse, (B, H, P)."""
        return self.query.shape[0], self.query.shape[-2], self.patches(self.query)

    def out_shape(self) -> tuple[int, ...]:
        return (*self.query.shape[:-1], self.value.shape[-1])

    def kept(self) -> tuple[int, ...]:
        """Shape of the probabilities that the forward keeps for the backward."""
        shape = (*self.rows(), self.patches(self.key))
        return shape if math.prod(shape) <= self.query.numel() else (0,)


class Matrices(NamedTuple):
    """The arguments by patches, points and channels of a patch flattened to one row; accumulation dtype."""

    query: Tensor  # (B, H, P, L D), rows of weight 0 blanked
    key: Tensor  # (B, H, Pk, L D), its hidden rows blanked
    value: Tensor  # (B, H, Pk, L Dv)
    weights: Tensor | None  # (W, 1, P, L)
    hidden: Tensor | None  # (B, H, Pk, L): rows of key that are not finite, where weights may hide them

    def block(self, start: int, stop: int) -> Matrices:
        weights = None if self.weights is None else self.weights[:, :, start:stop]
        return self._replace(query=self.query[:, :, start:stop], weights=weights)


def to_patches(tensor: Tensor, patch_size: list[int]) -> Tensor:
    """(B, *grid, H, C) as (B, H, P, L C)."""
    axes = len(patch_size)
    for axis in reversed(range(axes)):
        size = patch_size[axis]
        tensor = tensor.unflatten(1 + axis, (tensor.shape[1 + axis] // size, size))
    head = 1 + 2 * axes
    outer, inner = [1 + 2 * i for i in range(axes)], [2 + 2 * i for i in range(axes)]
    tensor = tensor.permute(0, head, *outer, *inner, head + 1)
    shape = tensor.shape
    return tensor.reshape(*shape[:2], math.prod(shape[2 : 2 + axes]), math.prod(shape[2 + axes :]))


def from_patches(rows: Tensor, grid: torch.Size, patch_size: list[int], channels: int) -> Tensor:
    """(B, H, P, L C) as (B, *grid, H, C), contiguous."""
    axes = len(patch_size)
    counts = [n // p for n, p in zip(grid, patch_size, strict=True)]
    batch, heads = rows.shape[:2]
    rows = rows.reshape(batch, heads, *counts, *patch_size, channels)
    order = [axis for i in range(axes) for axis in (2 + i, 2 + axes + i)]
    return rows.permute(0, *order, 1, 2 + 2 * axes).contiguous().view(batch, *grid, heads, channels)


def _check_values(x: Inputs) -> None:
    """Only on the CPU: elsewhere a look at the values would synchronise, and NaN comes out instead."""
    if x.weights is None or x.weights.device.type != "cpu":
        return
    wrong = ~((x.weights >= 0) & (x.weights < math.inf))
    if bool(wrong.any()):
        worst = x.weights.detach()[wrong][0].item()
        raise ValueError(f"patch_attention: weights must be >= 0 and finite, got {worst:g}")


def _matrices(x: Inputs, look: bool = True) -> Matrices:
    """With a look at values on the CPU, where it is cheaper than to blank what is not there."""
    query, key, value = (to_patches(t.to(x.dtype), x.patch_size) for t in (x.query, x.key, x.value))
    if x.weights is None:
        return Matrices(query, key, value, None, None)
    weights = to_patches(x.weights[..., None, None], x.patch_size)
    weights = torch.where((weights >= 0) & (weights < math.inf), weights, math.nan)
    dead = weights == 0
    points = weights.shape[-1]
    query = _points(query, points).masked_fill(dead[..., None], 0.0).flatten(-2)
    on_cpu = look and weights.device.type == "cpu"
    if on_cpu and not bool(dead.any()):
        return Matrices(query, key, value, weights, None)
    hidden = ~_points(key, points).isfinite().all(-1)
    if on_cpu and not bool(hidden.any()):
        return Matrices(query, key, value, weights, None)
    key = _points(key, points).masked_fill(hidden[..., None], 0.0).flatten(-2)
    return Matrices(query, key, value, weights, hidden)


def _points(rows: Tensor, points: int) -> Tensor:
    """(..., L C) as (..., L, C)."""
    return rows.unflatten(-1, (points, rows.shape[-1] // points))


def _weighted(m: Matrices, rows: Tensor) -> Tensor:
    """w_p(x) times rows (B, H, n, L D); 0 where the weight is, whatever stands there."""
    if m.weights is None:
        return rows
    weights, rows = m.weights[..., None], _points(rows, m.weights.shape[-1])
    return (weights * rows.masked_fill(weights == 0, 0.0)).flatten(-2)


def _scores(m: Matrices, scale: float) -> Tensor:
    """(B, H, n, Pk)."""
    scores = scale * (_weighted(m, m.query) @ m.key.mT)
    if m.hidden is None or m.weights is None:
        return scores
    seen = (m.weights != 0).to(scores.dtype) @ m.hidden.to(scores.dtype).mT
    return scores.masked_fill(seen > 0, math.nan)


def _probabilities(m: Matrices, scale: float) -> Tensor:
    return _scores(m, scale).softmax(-1)


def _blocks(x: Inputs) -> Iterator[tuple[int, int]]:
    batch, heads, rows = x.rows()
    step = max(1, min(rows, CHUNK_SCORES // max(1, batch * heads * x.patches(x.key))))
    return ((start, min(rows, start + step)) for start in range(0, rows, step))


def forward(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the kept probabilities."""
    with torch.no_grad(), torch.autocast(x.query.device.type, enabled=False):
        _check_values(x)
        m = _matrices(x)
        rows = m.query.new_empty(*x.rows(), m.value.shape[-1])
        lse = m.query.new_empty(x.rows())
        kept = m.query.new_empty(x.kept())
        for start, stop in _blocks(x):
            scores = _scores(m.block(start, stop), x.factor)
            lse[:, :, start:stop] = scores.logsumexp(-1)
            p = scores.softmax(-1)
            rows[:, :, start:stop] = p @ m.value
            if kept.dim() == 4:
                kept[:, :, start:stop] = p
        out = from_patches(rows, x.query.shape[1:-2], x.patch_size, x.value.shape[-1])
        return out.to(x.query.dtype), lse, kept


def composite(x: Inputs) -> tuple[Tensor, Tensor]:
    """out and lse out-of-place, without a look at a value: torch.func transforms pass through."""
    m = _matrices(x, look=False)
    parts = [_scores(m.block(start, stop), x.factor) for start, stop in _blocks(x)]
    if not parts:
        return x.query.new_zeros(x.out_shape()), m.query.new_zeros(x.rows())
    rows = torch.cat([s.softmax(-1) @ m.value for s in parts], 2)
    out = from_patches(rows, x.query.shape[1:-2], x.patch_size, x.value.shape[-1])
    return out.to(x.query.dtype), torch.cat([s.logsumexp(-1) for s in parts], 2)


def _block_backward(
    m: Matrices, p: Tensor, grad: Tensor, grad_lse: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the query rows and weights (summed over heads) of a block, its parts of key's and value's.

    Made of differentiable operators: its own derivative is the second one.
    """
    grad_p = grad @ m.value.mT
    grad_s = p * (grad_p - (p * grad_p).sum(-1, keepdim=True))
    if grad_lse is not None:
        grad_s = grad_s + p * grad_lse[..., None]
    grad_s = scale * grad_s
    mixed = grad_s @ m.key
    grad_query = _weighted(m, mixed)
    grad_key = grad_s.mT @ _weighted(m, m.query)
    grad_value = p.mT @ grad
    if m.weights is None:
        return grad_query, grad_key, grad_value, None
    product = _points(mixed * m.query, m.weights.shape[-1]).sum(-1).masked_fill(m.weights == 0, 0.0)
    return grad_query, grad_key, grad_value, product.sum(1, keepdim=True)


def _grad_rows(x: Inputs, grad_out: Tensor) -> Tensor:
    return to_patches(grad_out.to(x.dtype), x.patch_size)


def _finish(x: Inputs, rows: list[Tensor | None], needs: list[bool]) -> list[Tensor | None]:
    """Gradients by patches as those of the arguments."""
    grads: list[Tensor | None] = []
    for tensor, grad, need in zip(x.tensors(), rows, needs, strict=True):
        if tensor is None or grad is None or not need:
            grads.append(None)
        elif tensor is x.weights:
            full = from_patches(grad, tensor.shape[1:], x.patch_size, 1)[..., 0, 0]
            grads.append(full.sum_to_size(tensor.shape))
        else:
            full = from_patches(grad, tensor.shape[1:-2], x.patch_size, tensor.shape[-1])
            grads.append(full.to(tensor.dtype))
    return grads


def backward(
    x: Inputs, grad_out: Tensor, grad_lse: Tensor | None, probabilities: Tensor, needs: list[bool]
) -> list[Tensor | None]:
    """Gradients of the four tensors that are needed, None for the others."""
    with torch.no_grad(), torch.autocast(x.query.device.type, enabled=False):
        m, grad = _matrices(x), _grad_rows(x, grad_out)
        query, key, value = torch.empty_like(m.query), torch.zeros_like(m.key), torch.zeros_like(m.value)
        weights = None if m.weights is None else m.query.new_empty(m.query.shape[0], 1, *m.weights.shape[2:])
        for start, stop in _blocks(x):
            b = m.block(start, stop)
            kept = probabilities.dim() == 4
            p = probabilities[:, :, start:stop] if kept else _probabilities(b, x.factor)
            gl = None if grad_lse is None else grad_lse[:, :, start:stop]
            dq, dk, dv, dw = _block_backward(b, p, grad[:, :, start:stop], gl, x.factor)
            query[:, :, start:stop] = dq
            key += dk
            value += dv
            if weights is not None and dw is not None:
                weights[:, :, start:stop] = dw
        return _finish(x, [query, key, value, weights], needs)


def double_backward(
    x: Inputs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: list[bool],
    grad_grads: list[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """The derivative of :func:`backward`: of grad_out, grad_lse and the four tensors, None where it is 0.

    A block of query patches is a function of its own rows and of all keys and values.
    """
    with torch.enable_grad(), torch.autocast(x.query.device.type, enabled=False):
        tensors: list[Any] = [None if t is None else t.detach().requires_grad_() for t in x.tensors()]
        x = Inputs(*(*tensors, x.patch_size, x.scale))
        grad_out = grad_out.detach().requires_grad_()
        grad_lse = None if grad_lse is None else grad_lse.detach().requires_grad_()
        leaves = [t for t in (grad_out, grad_lse, *tensors) if t is not None]
        m, grad = _matrices(x), _grad_rows(x, grad_out)
        inner = [t for t in (grad, grad_lse, m.query, m.key, m.value, m.weights) if t is not None]
        cut = [t.detach().requires_grad_() for t in inner]
        parts = iter(cut)
        grad_cut = next(parts)
        lse_cut = None if grad_lse is None else next(parts)
        m_cut = Matrices(next(parts), next(parts), next(parts), next(parts, None), m.hidden)
        seeds = [None if g is None else _seed(x, g, t) for g, t in zip(grad_grads, tensors, strict=True)]
        for start, stop in _blocks(x):
            b = m_cut.block(start, stop)
            gl = None if lse_cut is None else lse_cut[:, :, start:stop]
            p = _probabilities(b, x.factor)
            rows = _block_backward(b, p, grad_cut[:, :, start:stop], gl, x.factor)
            total = [
                (r * (s if i in (1, 2) else s[:, :, start:stop])).sum()
                for i, (r, s, need) in enumerate(zip(rows, seeds, needs, strict=True))
                if r is not None and s is not None and need
            ]
            if total:
                torch.autograd.backward(sum(total[1:], total[0]), inputs=cut)
        live = [(t, c.grad) for t, c in zip(inner, cut, strict=True) if c.grad is not None]
        if not live:
            return (None,) * (2 + DIFFERENTIABLE)
        outer = [t for t, _ in live]
        grads = torch.autograd.grad(outer, leaves, [g for _, g in live], allow_unused=True)
        it = iter(grads)
        return tuple(None if t is None else next(it) for t in (grad_out, grad_lse, *tensors))


def _seed(x: Inputs, grad: Tensor, tensor: Tensor | None) -> Tensor:
    """The gradient of a gradient, by patches."""
    if tensor is x.weights:
        return to_patches(grad[..., None, None], x.patch_size)
    return to_patches(grad.to(x.dtype), x.patch_size)
