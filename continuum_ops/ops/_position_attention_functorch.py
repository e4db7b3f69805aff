"""Position attention inside the transforms of torch.func and in forward mode; vmap of its operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _position_attention_chunked as chunked
from ._functorch import Operator, attend, check_nonnegative, front, one_by_one
from ._library import LIBRARY
from ._position_attention_chunked import DIFFERENTIABLE, Inputs

_ops = torch.ops.continuum_ops
_OP = "position_attention"
_TENSORS = 6
# Places among the inputs.
_QUERY_POS, _KEY_POS, _VALUE, _RATE, _WEIGHTS, _RADIUS = range(_TENSORS)
_GEOMETRY = (_QUERY_POS, _KEY_POS, _WEIGHTS, _RADIUS)


def attend_in_transforms(*inputs: Any) -> tuple[Tensor, Tensor]:
    """As the registered operator."""
    return attend(_OPERATOR, inputs)


def composite(*args: Any) -> tuple[Tensor, Tensor]:
    """out and lse in torch's own operators: out-of-place, without a look at a value."""
    x = Inputs(*args)
    x = x._replace(
        rate=check_nonnegative(x.rate, _OP, "rate", finite=True),
        weights=None if x.weights is None else check_nonnegative(x.weights, _OP, "weights", finite=True),
        radius=None if x.radius is None else check_nonnegative(x.radius, _OP, "radius", finite=False),
    )
    if x.empty():
        return x.value.new_zeros(x.out_shape()), x.rate.new_full(x.rows(), -torch.inf)
    narrow = x.value.dtype
    with torch.autocast(x.value.device.type, enabled=False):
        x = chunked._blanked(x)
        parts = [chunked._attend(chunked._block(x, start, stop))[:2] for start, stop in chunked._blocks(x)]
    return torch.cat([p[0] for p in parts], -2).to(narrow), torch.cat([p[1] for p in parts], -1)


# --- rules of vmap -----------------------------------------------------------------------------------
#
# The batch of a vmap joins that of the values, or, where the rates have it and the geometry has not, the
# heads; where both have it, each entry is a call of its own.


def _batch(value: Tensor, dim: int | None) -> int:
    return front(value, dim).shape[1]


def _into_batch(tensor: Tensor, dim: int | None, entries: int, size: int) -> Tensor:
    """(1 or size, ...) for each entry, as (entries * size, ...)."""
    tensor = front(tensor, dim)
    tensor = tensor.expand(entries, size, *tensor.shape[2:])
    return tensor.reshape(entries * size, *tensor.shape[2:])


