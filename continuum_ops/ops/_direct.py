"""Short cuts for plain CPU tensors, whose small problems take less than the checks of their arguments.

The C++ kernels check everything they rely on. So a public function may call one first, and make its own
checks, which say what is wrong in the user's terms, if the kernel refuses. What intercepts calls
(torch.compile, functorch, forward mode, autocast, tracing, subclasses) takes the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends import extension
from ._library import LIBRARY

KERNELS = extension()[0] is not None
PLAIN = frozenset((Tensor, torch.nn.Parameter))
# Elements of query times those of key up to which what a backward reads of its forward takes as long to make
# and keep, about 1 us, as to compute again: the backward does so, to the same bits.
CHEAP = 2**18
WIDE = frozenset((torch.float32, torch.float64))  # dtypes that are computed in
# What a kernel, or a look at an argument of another kind, raises. Not every Exception: checkpointing
# ends a recomputation by one of its own.
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)

_below_autograd = torch._C._AutoDispatchBelowAutograd
_transforms_active = torch._C._are_functorch_transforms_active
_tracing = torch._C._is_tracing
_autocast_enabled = torch._C._is_any_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled


def intercepted() -> bool:
    """Whether a call of an operator may mean something else than its kernel and its own derivative."""
    return (
        _is_dynamo_compiling()
        or forward_ad._current_level >= 0
        or _transforms_active()
        or _autocast_enabled()
        or _dispatch_modes() > 0
        or _tracing()
    )


def plain(first: Any, second: Any, third: Any, *others: Any) -> bool | None:
    """Whether gradients of these are recorded; None if the call is anything but plain.

    That is: with subclasses, on another device, or intercepted. Others may be None. As few looks as
    will do, since looks and calls of functions are what a small problem is made of: of the devices only the
    first is asked for, as kernels refuse others beside it (on_one_device).
    """
    if (
        not KERNELS
        or _is_dynamo_compiling()
        or forward_ad._current_level >= 0
        or _transforms_active()
        or _autocast_enabled()
        or _dispatch_modes() > 0
        or _tracing()
        or type(first) not in PLAIN
        or type(second) not in PLAIN
        or type(third) not in PLAIN
    ):  # intercepted(), without a call
        return None
    grads = _grad_enabled()
    recorded = grads and (first.requires_grad or second.requires_grad or third.requires_grad)
    for tensor in others:
        if tensor is not None:
            if type(tensor) not in PLAIN:
                return None
            recorded = recorded or (grads and tensor.requires_grad)
    return recorded if first.is_cpu else None


def on_one_device(*tensors: Tensor | None) -> None:
    """For fake kernels, which would answer for tensors of the CPU beside those without data."""
    if len({tensor.device for tensor in tensors if tensor is not None}) > 1:
        raise RuntimeError("tensors of one device are expected")


def applier(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """function.apply for where nothing intercepts, which Function.apply would look for once more."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def kernel(name: str) -> Callable[..., Any]:
    """An operator for plain tensors: called without OpOverload's own step, and for autograd not there."""
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    return getattr(torch.ops.continuum_ops, name).default._op  # type: ignore[no-any-return]


def differentiated() -> bool:
    """Of a derivative that is being computed: whether it must itself be an operator with a derivative."""
    return _grad_enabled() or intercepted()


def call(op: Any, *args: Any) -> Any:
    """op(*args), a derivative's own operator: without its autograd where no derivative of it is recorded."""
    if differentiated():
        return op(*args)
    with _below_autograd():
        return op(*args)
