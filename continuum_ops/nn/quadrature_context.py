"""Quadrature weights for attention layers inside a model whose forward cannot be changed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor


class Mesh(Protocol):
    """Anything that knows its quadrature weights, such as ``continuum_ops.Grid``."""

    @property
    def weights(self) -> Tensor: ...


class _Frame:
    """One open ``quadrature`` block: its weights, and what the layers under it made of them."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self.matched = False
        self.lengths_seen: set[int] = set()


_frames: ContextVar[tuple[_Frame, ...]] = ContextVar("continuum_ops_quadrature", default=())

# A plain global that torch.compile guards on: while no block is open anywhere in the process, compiled layers
# neither read the context variable nor break the graph; opening one recompiles them.
_any_open = False
_open_count = 0
_open_lock = threading.Lock()


def _count_open(step: int) -> None:
    global _any_open, _open_count
    with _open_lock:
        _open_count += step
        _any_open = _open_count > 0


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


@contextmanager
def quadrature(weights: Tensor | Mesh) -> Iterator[None]:
    """Give quadrature weights to the attention layers of ``continuum_ops.nn`` that run inside the block.

    ::

        co.nn.replace_attention(model)
        with co.nn.quadrature(mesh.weights):
            y = model(x)

    The weights apply to a layer if its number of keys equals ``weights.shape[-1]`` and it was not called with
    ``weights=`` of its own; other layers are left alone. Blocks nest: the innermost one whose length fits
    wins, so a model with two meshes takes two blocks. The state is a context variable: it belongs to the
    current thread (or asyncio task) and is undone when the block is left by an exception.

    Activation checkpointing runs layers again during the backward pass: call ``backward()`` inside the
    block too. On an accelerator that second run happens on a thread that does not see the block: give
    checkpointed layers their weights explicitly there.

    Args:
        weights: floating point tensor (M,), (B, M) or (B, H, M), or a mesh (an object with ``.weights``),
            where M is the number of keys, B the batch and H the number of heads; on the model's device.

    Raises:
        TypeError, ValueError: ``weights`` is not such a tensor or mesh.

    Warns:
        UserWarning: the block ended and no layer had the length of the weights; it names the lengths seen.
    """
    frame = _Frame(as_weights(weights))
    token = _frames.set((*_frames.get(), frame))
    _count_open(1)
    try:
        yield
    finally:
        _count_open(-1)
        _frames.reset(token)
    if not frame.matched:
        seen = ", ".join(map(str, sorted(frame.lengths_seen)))
        reason = (
            f"the attention layers inside the block had {seen} keys"
            if seen
            else "no attention layer of continuum_ops.nn ran inside the block without weights of its own "
            "(was replace_attention called?)"
        )
        # 3: past this generator and contextlib's __exit__, to the with statement.
        warnings.warn(
            f"quadrature weights of length {frame.weights.shape[-1]} were not used: {reason}",
            UserWarning,
            stacklevel=3,
        )


@torch.compiler.disable
def _innermost_match(num_keys: int) -> Tensor | None:
    frames = _frames.get()
    found = None
    for frame in frames:
        frame.lengths_seen.add(num_keys)
        if frame.weights.shape[-1] == num_keys:
            # An outer block that an inner one shadows was not forgotten by the caller: no warning for it.
            frame.matched = True
            found = frame.weights
    return found


def current_weights(num_keys: int) -> Tensor | None:
    """The weights that the open ``quadrature`` blocks hold for a layer with ``num_keys`` keys, or None."""
    return _innermost_match(num_keys) if _any_open else None
