"""Continuum attention inside the transforms of torch.func and in forward mode; vmap of its operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _continuum_attention_chunked as chunked
from ._continuum_attention_autograd import PLACES, TENSORS
from ._continuum_attention_chunked import DIFFERENTIABLE, Inputs, accumulation_dtype
from ._functorch import Operator, attend, check_nonnegative, front, one_by_one
from ._library import LIBRARY

_ops = torch.ops.continuum_ops
_OP = "continuum_attention"
_SEED = Inputs._fields.index("seed")


def attend_in_transforms(inputs: Sequence[Any], kernel: bool) -> tuple[Tensor, Tensor]:
    """As the registered operators: the one with kernels, or else the chunked one."""
    return attend(_KERNEL if kernel else _CHUNKED, inputs)


def composite(*args: Any) -> tuple[Tensor, Tensor]:
    """out and lse in torch's own operators: out-of-place, without a look at a value."""
    x = Inputs(*args)
    if x.seed is not None:
        raise NotImplementedError(f"{_OP}: forward-mode derivatives with dropout_p > 0 are not implemented")
    leads, rows = x.query.shape[:-2], x.query.shape[-2]
    dtype = accumulation_dtype(x.query.dtype)
    checked: dict[str, Any] = {
        name: None if tensor is None else check_nonnegative(tensor, _OP, name, finite=name == "weights")
        for name, tensor in (("weights", x.weights), ("rate", x.rate), ("radius", x.radius))
    }
    x = x._replace(**checked)
    if 0 in (*leads, rows, x.key.shape[-2]):
        out = x.query.new_zeros(*leads, rows, x.value.shape[-1])
        return out, x.query.new_full((*leads, rows), -torch.inf, dtype=dtype)
    narrow = x.query.dtype
    with torch.autocast(x.query.device.type, enabled=False):
        x = chunked._prepared(x)
        parts = [
            chunked._attend(chunked._block(x, start, stop), start)[:2] for start, stop in chunked._blocks(x)
        ]
    return torch.cat([p[0] for p in parts], -2).to(narrow), torch.cat([p[1] for p in parts], -1)


def _folded(x: Inputs, in_dims: Sequence[int | None], batch: int, full: set[str], headless: bool) -> Inputs:
    """The batch of a vmap as a leading dimension of all tensors, full in those that are named."""
    tensors: tuple[Any, ...] = x[:_SEED]
    fields: dict[str, Any] = {}
    for name, tensor, dim in zip(Inputs._fields[:_SEED], tensors, in_dims, strict=False):
        if tensor is None:
            fields[name] = None
            continue
        tensor = front(tensor, dim)
        if name in full:
            tensor = tensor.expand(batch, *tensor.shape[1:])
        fields[name] = tensor.unsqueeze(1) if headless else tensor  # the last leading dimension is the heads'
    return x._replace(**fields)


# Of one size in the operators, so that they must be full where one of them is batched.
_FULL = {"query", "key", "value", "weights"}


def _headless(query: Tensor, dim: int | None) -> bool:
    return query.dim() - (dim is not None) == 2


def _unfolded(tensors: Sequence[Tensor], headless: bool) -> tuple[Tensor, ...]:
    return tuple(t.squeeze(1) if headless and t.dim() > 1 else t for t in tensors)


def _mask(x: Inputs, kernel: bool) -> set[str]:
    return {"attn_mask"} if kernel and x.attn_mask is not None else set()


def _forward_rule(
    kernel: bool, apply: Callable[..., Any], info: Any, in_dims: Sequence[Any], args: Sequence[Any]
) -> Any:
    if args[_SEED] is not None:  # the mask follows from the index among the leading dimensions
        return one_by_one(apply, info, in_dims, args)
    x = Inputs(*args[: len(Inputs._fields)])
    headless = _headless(x.query, in_dims[0])
    folded = _folded(x, in_dims, info.batch_size, _FULL | _mask(x, kernel), headless)
    results = apply(*folded, *args[len(Inputs._fields) :])
    return _unfolded(results, headless), tuple(0 for _ in results)