def _forward_rule(apply: Callable[..., Any], info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> Any:
    tensors, period = list(args[:_TENSORS]), args[_TENSORS]
    geometry = [i for i in _GEOMETRY if in_dims[i] is not None]
    batch, entries = _batch(tensors[_VALUE], in_dims[_VALUE]), info.batch_size
    if in_dims[_RATE] is not None:
        if geometry:
            return one_by_one(apply, info, in_dims, args)
        return _forward_by_heads(apply, entries, in_dims, tensors, period)
    if batch == 0:
        return one_by_one(apply, info, in_dims, args)
    tensors[_VALUE] = _into_batch(tensors[_VALUE], in_dims[_VALUE], entries, batch)
    shared = not geometry and all(tensors[i] is None or tensors[i].shape[0] == 1 for i in _GEOMETRY)
    groups = 1
    if not shared:
        fields = [(i, front(tensors[i], in_dims[i])) for i in _GEOMETRY if tensors[i] is not None]
        groups = max(t.shape[1] for _, t in fields)
        for i, _ in fields:
            tensors[i] = _into_batch(tensors[i], in_dims[i], entries, batch)
    out, lse, *stats = apply(*tensors, period)
    out = out.unflatten(0, (entries, batch))
    if shared:
        return (out, lse, *stats), (0, None, *(None for _ in stats))
    rows = [t.unflatten(0, (entries, batch))[:, :groups] for t in (lse, *stats)]
    return (out, *rows), (0,) * (1 + len(rows))


def _forward_by_heads(
    apply: Callable[..., Any], entries: int, in_dims: Sequence[Any], tensors: list[Any], period: Any
) -> Any:
    rate = front(tensors[_RATE], in_dims[_RATE])
    heads = rate.shape[1]
    value = front(tensors[_VALUE], in_dims[_VALUE])
    if in_dims[_VALUE] is None and value.shape[2] == 1:
        tensors[_VALUE] = value[0]
    else:
        value = value.expand(entries, value.shape[1], heads, *value.shape[3:])
        tensors[_VALUE] = value.transpose(0, 1).flatten(1, 2)
    tensors[_RATE] = rate.reshape(-1)
    results = apply(*tensors, period)
    return tuple(t.unflatten(1, (entries, heads)).movedim(1, 0) for t in results), (0,) * len(results)


def _backward_rule(
    stats: int, apply: Callable[..., Any], info: Any, in_dims: Sequence[Any], args: Sequence[Any]
) -> Any:
    """(grad_out, grad_lse, *tensors, [out, lse, stats,] [radius,] period, needs)."""
    needs = args[-1]
    tensors, dims = args[2 : 2 + _TENSORS], in_dims[2 : 2 + _TENSORS]
    batch, entries = _batch(tensors[_VALUE], dims[_VALUE]), info.batch_size
    if needs[_RATE] or dims[_RATE] is not None or batch == 0:
        return one_by_one(apply, info, in_dims, args)
    geometry = [(tensors[i], dims[i]) for i in _GEOMETRY if tensors[i] is not None]
    groups = max(front(t, d).shape[1] for t, d in geometry)
    rows = args[2 + _TENSORS :][:stats], in_dims[2 + _TENSORS :][:stats]
    alone = not (needs[_QUERY_POS] or needs[_KEY_POS] or needs[_WEIGHTS])
    shared = (
        alone and groups == 1 and all(d is None for _, d in geometry) and rows[1][1:] in ((), (None, None))
    )

    def folded(arg: Tensor, dim: int | None) -> Tensor:
        return _into_batch(arg, dim, entries, batch)

    # Of a geometry that a batch shares, one entry of it receives the gradient of lse.
    grad_lse = None if shared else args[1]
    if grad_lse is not None:
        grad_lse = front(grad_lse, in_dims[1])
        grad_lse = grad_lse.expand(entries, *grad_lse.shape[1:])
        if groups == 1 and batch > 1:
            grad_lse = torch.cat([grad_lse, grad_lse.new_zeros(entries, batch - 1, *grad_lse.shape[2:])], 1)
        grad_lse = grad_lse.flatten(0, 1)
    kept = {_RATE, *_GEOMETRY} if shared else {_RATE}
    inputs = [t if t is None or i in kept else folded(t, dims[i]) for i, t in enumerate(tensors)]
    others = [t if shared and i > 0 else folded(t, d) for i, (t, d) in enumerate(zip(*rows, strict=True))]
    results = apply(folded(args[0], in_dims[0]), grad_lse, *inputs, *others, args[-2], needs)
    grads: list[Tensor] = []
    for i, (grad, t) in enumerate(zip(results, tensors, strict=False)):
        if t is None or not needs[i]:
            grads.append(grad)
            continue
        size = front(t, dims[i]).shape[1]
        grad = grad.unflatten(0, (entries, batch))
        grads.append(grad if size == batch else grad.sum(1, keepdim=True))
    wanted = [need and t is not None for need, t in zip(needs, tensors, strict=False)]
    return tuple(grads), tuple(0 if want else None for want in wanted)


def _in_kernel_order(args: Sequence[Any]) -> tuple[Any, ...]:
    """(grad_out, grad_lse, *tensors, out, lse, stats, period, needs), radius where the operator has it."""
    head, radius, tail = args[: 2 + _RADIUS], args[2 + _RADIUS], args[3 + _RADIUS :]
    results = (t.contiguous() for t in tail[:3])  # as the forward returns them; a batch may lie between
    return (*head, *results, radius, *tail[3:])


def _kernel_backward(*args: Any) -> tuple[Tensor, ...]:
    return _ops.position_attention_backward(*_in_kernel_order(args))


def _own_backward_rule(
    apply: Callable[..., Any], info: Any, in_dims: Sequence[Any], args: Sequence[Any]
) -> Any:
    return _backward_rule(3, apply, info, in_dims, args)


def _second(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Sequence[bool],
    tensors: Sequence[Any],
    options: Sequence[Any],
    grad_grads: list[Tensor | None],
) -> tuple[Tensor | None, ...]:
    x = Inputs(*tensors, *options)
    first, second, grads = chunked.double_backward(x, grad_out, grad_lse, list(needs), grad_grads)
    return (first, second, *grads)


_OPERATOR = Operator(
    _OP,
    _TENSORS,
    DIFFERENTIABLE,
    _ops.position_attention_forward,
    _kernel_backward,
    _second,
    composite,
    _forward_rule,
    _own_backward_rule,
    one_by_one,
)


@torch.library.register_vmap("continuum_ops::position_attention_forward", lib=LIBRARY)
def _(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    return _forward_rule(_ops.position_attention_forward.default, info, in_dims, args)


@torch.library.register_vmap("continuum_ops::position_attention_chunked", lib=LIBRARY)
def _(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    return _forward_rule(_ops.position_attention_chunked.default, info, in_dims, args)


@torch.library.register_vmap("continuum_ops::position_attention_backward", lib=LIBRARY)
def _(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    def moved(sequence: Sequence[Any]) -> tuple[Any, ...]:
        # out, lse and stats stand before radius in the schema
        head, middle, radius, tail = sequence[:7], sequence[7:10], sequence[10], sequence[11:]
        return (*head, radius, *middle, *tail)

    return _backward_rule(3, _kernel_backward, info, moved(in_dims), moved(args))


@torch.library.register_vmap("continuum_ops::position_attention_chunked_backward", lib=LIBRARY)
def _(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    return _backward_rule(0, _ops.position_attention_chunked_backward.default, info, in_dims, args)
