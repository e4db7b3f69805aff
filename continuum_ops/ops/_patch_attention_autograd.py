"""Implementations, shapes and derivatives of the registered patch attention operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends import warn_without_extension
from . import _direct as direct
from . import _patch_attention_chunked as chunked
from . import _patch_attention_cuda as cuda
from ._library import LIBRARY
from ._patch_attention_chunked import DIFFERENTIABLE, Inputs


def _or_empty(grad: Tensor | None, query: Tensor) -> Tensor:
    """An operator returns tensors only: (0,) stands for a gradient that is not needed."""
    return query.new_empty(0) if grad is None else grad


def _backward_arguments(args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None, Inputs, Tensor, list[bool]]:
    """grad_out, grad_lse, inputs, probabilities and needs out of the arguments of the backward."""
    grad_out, grad_lse, query, key, value, weights, _, probabilities, patch_size, scale, needs = args
    return grad_out, grad_lse, Inputs(query, key, value, weights, patch_size, scale), probabilities, needs


# --- the operators in PyTorch, where the device has no kernel ------------------------------------


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Inputs(*args)
    if x.query.device.type == "cpu":
        warn_without_extension()
    return chunked.forward(x)


def _backward(*args: Any) -> tuple[Tensor, ...]:
    grad_out, grad_lse, x, probabilities, needs = _backward_arguments(args)
    return tuple(_or_empty(g, x.query) for g in chunked.backward(x, grad_out, grad_lse, probabilities, needs))


forward_op = torch.ops.continuum_ops.patch_attention_forward.default
plain_op = direct.kernel("patch_attention_plain")
_plain_forward = direct.kernel("patch_attention_plain_forward")
_plain_backward = direct.kernel("patch_attention_plain_backward")
_backward_op = torch.ops.continuum_ops.patch_attention_backward.default
LIBRARY.impl("patch_attention_forward", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("patch_attention_backward", _backward, "CompositeExplicitAutograd")
cuda.register(_forward, _backward)

# --- shapes and derivatives ----------------------------------------------------------------------


@torch.library.register_fake("continuum_ops::patch_attention_forward", lib=LIBRARY)
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Inputs(*args)
    return (
        x.query.new_empty(x.out_shape()),
        x.query.new_empty(x.rows(), dtype=x.dtype),
        x.query.new_empty(x.kept(), dtype=x.dtype),
    )


@torch.library.register_fake("continuum_ops::patch_attention_backward", lib=LIBRARY)
def _(*args: Any) -> tuple[Tensor, ...]:
    _, _, x, _, needs = _backward_arguments(args)
    return _fake_gradients(x, needs)


def _fake_gradients(x: Inputs, needs: list[bool]) -> tuple[Tensor, ...]:
    return tuple(
        _or_empty(None if t is None or not need else t.new_empty(t.shape), x.query)
        for t, need in zip(x.tensors(), needs, strict=True)
    )


def _prepared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    size: int,
    weights: Tensor | None = None,
    scale: float | None = None,
    second: int = 0,
    third: int = 0,
) -> Inputs:
    """The arguments of the operators for plain tensors, as the others have them."""
    direct.on_one_device(query, key, value, weights)
    grid = query.shape[1:-2]
    patch_size = [size, second or size, third or size][: len(grid)]
    if weights is not None:
        weights = weights if weights.dim() > len(grid) else weights.unsqueeze(0)
        weights = weights.expand(weights.shape[0], *grid)
        scale = 1.0 if scale is None else scale
    return Inputs(query, key, value, weights, patch_size, scale)


@torch.library.register_fake("continuum_ops::patch_attention_plain", lib=LIBRARY)
def _(*args: Any) -> Tensor:
    x = _prepared(*args)
    return x.query.new_empty(x.out_shape())


@torch.library.register_fake("continuum_ops::patch_attention_plain_forward", lib=LIBRARY)
def _(*args: Any) -> tuple[Tensor, Tensor]:
    x = _prepared(*args)
    return x.query.new_empty(x.out_shape()), x.query.new_empty(x.kept(), dtype=x.dtype)


@torch.library.register_fake("continuum_ops::patch_attention_plain_backward", lib=LIBRARY)
def _(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    _, needs, *inputs = args
    return _fake_gradients(_prepared(*inputs), needs)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, lse, probabilities = output
    ctx.save_for_backward(*inputs[:DIFFERENTIABLE], lse, probabilities)
    ctx.patch_size, ctx.scale = inputs[DIFFERENTIABLE:]
    ctx.mark_non_differentiable(probabilities)
    ctx.set_materialize_grads(False)


def _derivative(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * len(Inputs._fields)
    saved = ctx.saved_tensors  # read once: activation checkpointing hands each out once
    x = Inputs(*(*saved[:DIFFERENTIABLE], ctx.patch_size, ctx.scale))
    if grad_out is None:
        grad_out = x.query.new_zeros(()).expand(x.out_shape())
    needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
    grads = direct.call(_backward_op, grad_out, grad_lse, *saved, ctx.patch_size, ctx.scale, needs)
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), None, None)


torch.library.register_autograd(
    "continuum_ops::patch_attention_forward", _derivative, setup_context=_setup, lib=LIBRARY
)


class Plain(torch.autograd.Function):
    """The same derivative for what most calls have, without what the registration does for transforms."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        size: int,
        weights: Tensor | None = None,
        *options: Any,  # scale, sizes of the other axes; left out, as every argument takes time, where none
    ) -> Tensor:
        if query.numel() * key.numel() <= direct.CHEAP:
            if weights is None and not options:
                out = plain_op(query, key, value, size)
            else:
                out = plain_op(query, key, value, size, weights, *options)
            ctx.save_for_backward(query, key, value, weights)
        else:
            out, probabilities = _plain_forward(query, key, value, size, weights, *options)
            ctx.save_for_backward(query, key, value, weights, probabilities)
        ctx.size = size
        if options:
            ctx.options = options
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights, *records = ctx.saved_tensors
        inputs = (query, key, value, ctx.size, weights, *getattr(ctx, "options", ()))
        needs = (*ctx.needs_input_grad[:3], weights is not None and ctx.needs_input_grad[4])
        if direct.differentiated():
            (probabilities,) = records or _plain_forward(*inputs)[1:]
            x = _prepared(*inputs)
            lse = x.query.new_zeros(x.rows(), dtype=x.dtype)  # the kernel does not read it
            grads = _backward_op(
                grad_out, None, *x.tensors(), lse, probabilities, x.patch_size, x.scale, list(needs)
            )
        else:
            (probabilities,) = records or (None,)
            grads = _plain_backward(grad_out, probabilities, needs, *inputs)
        # Where weights were broadcast their gradient is too: autograd sums what they had not.
        q, k, v, w = (g if need else None for g, need in zip(grads, needs, strict=True))
        return q, k, v, None, w, None, None, None


