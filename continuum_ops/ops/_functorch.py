"""What ``torch.func`` transforms and forward-mode derivatives need beside the registered operators.

A registered operator has no forward-mode derivative, and its reverse one cannot be used below another
transform. Where transforms are active, the public functions therefore go one of two ways:

* reverse mode and vmap: through a ``torch.autograd.Function`` around the same kernels (:class:`Functions`),
  with the batch of a vmap moved into the leading dimensions;
* forward mode, as soon as an input may carry a tangent: through torch's own operators, a block of queries at
  a time, so that any nesting and any order of derivatives exists. Forward mode keeps no block; reverse mode
  over or under it keeps all of them, N x M numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._library import LIBRARY

Rule = Callable[..., tuple[Any, Any]]


def transforms_active() -> bool:
    """Whether a call is inside a transform of torch.func or a level of forward-mode derivatives."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def may_carry_tangent(tensors: Sequence[Tensor | None]) -> bool:
    """Whether forward mode is active and any of these takes part in it.

    What is wrapped by some transform counts: which of several nested levels it belongs to is not looked up.
    """
    return forward_ad._current_level >= 0 and any(
        t is not None
        and (
            torch._C._functorch.is_functorch_wrapped_tensor(t)
            or forward_ad.unpack_dual(t).tangent is not None
        )
        for t in tensors
    )


# --- values, which a transform hides ---------------------------------------------------------------


def check_nonnegative(values: Tensor, op: str, name: str, *, finite: bool) -> Tensor:
    """The values, after a look at them on the CPU; elsewhere invalid ones become NaN."""
    return values + torch.ops.continuum_ops.check_nonnegative(values.detach(), op, name, finite)


def _check_nonnegative(values: Tensor, op: str, name: str, finite: bool) -> Tensor:
    valid = (values >= 0) & ~values.isinf() if finite else values >= 0
    if values.device.type != "cpu":
        return torch.where(valid, 0.0, torch.nan).to(values.dtype)
    if not bool(valid.all()):
        what = "and finite" if finite else "and not NaN"
        raise ValueError(f"{op}: {name} must be >= 0 {what}, got {values[~valid][0].item():g}")
    return torch.zeros_like(values)


LIBRARY.impl("check_nonnegative", _check_nonnegative, "CompositeExplicitAutograd")


@torch.library.register_fake("continuum_ops::check_nonnegative", lib=LIBRARY)
def _(values: Tensor, op: str, name: str, finite: bool) -> Tensor:
    return torch.empty_like(values)


@torch.library.register_vmap("continuum_ops::check_nonnegative", lib=LIBRARY)
def _(
    info: Any, in_dims: Sequence[Any], values: Tensor, op: str, name: str, finite: bool
) -> tuple[Tensor, int | None]:
    return torch.ops.continuum_ops.check_nonnegative(values, op, name, finite), in_dims[0]


# --- rules of vmap -----------------------------------------------------------------------------------


def front(tensor: Tensor, dim: int | None) -> Tensor:
    """The batch of a vmap as the first dimension, of size 1 where there is none."""
    return tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)


def one_by_one(apply: Callable[..., Any], info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> Any:
    """The rule where no dimension of the operator can hold the batch: a call for each entry."""

    def entry(arg: Any, dim: Any, index: int) -> Any:
        if isinstance(dim, (list, tuple)):
            return [entry(a, d, index) for a, d in zip(arg, dim, strict=True)]
        return arg if dim is None else arg.select(dim, index)

    calls = []
    for index in range(info.batch_size):
        result = apply(*(entry(a, d, index) for a, d in zip(args, in_dims, strict=True)))
        calls.append([result] if isinstance(result, Tensor) else list(result))
    stacked = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
    if isinstance(result, Tensor):
        return stacked[0], 0
    kind = type(result) if isinstance(result, list) else tuple
    return kind(stacked), kind([0] * len(stacked))


# --- an operator as autograd functions that transforms know ------------------------------------------


@dataclass(frozen=True)
class Operator:
    """An operator of `tensors` tensors, the first `gradients` of which have gradients, then options.

    forward: (*tensors, *options) -> out, lse, stats; stats is not differentiable.
    backward: (grad_out, grad_lse, *tensors, out, lse, stats, *options, needs) -> a gradient for each of the
        first tensors, (0,) where it is not needed.
    second: (grad_out, grad_lse, needs, tensors, options, grad_grads) -> gradients with respect to grad_out,
        grad_lse and the first tensors; None where an input is None.
    composite: (*tensors, *options) -> out, lse, in torch's own operators.
    rules: of vmap, for each of the three: (apply, info, in_dims, args) -> outputs, their dims.
    """

    name: str
    tensors: int
    gradients: int
    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, ...]]
    second: Callable[..., tuple[Tensor | None, ...]]
    composite: Callable[..., tuple[Tensor, Tensor]]
    forward_rule: Rule
    backward_rule: Rule
    second_rule: Rule


