"""Implementation of the registered operators behind Galerkin and Fourier attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _direct as direct
from ._library import LIBRARY

_ops = torch.ops.continuum_ops
small_op = direct.kernel("galerkin_attention_small")
_small_backward = direct.kernel("galerkin_attention_small_backward")


def _attention(query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None) -> Tensor:
    """q (k^T W v), composed of differentiable operators: torch derives every derivative and transform."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    device = query.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return _products(query, key, value, weights, dtype)
    with torch.autocast(device, enabled=False):  # it would take the products back to 16 bits
        return _products(query, key, value, weights, dtype)


def _products(
    query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return (query.to(dtype) @ gram(key.to(dtype), value.to(dtype), weights)).to(query.dtype)


def gram(k: Tensor, v: Tensor, weights: Tensor | None) -> Tensor:
    """k^T W v, in the dtype of k and v."""
    if weights is None:
        keys = k.shape[-2]
        return (k.transpose(-2, -1) @ v) * (1.0 / keys if keys > 0 else 0.0)
    w = weights.to(k.dtype)
    w = w + torch.ops.continuum_ops.check_weights(w.detach())
    dead = w == 0
    if _none(dead):
        return (k * w.unsqueeze(-1)).transpose(-2, -1) @ v
    # A row of weight 0 does not exist, forward and backward: blanked on both sides of the product.
    rows = dead.unsqueeze(-1)
    weighted = (k * w.masked_fill(dead, 0.0).unsqueeze(-1)).masked_fill_(rows, 0.0)
    return weighted.transpose(-2, -1) @ v.masked_fill(rows, 0.0)


class Small(torch.autograd.Function):
    """The kernel for small problems; where its derivative is differentiated again, that of the products."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(query, key, value, weights)
        return small_op(query, key, value, weights)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad
        if direct.differentiated():
            return _vector_jacobian(inputs, needed, grad_out)
        query, key, value, weights = _small_backward(grad_out, *inputs, needed[3])
        return query, key, value, weights if needed[3] else None  # autograd sums what was broadcast


apply_small = direct.applier(Small)


def _vector_jacobian(
    inputs: tuple[Any, ...], needed: tuple[bool, ...], grad_out: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of the product, differentiable where grad mode is on."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: partial derivatives. An input may be another one, or computed from it.
        inputs = tuple(t.view_as(t) if need else t for t, need in zip(inputs, needed, strict=True))
        out = _ops.galerkin_attention.default(*inputs)
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
        grads = iter(torch.autograd.grad(out, wanted, grad_out, create_graph=create_graph))
    return tuple(next(grads) if need else None for need in needed)


def _none(dead: Tensor) -> bool:
    """That no row is dead, where a look at the values is free: at real tensors on the CPU.

    Blanking costs half as much as the product there; elsewhere it is done without a look.
    """
    if type(dead) is not Tensor or dead.device.type != "cpu":
        return False
    try:
        return not bool(dead.any())
    except RuntimeError:  # under vmap there is not one answer
        return False


def _check_weights(weights: Tensor) -> Tensor:
    """A 0 for each valid weight; opaque, so that values are looked at under torch.compile as well."""
    valid = (weights >= 0) & (weights < math.inf)
    if weights.device.type == "cpu":
        if not bool(valid.all()):
            worst = weights[~valid][0].item()
            raise ValueError(f"weights must be >= 0 and finite, got {worst:g}")
        return torch.zeros_like(weights)
    return torch.where(valid, 0.0, math.nan).to(weights.dtype)


LIBRARY.impl("galerkin_attention", _attention, "CompositeImplicitAutograd")
LIBRARY.impl("galerkin_attention", _attention, "FuncTorchBatched")  # vmap: the products have batching rules
LIBRARY.impl("check_weights", _check_weights, "CompositeExplicitAutograd")


@torch.library.register_fake("continuum_ops::galerkin_attention_small", lib=LIBRARY)
def _(query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None) -> Tensor:
    direct.on_one_device(query, key, value, weights)
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@torch.library.register_fake("continuum_ops::galerkin_attention_small_backward", lib=LIBRARY)
def _(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None, weights_grad: bool
) -> tuple[Tensor, ...]:
    grad_weights = query.new_empty(key.shape[:-1] if weights is not None and weights_grad else 0)
    return (*(t.new_empty(t.shape) for t in (query, key, value)), grad_weights)


@torch.library.register_fake("continuum_ops::check_weights", lib=LIBRARY)
def _(weights: Tensor) -> Tensor:
    return torch.empty_like(weights)


@torch.library.register_vmap("continuum_ops::check_weights", lib=LIBRARY)
def _(info: object, in_dims: tuple[int | None, ...], weights: Tensor) -> tuple[Tensor, int | None]:
    return torch.ops.continuum_ops.check_weights(weights), in_dims[0]
