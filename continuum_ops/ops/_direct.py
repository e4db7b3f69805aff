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

KERNELS = extension()[0] is not None
PLAIN = frozenset((Tensor, torch.nn.Parameter))
WIDE = frozenset((torch.float32, torch.float64))  # dtypes that are computed in
# What a kernel, or a look at an argument of another kind, raises. Not every Exception: checkpointing
# ends a recomputation by one of its own.
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)

_below_autograd = torch._C._AutoDispatchBelowAutograd
_transforms_active = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state
_autocast_enabled = torch.is_autocast_enabled
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled


def intercepted() -> bool:
    """Whether a call of an operator may mean something else than its kernel and its own derivative."""
    return (
        _is_dynamo_compiling()
        or forward_ad._current_level >= 0
        or _transforms_active()
        or _autocast_enabled("cpu")
        or _tracing_state() is not None
    )


def intercepts(*tensors: Any) -> bool:
    """Whether a call with these is anything but plain: of subclasses, on another device, or intercepted."""
    for tensor in tensors:
        if type(tensor) not in PLAIN or not tensor.is_cpu:
            return True
    return not KERNELS or intercepted()


def records_gradients(*tensors: Any) -> bool:
    """Whether the derivative will be asked for."""
    if not _grad_enabled():
        return False
    for tensor in tensors:  # noqa: SIM110  (any() makes a generator, which costs more than the loop)
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def applier(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """function.apply for where nothing intercepts, which Function.apply would look for once more."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def call(op: Any, *args: Any) -> Any:
    """op(*args), a derivative's own operator: without its autograd where no derivative of it is recorded."""
    if _grad_enabled() or intercepted():
        return op(*args)
    with _below_autograd():
        return op(*args)