apply_plain = direct.applier(Plain)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad_out, grad_lse, x, _, needs = _backward_arguments(inputs)
    ctx.save_for_backward(grad_out, grad_lse, *x.tensors())  # not lse, probabilities: computed again
    ctx.options = (x.patch_size, x.scale, needs)
    ctx.set_materialize_grads(False)


def _second_derivative(ctx: Any, *grad_grads: Tensor | None) -> tuple[Tensor | None, ...]:
    first, second, *rest = _DoubleBackward.apply(ctx.options, *ctx.saved_tensors, *grad_grads)
    return (first, second, *rest, *(None,) * 5)


torch.library.register_autograd(
    "continuum_ops::patch_attention_backward",
    _second_derivative,
    setup_context=_setup_backward,
    lib=LIBRARY,
)


class _DoubleBackward(torch.autograd.Function):
    """Second derivatives, which end here."""

    @staticmethod
    def forward(
        ctx: Any,
        options: tuple[Any, ...],
        grad_out: Tensor,
        grad_lse: Tensor | None,
        *tensors: Any,
    ) -> tuple[Tensor | None, ...]:
        patch_size, scale, needs = options
        inputs, grad_grads = tensors[:DIFFERENTIABLE], list(tensors[DIFFERENTIABLE:])
        return chunked.double_backward(
            Inputs(*(*inputs, patch_size, scale)), grad_out, grad_lse, needs, grad_grads
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        raise RuntimeError(
            "patch_attention has first and second derivatives; third derivatives are not implemented"
        )