def attend(operator: Operator, args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """out and lse where a transform is active."""
    # torch.compile does not trace functions with rules of their own below a transform, but these operators.
    if torch.compiler.is_compiling() or may_carry_tangent(args[: operator.tensors]):
        return operator.composite(*args)
    out, lse, _ = _Forward.apply(operator, *args)
    return out, lse


def _pullback(
    operator: Operator,
    tensors: Sequence[Tensor | None],
    options: Sequence[Any],
    needs: Sequence[bool],
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> list[Tensor | None]:
    """The gradients that are needed, in torch's own operators, which forward mode passes through."""
    wanted = [i for i, need in enumerate(needs) if need and tensors[i] is not None]

    def function(*variables: Tensor) -> tuple[Tensor, Tensor]:
        inputs = list(tensors)
        for i, variable in zip(wanted, variables, strict=True):
            inputs[i] = variable
        return operator.composite(*inputs, *options)

    outputs, pull, *_ = torch.func.vjp(function, *(tensors[i] for i in wanted))
    found = pull((grad_out, torch.zeros_like(outputs[1]) if grad_lse is None else grad_lse))
    grads: list[Tensor | None] = [None] * operator.gradients
    for i, grad in zip(wanted, found, strict=True):
        grads[i] = grad
    return grads


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor


def _saved(ctx: Any) -> list[Any]:
    """What was saved, out of the levels that have ended since: a pullback outlives the one of its vjp."""
    return [None if t is None else torch._C._functorch.unwrap_if_dead(t) for t in ctx.saved_tensors]


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(operator: Operator, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return operator.forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        operator, *args = inputs
        ctx.save_for_backward(*args[: operator.tensors], *output)
        ctx.operator, ctx.options = operator, args[operator.tensors :]
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        operator: Operator = ctx.operator
        constants = (None,) * (operator.tensors - operator.gradients + len(ctx.options))
        if grad_out is None and grad_lse is None:
            return (None, *(None,) * operator.gradients, *constants)
        *tensors, out, lse, stats = _saved(ctx)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        needs = list(ctx.needs_input_grad[1 : 1 + operator.gradients])
        if may_carry_tangent([grad_out, grad_lse, *tensors]):
            return (None, *_pullback(operator, tensors, ctx.options, needs, grad_out, grad_lse), *constants)
        grads = _Backward.apply(operator, grad_out, grad_lse, *tensors, out, lse, stats, *ctx.options, needs)
        wanted = (g if need else None for g, need in zip(grads, needs, strict=True))
        return (None, *wanted, *constants)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], operator: Operator, *args: Any) -> Any:
        def apply(*a: Any) -> Any:
            return _Forward.apply(operator, *a)

        return operator.forward_rule(apply, info, in_dims[1:], args)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(operator: Operator, *args: Any) -> tuple[Tensor, ...]:
        return operator.backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        operator, *args = inputs
        ctx.save_for_backward(*args[: 2 + operator.tensors])  # out, lse and stats are computed again
        ctx.operator, ctx.needs = operator, args[-1]
        ctx.options = args[5 + operator.tensors : -1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grad_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        operator: Operator = ctx.operator
        grad_out, grad_lse, *tensors = _saved(ctx)
        constants = (None,) * (operator.tensors - operator.gradients + 4 + len(ctx.options))
        arriving = [
            g if need and t is not None else None
            for g, need, t in zip(grad_grads, ctx.needs, tensors[: operator.gradients], strict=True)
        ]
        if all(g is None for g in arriving):
            return (None,) * (3 + operator.gradients + len(constants))
        if may_carry_tangent([grad_out, grad_lse, *tensors, *arriving]):
            raise NotImplementedError(
                f"{operator.name}: forward mode over a second reverse pass is not implemented where the "
                "first was taken outside it; take all derivatives inside torch.func.jvp or jacfwd"
            )
        found = _Second.apply(
            operator, ctx.needs, len(ctx.options), grad_out, grad_lse, *tensors, *arriving, *ctx.options
        )
        inputs = [grad_out, grad_lse, *tensors[: operator.gradients]]
        kept = (
            g if t is not None and t.is_floating_point() else None for g, t in zip(found, inputs, strict=True)
        )
        return (None, *kept, *constants)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], operator: Operator, *args: Any) -> Any:
        def apply(*a: Any) -> Any:
            return _Backward.apply(operator, *a)

        return operator.backward_rule(apply, info, in_dims[1:], args)


class _Second(torch.autograd.Function):
    @staticmethod
    def forward(operator: Operator, needs: list[bool], options: int, *args: Any) -> tuple[Tensor, ...]:
        grad_out, grad_lse, *rest = args
        tensors, grad_grads = rest[: operator.tensors], rest[operator.tensors : len(rest) - options]
        found = operator.second(
            grad_out, grad_lse, needs, tensors, rest[len(rest) - options :], list(grad_grads)
        )
        return tuple(_or_empty(g, grad_out) for g in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        raise RuntimeError(
            f"{ctx.name} has first and second derivatives in reverse mode; third derivatives are not "
            "implemented there, only with torch.func.jvp or jacfwd"
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], operator: Operator, needs: list[bool], options: int, *args: Any
    ) -> Any:
        def apply(*a: Any) -> Any:
            return _Second.apply(operator, needs, options, *a)

        return operator.second_rule(apply, info, in_dims[3:], args)
