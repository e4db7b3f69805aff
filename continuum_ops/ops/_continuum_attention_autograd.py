"""Implementations, shapes and derivatives of the registered continuum attention operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..backends import warn_without_extension
from . import _continuum_attention_chunked as chunked
from . import _direct as direct
from ._continuum_attention_chunked import Inputs, accumulation_dtype
from ._library import LIBRARY

# --- the operators that have kernels; PyTorch where the device has none --------------------------


# Tensors among the inputs, which come first; outputs of the backward, and their places among the inputs.
TENSORS = 10
PLACES = (0, 1, 2, 3, 5, 6, 7)


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    if args[0].device.type == "cpu":
        warn_without_extension()
    return chunked.forward(Inputs(*args))


def _backward(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    x, wanted = Inputs(*args[:TENSORS], *args[TENSORS + 2 : -3]), _wanted(args)
    needs = [index in wanted for index in range(chunked.DIFFERENTIABLE)]
    grads = chunked.backward(x, grad_out, grad_lse, needs)
    return tuple(_or_empty(grads[index] if index in wanted else None, x.query) for index in PLACES)


def _wanted(args: tuple[Any, ...]) -> list[int]:
    """Which inputs the flags at the end of the backward's arguments ask the gradients of."""
    weights_grad, positions_grad, rate_grad = args[-3:]
    flags = (True, True, True, weights_grad, positions_grad, positions_grad, rate_grad)
    return [place for place, flag in zip(PLACES, flags, strict=True) if flag]


def _or_empty(grad: Tensor | None, query: Tensor) -> Tensor:
    """An operator returns tensors only: (0,) stands for the gradient of an absent input."""
    return query.new_empty(0, dtype=accumulation_dtype(query.dtype)) if grad is None else grad


