"""The open ``quadrature`` blocks, and which of them an attention with so many keys takes its weights from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode


class Mesh(Protocol):
    """Anything that knows its quadrature weights, such as ``continuum_ops.Grid``."""

    @property
    def weights(self) -> Tensor: ...


def as_weights(weights: Tensor | Mesh, name: str = "weights") -> Tensor:
    """The tensor of quadrature weights behind ``weights``: itself, or the ``.weights`` of a mesh.

    Raises TypeError if it is neither or not floating point, ValueError unless it has 1 to 3 dimensions.
    """
    found = weights if isinstance(weights, Tensor) else getattr(weights, "weights", None)
    if not isinstance(found, Tensor):
        raise TypeError(f"{name} must be a tensor or a mesh with .weights, got {type(weights).__name__}")
    if not found.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {found.dtype}")
    if not 1 <= found.dim() <= 3:
        raise ValueError(f"{name} must have shape (M,), (B, M) or (B, H, M), got {tuple(found.shape)}")
    return found


class Block(TorchFunctionMode):
    """One ``quadrature`` block: its weights, and what the attention under it made of them.

    It is a mode on the thread's stack of torch functions, where torch.compile finds and guards it too.
    ``answers`` maps functions of torch to those that are called in their place inside the block, with the
    block as their first argument.
    """

    def __init__(self, weights: Tensor, answers: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self.weights = weights
        self.answers = answers
        self.matched = False
        self.closed = False
        self.met_compiled = False
        self.lengths_seen: set[int] = set()
        self.thread = threading.get_ident()

    def open(self) -> None:
        _open_blocks.set((*_open_blocks.get(), self))
        _push_mode(self)

    def close(self) -> None:
        """Also where blocks of generators and asyncio tasks close in another order than they were opened."""
        self.closed = True
        _open_blocks.set(tuple(block for block in _open_blocks.get() if block is not self))
        if not any(mode is self for mode in _get_current_function_mode_stack()):
            return  # closed by another thread, whose stack has other modes
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def is_visible(self) -> bool:
        """Whether the running code is inside the block.

        The stack of modes belongs to the thread, so that an asyncio task meets the blocks of the others
        there; the context variable tells them apart. The backward pass takes the stack along to the threads
        of accelerators, but not the context: there the block counts, so that checkpointed layers see it.
        """
        if self.closed or torch.compiler.is_compiling():
            return not self.closed
        return threading.get_ident() != self.thread or self in _open_blocks.get()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is Tensor.unflatten:
            func = torch.unflatten  # the same; torch.compile does not trace the method under a mode
        answer = self.answers.get(func)
        return func(*args, **kwargs) if answer is None else answer(self, *args, **kwargs)

    def match(self, num_keys: int) -> Tensor | None:
        """The weights of the innermost block of that length, for an answer."""
        # While a mode handles a call it is off the stack, which then holds the blocks around it.
        return _innermost_match([self, *_blocks_on_stack()], num_keys)


_open_blocks: ContextVar[tuple[Block, ...]] = ContextVar("continuum_ops_quadrature", default=())


def _blocks_on_stack() -> list[Block]:
    """The thread's blocks, innermost first."""
    return [mode for mode in reversed(_get_current_function_mode_stack()) if isinstance(mode, Block)]


def _innermost_match(blocks: Iterable[Block], num_keys: int) -> Tensor | None:
    found = None
    for block in blocks:
        if not block.is_visible():
            continue
        if torch.compiler.is_compiling():
            # A set of lengths would tie the graph to each of them.
            block.met_compiled = True
        else:
            block.lengths_seen.add(num_keys)
        if block.weights.shape[-1] == num_keys:
            # An outer block that an inner one shadows was not forgotten by the caller: no warning for it.
            block.matched = True
            found = block.weights if found is None else found
    return found


def current_weights(num_keys: int) -> Tensor | None:
    """The weights that the open ``quadrature`` blocks hold for a layer with ``num_keys`` keys, or None."""
    return _innermost_match(_blocks_on_stack(), num_keys)
