"""Patch attention inside the transforms of torch.func and in forward mode; vmap of its operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _patch_attention_chunked as chunked
from ._functorch import Operator, attend, check_nonnegative, front, one_by_one
from ._library import LIBRARY
from ._patch_attention_chunked import DIFFERENTIABLE, Inputs

_ops = torch.ops.continuum_ops
_OP = "patch_attention"
_WEIGHTS = 3  # their place among the inputs


def attend_in_transforms(*inputs: Any) -> tuple[Tensor, Tensor]:
    """As the registered operator."""
    return attend(_OPERATOR, inputs)


def composite(*args: Any) -> tuple[Tensor, Tensor]:
    """out and lse in torch's own operators: out-of-place, without a look at a value."""
    x = Inputs(*args)
    if x.weights is not None:
        x = x._replace(weights=check_nonnegative(x.weights, _OP, "weights", finite=True))
    with torch.autocast(x.query.device.type, enabled=False):
        return chunked.composite(x)


# --- rules of vmap: its batch joins that of the tensors ----------------------------------------------


def _folded(tensor: Tensor, dim: int | None, entries: int, batch: int) -> Tensor:
    """(1 or batch, ...) for each entry, as (entries * batch, ...)."""
    tensor = front(tensor, dim)
    return tensor.expand(entries, batch, *tensor.shape[2:]).flatten(0, 1)


def _forward_rule(apply: Callable[..., Any], info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> Any:
    entries, batch = info.batch_size, front(args[0], in_dims[0]).shape[1]
    if entries * batch == 0:
        return one_by_one(apply, info, in_dims, args)
    tensors = list(args[:DIFFERENTIABLE])
    for i, (tensor, dim) in enumerate(zip(tensors, in_dims, strict=False)):
        shared = i == _WEIGHTS and dim is None and (tensor is None or tensor.shape[0] == 1)
        tensors[i] = tensor if shared else _folded(tensor, dim, entries, batch)
    out, lse, kept = apply(*tensors, *args[DIFFERENTIABLE:])
    kept, dim = (kept.unflatten(0, (entries, batch)), 0) if kept.dim() == 4 else (kept, None)
    return (out.unflatten(0, (entries, batch)), lse.unflatten(0, (entries, batch)), kept), (0, 0, dim)


def _backward_rule(apply: Callable[..., Any], info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> Any:
    """(grad_out, grad_lse, *tensors, lse, probabilities, patch_size, scale, needs)."""
    needs, tensors = args[-1], args[2 : 2 + DIFFERENTIABLE]
    entries, batch = info.batch_size, front(tensors[0], in_dims[2]).shape[1]
    if entries * batch == 0:
        return one_by_one(apply, info, in_dims, args)
    rest = 4 + DIFFERENTIABLE
    folded = list(args[:rest])
    for i, (tensor, dim) in enumerate(zip(folded, in_dims, strict=False)):
        alone = tensor is None or (i == rest - 1 and dim is None and tensor.dim() == 1)  # (0,): not kept
        folded[i] = tensor if alone else _folded(tensor, dim, entries, batch)
    folded[rest - 1] = folded[rest - 1].contiguous()  # as the forward returns them; a batch may lie between
    grads, dims = list(apply(*folded, *args[rest:])), []
    for i, (tensor, need) in enumerate(zip(tensors, needs, strict=True)):
        wanted = need and tensor is not None
        dims.append(0 if wanted else None)
        if wanted:
            grads[i] = grads[i].unflatten(0, (entries, batch))
            if front(tensor, in_dims[2 + i]).shape[1] != batch:  # weights that the batch shares
                grads[i] = grads[i].sum(1, keepdim=True)
    return tuple(grads), tuple(dims)


# --- the operator --------------------------------------------------------------------------------------


def _kernel_backward(*args: Any) -> tuple[Tensor, ...]:
    """As the other operators, whose backward takes out as well."""
    return _ops.patch_attention_backward(*_without_out(args))


def _without_out(sequence: Sequence[Any]) -> tuple[Any, ...]:
    return (*sequence[: 2 + DIFFERENTIABLE], *sequence[3 + DIFFERENTIABLE :])


def _own_backward_rule(
    apply: Callable[..., Any], info: Any, in_dims: Sequence[Any], args: Sequence[Any]
) -> Any:
    out = args[2 + DIFFERENTIABLE], in_dims[2 + DIFFERENTIABLE]

    def with_out(*rest: Any) -> Any:
        place = front(*out).flatten(0, 1)  # the backward does not read it
        return apply(*rest[: 2 + DIFFERENTIABLE], place, *rest[2 + DIFFERENTIABLE :])

    if front(*out).shape[1] == 0:
        return one_by_one(apply, info, in_dims, args)
    return _backward_rule(with_out, info, _without_out(in_dims), _without_out(args))


def _second(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Sequence[bool],
    tensors: Sequence[Any],
    options: Sequence[Any],
    grad_grads: list[Tensor | None],
) -> tuple[Tensor | None, ...]:
    x = Inputs(*tensors, *options)
    found = chunked.double_backward(x, grad_out, grad_lse, list(needs), grad_grads)
    given = (grad_out, grad_lse, *tensors)
    return tuple(
        torch.zeros_like(t) if g is None and t is not None else g for g, t in zip(found, given, strict=True)
    )


_OPERATOR = Operator(
    _OP,
    DIFFERENTIABLE,
    DIFFERENTIABLE,
    _ops.patch_attention_forward,
    _kernel_backward,
    _second,
    composite,
    _forward_rule,
    _own_backward_rule,
    one_by_one,
)


@torch.library.register_vmap("continuum_ops::patch_attention_forward", lib=LIBRARY)
def _(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    return _forward_rule(_ops.patch_attention_forward.default, info, in_dims, args)


@torch.library.register_vmap("continuum_ops::patch_attention_backward", lib=LIBRARY)
def _(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    return _backward_rule(_ops.patch_attention_backward.default, info, in_dims, args)
