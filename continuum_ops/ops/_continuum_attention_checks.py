"""Argument checks of continuum attention: which argument, what it must be and what it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

OP = "continuum_attention"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensor(name: str, value: Any, like: Tensor | None = None) -> None:
    """A tensor, and on the device of `like`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{OP}: {name} must be a Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{OP}: {name} must be a dense (strided) tensor, got layout {value.layout}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{OP}: {name} must be on query's device {like.device}, got {value.device}")


def check_floating(name: str, value: Tensor) -> None:
    if not value.is_floating_point():
        raise TypeError(f"{OP}: {name} must be a floating-point tensor, got {value.dtype}")


def check_qkv(query: Tensor, key: Any, value: Any) -> torch.Size:
    """Check key and value beside query, which is a tensor, and return their common leading dimensions."""
    check_tensor("key", key, like=query)
    check_tensor("value", value, like=query)
    if query.dtype not in DTYPES:
        raise TypeError(f"{OP}: query must be float64, float32, bfloat16 or float16, got {query.dtype}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype is not query.dtype:
            raise TypeError(f"{OP}: {name} must have query's dtype {query.dtype}, got {tensor.dtype}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ValueError(f"{OP}: {name} must have at least 2 dimensions, got shape {tuple(tensor.shape)}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{OP}: key must have shape (..., M, {query.shape[-1]}), the last size being that of query, "
            f"got {tuple(key.shape)}"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{OP}: value must have shape (..., {key.shape[-2]}, Dv), with a row for each row of key, "
            f"got {tuple(value.shape)}"
        )
    leads = query.shape[:-2]
    if key.shape[:-2] == leads and value.shape[:-2] == leads:
        return leads
    try:
        return torch.broadcast_shapes(leads, key.shape[:-2], value.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"{OP}: the leading dimensions of query, key and value must be equal or broadcastable, got "
            f"{tuple(leads)}, {tuple(key.shape[:-2])} and {tuple(value.shape[:-2])}"
        ) from None


def check_broadcastable(name: str, tensor: Tensor, shape: Sequence[int], what: str) -> None:
    """`tensor` expands to `shape`, described by `what`."""
    sizes = tuple(tensor.shape)
    tail = tuple(shape)[len(shape) - len(sizes) :] if len(sizes) <= len(shape) else ()
    if len(tail) != len(sizes) or any(a not in (1, b) for a, b in zip(sizes, tail, strict=True)):
        raise ValueError(f"{OP}: {name} must be broadcastable to {what} = {tuple(shape)}, got {sizes}")


def check_weights(weights: Any, query: Tensor, shape: Sequence[int]) -> None:
    if not isinstance(weights, Tensor) and isinstance(getattr(weights, "weights", None), Tensor):
        raise TypeError(
            f"{OP}: weights must be a Tensor, got {type(weights).__name__}; pass its .weights attribute"
        )
    check_tensor("weights", weights, like=query)
    if weights.dtype == torch.bool:
        raise TypeError(
            f"{OP}: weights must be a floating-point tensor, got torch.bool; a mask is passed as attn_mask="
        )
    check_floating("weights", weights)
    check_broadcastable("weights", weights, shape, "(..., H, M)")


def check_mask(attn_mask: Any, query: Tensor, shape: Sequence[int], is_causal: bool) -> None:
    if is_causal:
        raise ValueError(
            f"{OP}: attn_mask must be None when is_causal=True, got a mask; put the triangle in the mask"
        )
    check_tensor("attn_mask", attn_mask, like=query)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(
            f"{OP}: attn_mask must be bool (True = attend) or floating-point, got {attn_mask.dtype}"
        )
    check_broadcastable("attn_mask", attn_mask, shape, "(..., H, N, M)")


def check_no_tangents(values: Sequence[Any]) -> None:
    """Forward-mode derivatives would silently be zero: say so instead."""
    for value in values:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(
                f"{OP}: forward-mode derivatives (torch.func.jvp, jacfwd, make_dual) are not implemented; "
                "torch.autograd.functional.jvp takes two reverse passes instead"
            )


def check_numbers(dropout_p: Any, scale: Any, dtype: torch.dtype) -> None:
    if not isinstance(dropout_p, (int, float)):
        raise TypeError(f"{OP}: dropout_p must be a number in [0, 1], got {type(dropout_p).__name__}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"{OP}: dropout_p must be in [0, 1], got {dropout_p}")
    if scale is None:
        return
    if not isinstance(scale, (int, float)):
        raise TypeError(f"{OP}: scale must be None or a number, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"{OP}: scale must be finite, got {scale}")
    most = 1e307 if dtype == torch.float64 else 1e38  # scale log2(e) must be a number of the kernel's type
    if abs(scale) > most:
        raise ValueError(f"{OP}: scale must be at most {most} in magnitude for {dtype} queries, got {scale}")


def check_positions(query_pos: Any, key_pos: Any, query: Tensor, leads: torch.Size, keys: int) -> None:
    """Positions (N, d) and (M, d), or with leading dimensions that broadcast to those before H."""
    for name, positions, rows, symbol in (
        ("query_pos", query_pos, query.shape[-2], "N"),
        ("key_pos", key_pos, keys, "M"),
    ):
        check_tensor(name, positions, like=query)
        check_floating(name, positions)
        what = f"({symbol}, d) or (..., {symbol}, d) with {symbol} = {rows}"
        if positions.dim() < 2 or positions.shape[-2] != rows:
            raise ValueError(f"{OP}: {name} must have shape {what}, got {tuple(positions.shape)}")
        check_broadcastable(
            name,
            positions,
            (*leads[:-1], rows, positions.shape[-1]),
            f"the batch of query, (..., {symbol}, d)",
        )
    if query_pos.shape[-1] != key_pos.shape[-1]:
        raise ValueError(
            f"{OP}: key_pos must have as many coordinates as query_pos, {query_pos.shape[-1]}, "
            f"got {key_pos.shape[-1]}"
        )


def check_rate(rate: Any, query: Tensor, leads: torch.Size) -> None:
    check_tensor("rate", rate, like=query)
    check_floating("rate", rate)
    check_broadcastable("rate", rate, leads[-1:], "(H,)")


def check_period(period: Any, dimension: int) -> None:
    if not isinstance(period, Sequence) or not all(isinstance(p, (int, float)) for p in period):
        raise TypeError(f"{OP}: period must be None or a sequence of d numbers, got {period!r}")
    if len(period) != dimension:
        raise ValueError(
            f"{OP}: period must have one entry for each coordinate, {dimension}, got {len(period)}"
        )
    if not all(p > 0 for p in period):
        raise ValueError(f"{OP}: period must be > 0 (inf: not periodic), got {tuple(period)}")


def check_radius(radius: Any, query: Tensor, leads: torch.Size) -> None:
    if isinstance(radius, Tensor):
        check_tensor("radius", radius, like=query)
        check_floating("radius", radius)
        check_broadcastable("radius", radius, (*leads[:-1], query.shape[-2]), "(..., N)")
    elif not isinstance(radius, (int, float)):
        raise TypeError(f"{OP}: radius must be None, a number or a Tensor, got {type(radius).__name__}")
    elif not radius >= 0:
        raise ValueError(f"{OP}: radius must be >= 0, got {radius}")
