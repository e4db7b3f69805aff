"""Argument checks of Galerkin and Fourier attention: which argument, what it must be and what it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensor(op: str, name: str, value: Any, like: Tensor | None = None) -> None:
    """A dense tensor, and on the device of `like`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense (strided) tensor, got layout {value.layout}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{op}: {name} must be on query's device {like.device}, got {value.device}")


def check_qkv(op: str, query: Tensor, key: Tensor, value: Tensor) -> Sequence[int]:
    """Dtypes and shapes of query, key and value; their common leading dimensions."""
    if query.dtype not in DTYPES:
        raise TypeError(f"{op}: query must be float64, float32, bfloat16 or float16, got {query.dtype}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype is not query.dtype:
            raise TypeError(f"{op}: {name} must have query's dtype {query.dtype}, got {tensor.dtype}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ValueError(f"{op}: {name} must have at least 2 dimensions, got shape {tuple(tensor.shape)}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{op}: key must have shape (..., M, {query.shape[-1]}), the last size being that of query, "
            f"got {tuple(key.shape)}"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{op}: value must have shape (..., {key.shape[-2]}, Dv), with a row for each row of key, "
            f"got {tuple(value.shape)}"
        )
    leads = query.shape[:-2]
    if key.shape[:-2] == leads and value.shape[:-2] == leads:
        return leads
    try:
        return torch.broadcast_shapes(leads, key.shape[:-2], value.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"{op}: the leading dimensions of query, key and value must be equal or broadcastable, got "
            f"{tuple(leads)}, {tuple(key.shape[:-2])} and {tuple(value.shape[:-2])}"
        ) from None


def check_weights(op: str, weights: Any, query: Tensor, shape: Sequence[int]) -> None:
    """Floating-point weights that broadcast to `shape`."""
    if not isinstance(weights, Tensor) and isinstance(getattr(weights, "weights", None), Tensor):
        raise TypeError(
            f"{op}: weights must be a Tensor, got {type(weights).__name__}; pass its .weights attribute"
        )
    check_tensor(op, "weights", weights, like=query)
    if not weights.is_floating_point():
        raise TypeError(f"{op}: weights must be a floating-point tensor, got {weights.dtype}")
    sizes = tuple(weights.shape)
    tail = tuple(shape)[len(shape) - len(sizes) :] if len(sizes) <= len(shape) else ()
    if len(tail) != len(sizes) or any(a not in (1, b) for a, b in zip(sizes, tail, strict=True)):
        raise ValueError(f"{op}: weights must be broadcastable to (..., H, M) = {tuple(shape)}, got {sizes}")
