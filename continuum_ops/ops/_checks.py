"""Argument checks that several operators share, `op` being the name before each message; autocast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    op: str, name: str, value: Any, like: Tensor | None = None, reference: str = "query"
) -> None:
    """A dense tensor, and on the device of `like`, the argument `reference`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense (strided) tensor, got layout {value.layout}")
    if value.is_nested:  # whose layout may be strided
        raise TypeError(f"{op}: {name} must be a dense (strided) tensor, got a nested one")
    if like is not None and value.device != like.device:
        raise ValueError(f"{op}: {name} must be on {reference}'s device {like.device}, got {value.device}")


def check_floating(op: str, name: str, value: Tensor) -> None:
    if not value.is_floating_point():
        raise TypeError(f"{op}: {name} must be a floating-point tensor, got {value.dtype}")


def check_dtype(op: str, name: str, value: Tensor) -> None:
    """One of those computed in: of what is floating, not 8 bits."""
    if value.dtype not in DTYPES:
        raise TypeError(f"{op}: {name} must be float64, float32, bfloat16 or float16, got {value.dtype}")


def check_qkv(op: str, query: Tensor, key: Any, value: Any) -> torch.Size:
    """Check key and value beside query, which is a tensor, and return their common leading dimensions."""
    check_tensor(op, "key", key, like=query)
    check_tensor(op, "value", value, like=query)
    check_dtype(op, "query", query)
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


def check_broadcastable(op: str, name: str, tensor: Tensor, shape: Sequence[int], what: str) -> None:
    """`tensor` expands to `shape`, described by `what`."""
    sizes = tuple(tensor.shape)
    tail = tuple(shape)[len(shape) - len(sizes) :] if len(sizes) <= len(shape) else ()
    if len(tail) != len(sizes) or any(a != 1 and a != b for a, b in zip(sizes, tail, strict=True)):
        raise ValueError(f"{op}: {name} must be broadcastable to {what} = {tuple(shape)}, got {sizes}")


def check_weights(op: str, weights: Any, query: Tensor, shape: Sequence[int]) -> None:
    """Floating-point weights that broadcast to `shape`."""
    if not isinstance(weights, Tensor) and isinstance(getattr(weights, "weights", None), Tensor):
        raise TypeError(
            f"{op}: weights must be a Tensor, got {type(weights).__name__}; pass its .weights attribute"
        )
    check_tensor(op, "weights", weights, like=query)
    check_floating(op, "weights", weights)
    check_broadcastable(op, "weights", weights, shape, "(..., H, M)")


def check_period(op: str, period: Any, dimension: int) -> list[float]:
    """d numbers > 0; returns them as floats."""
    if not isinstance(period, Sequence) or not all(isinstance(p, (int, float)) for p in period):
        raise TypeError(f"{op}: period must be None or a sequence of d numbers, got {period!r}")
    if len(period) != dimension:
        raise ValueError(
            f"{op}: period must have one entry for each coordinate, {dimension}, got {len(period)}"
        )
    if not all(p > 0 for p in period):
        raise ValueError(f"{op}: period must be > 0 (inf: not periodic), got {tuple(period)}")
    return [float(p) for p in period]


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In the autocast dtype of their device where it is enabled; float64 and what does not float as it is."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # there is no autocast for meta
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )
