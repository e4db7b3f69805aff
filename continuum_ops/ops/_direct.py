"""Short cuts of calls on plain CPU tensors, where the arithmetic of a small problem takes less than its checks.

The operators' C++ kernels check everything they rely on. A public function may therefore call one first and make
its own checks, which say what is wrong in the user's terms, only if the kernel refuses. What intercepts calls
(torch.compile, functorch, forward mode, autocast, tracing, subclasses) takes the ordinary way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends import extension

KERNELS = extension()[0] is not None

below_autograd = torch._C._AutoDispatchBelowAutograd
_transforms_active = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state
_autocast_enabled = torch.is_autocast_enabled
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_STRIDED = torch.strided
WIDE = frozenset((torch.float32, torch.float64))  # dtypes that need no conversion
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def call(op: Any, *args: Any) -> Any:
    """op(*args), a derivative's own operator: without its autograd where no derivative of it is recorded."""
    if _grad_enabled() or intercepted():
        return op(*args)
    with below_autograd():
        return op(*args)


def intercepted() -> bool:
    """Whether a call of an operator may mean something else than its kernel and its own derivative."""
    return (
        _is_dynamo_compiling()
        or forward_ad._current_level >= 0
        or _transforms_active()
        or _autocast_enabled("cpu")
        or _tracing_state() is not None
    )


def plain(tensor: Any) -> bool:
    """A dense CPU tensor of no subclass."""
    return type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout is _STRIDED


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """function.apply(*args) where nothing intercepts, which Function.apply would look for once more."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