forward_op = torch.ops.continuum_ops.continuum_attention_forward.default
plain_op = direct.kernel("continuum_attention_plain")
_plain_forward = direct.kernel("continuum_attention_plain_forward")
_plain_backward = direct.kernel("continuum_attention_plain_backward")
_backward_op = torch.ops.continuum_ops.continuum_attention_backward.default
LIBRARY.impl("continuum_attention_forward", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("continuum_attention_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("continuum_ops::continuum_attention_forward", lib=LIBRARY)
def _(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, dtype = query.shape[:-1], accumulation_dtype(query.dtype)
    return (
        query.new_empty((*rows, value.shape[-1])),
        query.new_empty(rows, dtype=dtype),
        query.new_empty((*rows, 2), dtype=dtype),
    )


@torch.library.register_fake("continuum_ops::continuum_attention_plain_forward", lib=LIBRARY)
def _fake_plain(
    query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor]:
    direct.on_one_device(query, key, value, weights)
    leads = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    rows, dtype = (*leads, query.shape[-2]), accumulation_dtype(query.dtype)
    return query.new_empty((*rows, value.shape[-1])), query.new_empty((*rows, 2), dtype=dtype)


@torch.library.register_fake("continuum_ops::continuum_attention_plain", lib=LIBRARY)
def _(*args: Any) -> Tensor:
    return _fake_plain(*args)[0]


@torch.library.register_fake("continuum_ops::continuum_attention_plain_backward", lib=LIBRARY)
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, ...]:
    leads, weights_grad = grad_out.shape[:-2], args[0] is not None and args[-1]
    weights = query.new_empty(
        (*leads, key.shape[-2]) if weights_grad else 0, dtype=accumulation_dtype(query.dtype)
    )
    return (*(query.new_empty((*leads, *t.shape[-2:])) for t in (query, key, value)), weights)


@torch.library.register_fake("continuum_ops::continuum_attention_backward", lib=LIBRARY)
def _(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    wanted = _wanted(args)
    return tuple(_or_empty(_like(args[index]) if index in wanted else None, args[0]) for index in PLACES)


def _like(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.new_empty(tensor.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    out, _, stats = output
    ctx.save_for_backward(*inputs[:TENSORS], out, stats)
    ctx.options = inputs[TENSORS:]
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _derivative(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * len(Inputs._fields)
    tensors, needs = ctx.saved_tensors, ctx.needs_input_grad
    if grad_out is None:
        out = tensors[TENSORS]
        grad_out = out.new_zeros(()).expand(out.shape)
    query, key, value, weights, query_pos, key_pos, rate = (
        grad if needs[place] else None
        for grad, place in zip(
            direct.call(
                _backward_op,
                *(grad_out, grad_lse, *tensors, *ctx.options),
                *(needs[3], needs[5] or needs[6], needs[7]),
            ),
            PLACES,
            strict=True,
        )
    )
    return (query, key, value, weights, None, query_pos, key_pos, rate, *(None,) * 6)


torch.library.register_autograd(
    "continuum_ops::continuum_attention_forward", _derivative, setup_context=_setup, lib=LIBRARY
)


class Plain(torch.autograd.Function):
    """The same derivative for what most calls have, without what the registration does for transforms."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weights: Tensor | None,
        *options: Any,  # scale, is_causal; left out, as every argument takes time, where None and False
    ) -> Tensor:
        if query.numel() * key.numel() <= direct.CHEAP:
            if not options:
                out = plain_op(query, key, value, weights)
            else:
                out = plain_op(query, key, value, weights, *options)
            ctx.save_for_backward(query, key, value, weights)
        else:
            out, stats = _plain_forward(query, key, value, weights, *options)
            ctx.save_for_backward(query, key, value, weights, out, stats)
        if options:
            ctx.options = options
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        # Where an argument was broadcast its gradient is too: autograd sums what its input had not.
        query, key, value, weights, *records = ctx.saved_tensors
        weights_grad = ctx.needs_input_grad[3]
        scale, is_causal = getattr(ctx, "options", (None, False))
        if direct.differentiated():
            out, stats = records or _plain_forward(query, key, value, weights, scale, is_causal)
            leads, width = out.shape[:-2], query.shape[-1]
            if scale is None:
                scale = 1.0 / math.sqrt(width) if width > 0 else 1.0
            tensors = [t.expand(*leads, *t.shape[-2:]) for t in (query, key, value)]
            tensors.append(None if weights is None else weights.expand(*leads, key.shape[-2]))
            inputs = (*tensors, *(None,) * 6, out, stats, None, scale, 0.0, is_causal)
            grads = _backward_op(grad_out, None, *inputs, weights_grad, False, False)
        else:
            out, stats = records or (None, None)
            grads = _plain_backward(
                grad_out, query, key, value, weights, out, stats, scale, is_causal, weights_grad
            )
        return grads[0], grads[1], grads[2], grads[3] if weights_grad else None, None, None


apply_plain = direct.applier(Plain)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Not out and stats: the second derivative recomputes them.
    ctx.save_for_backward(*inputs[: 2 + TENSORS])
    ctx.options = inputs[4 + TENSORS : -3]
    ctx.set_materialize_grads(False)


def _second_derivative(ctx: Any, *grad_grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_out, grad_lse, *tensors = ctx.saved_tensors
    incoming: list[Tensor | None] = [None] * chunked.DIFFERENTIABLE
    for place, grad in zip(PLACES, grad_grads, strict=True):
        incoming[place] = grad
    grads = _double_backward(Inputs(*tensors, *ctx.options), grad_out, grad_lse, incoming)
    return (*grads, *(None,) * 11)


torch.library.register_autograd(
    "continuum_ops::continuum_attention_backward",
    _second_derivative,
    setup_context=_setup_backward,
    lib=LIBRARY,
)

# --- the operator in PyTorch, for what has no kernel ----------------------------------------------


def _chunked(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse, _ = chunked.forward(Inputs(*args))
    return out, lse


def _chunked_backward(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *inputs, needs = args
    x = Inputs(*inputs)
    return tuple(_or_empty(g, x.query) for g in chunked.backward(x, grad_out, grad_lse, needs))


LIBRARY.impl("continuum_attention_chunked", _chunked, "CompositeExplicitAutograd")
LIBRARY.impl("continuum_attention_chunked_backward", _chunked_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("continuum_ops::continuum_attention_chunked", lib=LIBRARY)
def _(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    rows = query.shape[:-1]
    return (
        query.new_empty((*rows, value.shape[-1])),
        query.new_empty(rows, dtype=accumulation_dtype(query.dtype)),
    )


@torch.library.register_fake("continuum_ops::continuum_attention_chunked_backward", lib=LIBRARY)
def _(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    x = Inputs(*args[:-1])
    mask = None if x.attn_mask is None or x.attn_mask.dtype == torch.bool else x.attn_mask
    tensors = x._replace(attn_mask=mask).tensors()
    return tuple(_or_empty(_like(t), x.query) for t in tensors)


def _setup_chunked(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS])
    ctx.options = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def _derivative_chunked(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    x = Inputs(*ctx.saved_tensors, *ctx.options)
    if grad_out is None and grad_lse is None:
        return (None,) * len(x)
    if grad_out is None:
        grad_out = x.query.new_zeros(()).expand(*x.query.shape[:-1], x.value.shape[-1])
    needs = list(ctx.needs_input_grad[: chunked.DIFFERENTIABLE])
    grads = torch.ops.continuum_ops.continuum_attention_chunked_backward(grad_out, grad_lse, *x, needs)
    wanted = [g if need else None for g, need in zip(grads, needs, strict=True)]
    return (*wanted, *(None,) * (len(x) - chunked.DIFFERENTIABLE))


torch.library.register_autograd(
    "continuum_ops::continuum_attention_chunked",
    _derivative_chunked,
    setup_context=_setup_chunked,
    lib=LIBRARY,
)


def _setup_chunked_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[: 2 + TENSORS])
    ctx.options = inputs[2 + TENSORS : -1]
    ctx.set_materialize_grads(False)


def _second_derivative_chunked(ctx: Any, *grad_grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_out, grad_lse, *tensors = ctx.saved_tensors
    x = Inputs(*tensors, *ctx.options)
    grads = _double_backward(x, grad_out, grad_lse, list(grad_grads))
    return (*grads, *(None,) * (len(x) - chunked.DIFFERENTIABLE + 1))


torch.library.register_autograd(
    "continuum_ops::continuum_attention_chunked_backward",
    _second_derivative_chunked,
    setup_context=_setup_chunked_backward,
    lib=LIBRARY,
)

# --- second derivatives, which end here ----------------------------------------------------------


class _DoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: tuple[Any, ...], grad_out: Tensor, grad_lse: Tensor | None, *tensors: Any
    ) -> tuple[Tensor | None, ...]:
        inputs, grad_grads = tensors[: -chunked.DIFFERENTIABLE], tensors[-chunked.DIFFERENTIABLE :]
        first, second, rest = chunked.double_backward(
            Inputs(*inputs, *options), grad_out, grad_lse, list(grad_grads)
        )
        return (first, second, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        raise RuntimeError(
            "continuum_attention has first and second derivatives; third derivatives are not implemented"
        )


def _double_backward(
    x: Inputs, grad_out: Tensor, grad_lse: Tensor | None, grad_grads: list[Tensor | None]
) -> tuple[Tensor | None, ...]:
    return _DoubleBackward.apply(tuple(x[TENSORS:]), grad_out, grad_lse, *x[:TENSORS], *grad_grads)