def _backward_rule(
    kernel: bool, apply: Callable[..., Any], info: Any, in_dims: Sequence[Any], args: Sequence[Any]
) -> Any:
    """(grad_out, grad_lse, *tensors, [out, lse, stats,] *options, what is needed)."""
    if args[2 + _SEED] is not None:
        return one_by_one(apply, info, in_dims, args)
    x = Inputs(*(*args[2 : 2 + TENSORS], None, 1.0, 0.0, False))
    headless = _headless(x.query, in_dims[2])
    # Gradients have the sizes of their inputs: a shared one would be the sum over the batch.
    full = {*Inputs._fields[:DIFFERENTIABLE]}
    folded = _folded(x, in_dims[2 : 2 + TENSORS], info.batch_size, full, headless)

    def whole(arg: Any, dim: int | None) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        arg = front(arg, dim)
        arg = arg.expand(info.batch_size, *arg.shape[1:]).contiguous()  # as the forward returns its outputs
        return arg.unsqueeze(1) if headless else arg

    grads = [whole(a, d) for a, d in zip(args[:2], in_dims[:2], strict=True)]
    others = [whole(a, d) for a, d in zip(args[2 + TENSORS :], in_dims[2 + TENSORS :], strict=True)]
    results = apply(*grads, *folded[:TENSORS], *others)
    return _unfolded(results, headless), tuple(None if t.shape == (0,) else 0 for t in results)


def _second(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Sequence[bool],
    tensors: Sequence[Any],
    options: Sequence[Any],
    grad_grads: list[Tensor | None],
) -> tuple[Tensor | None, ...]:
    first, second, grads = chunked.double_backward(Inputs(*tensors, *options), grad_out, grad_lse, grad_grads)
    return (first, second, *grads)


def _kernel_backward(*args: Any) -> tuple[Tensor, ...]:
    grad_out, grad_lse, *rest = args
    tensors, (out, _, stats) = rest[:TENSORS], rest[TENSORS : TENSORS + 3]
    *options, needs = rest[TENSORS + 3 :]
    grads = list(
        _ops.continuum_attention_backward(
            grad_out,
            grad_lse,
            *tensors,
            out.contiguous(),
            stats.contiguous(),
            *options,
            needs[3],
            needs[5] or needs[6],
            needs[7],
        )
    )
    grads.insert(4, out.new_empty(0))  # a bool mask has none
    assert len(PLACES) + 1 == len(grads) == DIFFERENTIABLE
    return tuple(grads)


def _chunked_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = _ops.continuum_attention_chunked(*args)
    return out, lse, torch.zeros_like(lse)


def _chunked_backward(*args: Any) -> tuple[Tensor, ...]:
    inputs, needs = (*args[: 2 + TENSORS], *args[5 + TENSORS : -1]), args[-1]
    return _ops.continuum_attention_chunked_backward(*inputs, needs)


def _rule(kernel: bool, rule: Callable[..., Any]) -> Callable[..., Any]:
    def bound(apply: Callable[..., Any], info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> Any:
        return rule(kernel, apply, info, in_dims, args)

    return bound


def _operator(kernel: bool) -> Operator:
    forward = _ops.continuum_attention_forward if kernel else _chunked_forward
    backward = _kernel_backward if kernel else _chunked_backward
    rules = [_rule(kernel, _forward_rule), _rule(kernel, _backward_rule), one_by_one]
    return Operator(_OP, TENSORS, DIFFERENTIABLE, forward, backward, _second, composite, *rules)


_KERNEL, _CHUNKED = _operator(True), _operator(False)


def _register(name: str, rule: Callable[..., Any], kernel: bool) -> None:
    operator = getattr(_ops, name).default

    def batched(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
        return rule(kernel, operator, info, in_dims, args)

    torch.library.register_vmap(f"continuum_ops::{name}", batched, lib=LIBRARY)


_register("continuum_attention_forward", _forward_rule, True)
_register("continuum_attention_backward", _backward_rule, True)
_register("continuum_attention_chunked", _forward_rule, False)
_register("continuum_attention_chunked_backward", _backward_rule, False)
