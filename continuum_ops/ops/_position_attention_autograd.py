"""Implementations, shapes and derivatives of the registered position attention operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends import warn_without_extension
from . import _direct as direct
from . import _position_attention_chunked as chunked
from . import _position_attention_cuda
from ._library import LIBRARY
from ._position_attention_chunked import DIFFERENTIABLE, Inputs

_ops = torch.ops.continuum_ops


def _or_empty(grad: Tensor | None, value: Tensor) -> Tensor:
    """An operator returns tensors only: (0,) stands for a gradient that is not needed."""
    return value.new_empty(0) if grad is None else grad


def _fake_gradients(x: Inputs, needs: list[bool]) -> tuple[Tensor, ...]:
    return tuple(
        _or_empty(None if t is None or not need else t.new_empty(t.shape), x.value)
        for t, need in zip(x.tensors(), needs, strict=True)
    )


# --- the operators that have kernels; PyTorch where the device has none --------------------------


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Inputs(*args)
    if x.value.device.type == "cpu":
        warn_without_extension()
    return chunked.forward(x)


def _kernel_arguments(args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None, Inputs, list[bool]]:
    """grad_out, grad_lse, inputs and needs out of the arguments of position_attention_backward."""
    grad_out, grad_lse, query_pos, key_pos, value, rate, weights, _, _, _, radius, period, needs = args
    return grad_out, grad_lse, Inputs(query_pos, key_pos, value, rate, weights, radius, period), needs


def _backward(*args: Any) -> tuple[Tensor, ...]:
    grad_out, grad_lse, x, needs = _kernel_arguments(args)
    return tuple(_or_empty(g, x.value) for g in chunked.backward(x, grad_out, grad_lse, needs))


forward_op = _ops.position_attention_forward.default
plain_op = direct.kernel("position_attention_plain")
_plain_forward = direct.kernel("position_attention_plain_forward")
_plain_backward = direct.kernel("position_attention_plain_backward")
_backward_op = _ops.position_attention_backward.default
LIBRARY.impl("position_attention_forward", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("position_attention_backward", _backward, "CompositeExplicitAutograd")
_position_attention_cuda.register(_forward, _backward)


@torch.library.register_fake("continuum_ops::position_attention_forward", lib=LIBRARY)
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = Inputs(*args)
    return x.value.new_empty(x.out_shape()), x.rate.new_empty(x.rows()), x.rate.new_empty(x.stats_shape())


@torch.library.register_fake("continuum_ops::position_attention_plain_forward", lib=LIBRARY)
def _fake_plain(*args: Any) -> tuple[Tensor, Tensor]:
    x = _with_batch(*args)
    return x.value.new_empty(x.out_shape()), x.rate.new_empty(x.stats_shape())


def _with_batch(
    query_pos: Tensor, key_pos: Tensor, value: Tensor, rate: Tensor, weights: Tensor | None
) -> Inputs:
    """The arguments of the operators for plain tensors, as the others have them."""
    direct.on_one_device(query_pos, key_pos, value, rate, weights)
    x, y = (t if t.dim() == 3 else t.unsqueeze(0) for t in (query_pos, key_pos))
    w = weights if weights is None or weights.dim() == 2 else weights.unsqueeze(0)
    return Inputs(x, y, value if value.dim() == 4 else value.unsqueeze(1), rate, w, None, None)


@torch.library.register_fake("continuum_ops::position_attention_plain", lib=LIBRARY)
def _(*args: Any) -> Any:
    return _fake_plain(*args)[0]


@torch.library.register_fake("continuum_ops::position_attention_plain_backward", lib=LIBRARY)
def _(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _fake_gradients(Inputs(*(*args[:DIFFERENTIABLE], None, None)), args[-1])


@torch.library.register_fake("continuum_ops::position_attention_backward", lib=LIBRARY)
def _(*args: Any) -> tuple[Tensor, ...]:
    _, _, x, needs = _kernel_arguments(args)
    return _fake_gradients(x, needs)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    out, lse, stats = output
    ctx.save_for_backward(*inputs[:DIFFERENTIABLE], out, lse, stats, inputs[5])
    ctx.period = inputs[6]
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _derivative(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    query_pos, key_pos, value, rate, weights, out, lse, stats, radius = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * len(Inputs._fields)
    if grad_out is None:
        grad_out = out.new_zeros(()).expand(out.shape)
    needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
    grads = direct.call(
        _backward_op,
        grad_out,
        grad_lse,
        query_pos,
        key_pos,
        value,
        rate,
        weights,
        out,
        lse,
        stats,
        radius,
        ctx.period,
        needs,
    )
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), None, None)


torch.library.register_autograd(
    "continuum_ops::position_attention_forward", _derivative, setup_context=_setup, lib=LIBRARY
)


class Plain(torch.autograd.Function):
    """The same derivative for arguments as users pass them, without what the registration does for every
    transform."""

    @staticmethod
    def forward(
        ctx: Any, query_pos: Tensor, key_pos: Tensor, value: Tensor, rate: Tensor, weights: Tensor | None
    ) -> Tensor:
        if 16 * query_pos.numel() * value.numel() <= direct.CHEAP:  # positions are narrower than queries
            out = plain_op(query_pos, key_pos, value, rate, weights)
            ctx.save_for_backward(query_pos, key_pos, value, rate, weights)
        else:
            out, stats = _plain_forward(query_pos, key_pos, value, rate, weights)
            ctx.save_for_backward(query_pos, key_pos, value, rate, weights, out, stats)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing hands each out once
        inputs, records, needs = saved[:DIFFERENTIABLE], saved[DIFFERENTIABLE:], ctx.needs_input_grad
        if direct.differentiated():
            out, stats = records or _plain_forward(*inputs)
            results = (out, stats[..., 0], stats)  # the kernel does not read lse
            x = _with_batch(*inputs).tensors()
            grads = _backward_op(grad_out, None, *x, *results, None, None, list(needs))
            grads = [
                g.reshape(t.shape) if need else g for g, t, need in zip(grads, inputs, needs, strict=True)
            ]
        else:
            grads = _plain_backward(grad_out, *inputs, *(records or (None, None)), needs)
        x_grad, y_grad, v_grad, r_grad, w_grad = grads  # not a loop, which takes 1 us
        return (
            x_grad if needs[0] else None,
            y_grad if needs[1] else None,
            v_grad if needs[2] else None,
            r_grad if needs[3] else None,
            w_grad if needs[4] else None,
        )


apply_plain = direct.applier(Plain)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad_out, grad_lse, x, needs = _kernel_arguments(inputs)
    ctx.save_for_backward(grad_out, grad_lse, *x[:6])  # not out, lse, stats: they are computed again
    ctx.period, ctx.needs = x.period, needs
    ctx.set_materialize_grads(False)


def _second_derivative(ctx: Any, *grad_grads: Tensor | None) -> tuple[Tensor | None, ...]:
    first, second, rest = _double_backward(ctx, grad_grads)
    return (first, second, *rest, *(None,) * 6)


torch.library.register_autograd(
    "continuum_ops::position_attention_backward",
    _second_derivative,
    setup_context=_setup_backward,
    lib=LIBRARY,
)

# --- the operator in PyTorch ---------------------------------------------------------------------


def _chunked(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse, _ = chunked.forward(Inputs(*args))
    return out, lse


def _chunked_backward(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *inputs, needs = args
    x = Inputs(*inputs)
    return tuple(_or_empty(g, x.value) for g in chunked.backward(x, grad_out, grad_lse, needs))


LIBRARY.impl("position_attention_chunked", _chunked, "CompositeExplicitAutograd")
LIBRARY.impl("position_attention_chunked_backward", _chunked_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("continuum_ops::position_attention_chunked", lib=LIBRARY)
def _(*args: Any) -> tuple[Tensor, Tensor]:
    x = Inputs(*args)
    return x.value.new_empty(x.out_shape()), x.rate.new_empty(x.rows())


@torch.library.register_fake("continuum_ops::position_attention_chunked_backward", lib=LIBRARY)
def _(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *inputs, needs = args
    return _fake_gradients(Inputs(*inputs), needs)


def _setup_chunked(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.period = inputs[6]
    ctx.set_materialize_grads(False)


def _derivative_chunked(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    x = Inputs(*(*ctx.saved_tensors, ctx.period))
    if grad_out is None and grad_lse is None:
        return (None,) * len(x)
    if grad_out is None:
        grad_out = x.value.new_zeros(()).expand(x.out_shape())
    needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
    grads = _ops.position_attention_chunked_backward(grad_out, grad_lse, *x, needs)
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), None, None)


torch.library.register_autograd(
    "continuum_ops::position_attention_chunked",
    _derivative_chunked,
    setup_context=_setup_chunked,
    lib=LIBRARY,
)


def _setup_chunked_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.period, ctx.needs = inputs[8], inputs[9]
    ctx.set_materialize_grads(False)


def _second_derivative_chunked(ctx: Any, *grad_grads: Tensor | None) -> tuple[Tensor | None, ...]:
    first, second, rest = _double_backward(ctx, grad_grads)
    return (first, second, *rest, *(None,) * 3)


torch.library.register_autograd(
    "continuum_ops::position_attention_chunked_backward",
    _second_derivative_chunked,
    setup_context=_setup_chunked_backward,
    lib=LIBRARY,
)

# --- second derivatives, which end here ----------------------------------------------------------


class _DoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        period: list[float] | None,
        needs: list[bool],
        grad_out: Tensor,
        grad_lse: Tensor | None,
        *tensors: Any,
    ) -> tuple[Tensor | None, ...]:
        inputs, grad_grads = tensors[:-DIFFERENTIABLE], tensors[-DIFFERENTIABLE:]
        first, second, rest = chunked.double_backward(
            Inputs(*(*inputs, period)), grad_out, grad_lse, needs, list(grad_grads)
        )
        return (first, second, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        raise RuntimeError(
            "position_attention has first and second derivatives; third derivatives are not implemented"
        )


def _double_backward(
    ctx: Any, grad_grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
    grad_out, grad_lse, *inputs = ctx.saved_tensors
    first, second, *rest = _DoubleBackward.apply(
        ctx.period, ctx.needs, grad_out, grad_lse, *inputs, *grad_grads
    )
    return first, second, tuple(rest)
