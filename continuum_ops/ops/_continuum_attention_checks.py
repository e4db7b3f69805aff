"""Argument checks of continuum attention: which argument, what it must be and what it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _checks as shared
from ._checks import check_broadcastable, check_dtype, check_floating, check_tensor

OP = "continuum_attention"


def check_weights(weights: Any, query: Tensor, shape: Sequence[int]) -> None:
    if isinstance(weights, Tensor) and weights.dtype == torch.bool:
        raise TypeError(
            f"{OP}: weights must be a floating-point tensor, got torch.bool; a mask is passed as attn_mask="
        )
    shared.check_weights(OP, weights, query, shape)


def check_mask(attn_mask: Any, query: Tensor, shape: Sequence[int], is_causal: bool) -> None:
    if is_causal:
        raise ValueError(
            f"{OP}: attn_mask must be None when is_causal=True, got a mask; put the triangle in the mask"
        )
    check_tensor(OP, "attn_mask", attn_mask, like=query)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(
            f"{OP}: attn_mask must be bool (True = attend) or floating-point, got {attn_mask.dtype}"
        )
    check_broadcastable(OP, "attn_mask", attn_mask, shape, "(..., H, N, M)")


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
        check_tensor(OP, name, positions, like=query)
        check_floating(OP, name, positions)
        check_dtype(OP, name, positions)
        if (
            positions.dim() < 2 or positions.shape[-2] != rows
        ):  # a size in a text is a constant to torch.compile
            raise ValueError(
                f"{OP}: {name} must have shape ({symbol}, d) or (..., {symbol}, d) with {symbol} = {rows}, "
                f"got {tuple(positions.shape)}"
            )
        check_broadcastable(
            OP,
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
    check_tensor(OP, "rate", rate, like=query)
    check_floating(OP, "rate", rate)
    check_broadcastable(OP, "rate", rate, leads[-1:], "(H,)")


def check_radius(radius: Any, query: Tensor, leads: torch.Size) -> None:
    if isinstance(radius, Tensor):
        check_tensor(OP, "radius", radius, like=query)
        check_floating(OP, "radius", radius)
        check_broadcastable(OP, "radius", radius, (*leads[:-1], query.shape[-2]), "(..., N)")
    elif not isinstance(radius, (int, float)):
        raise TypeError(f"{OP}: radius must be None, a number or a Tensor, got {type(radius).__name__}")
    elif not radius >= 0:
        raise ValueError(f"{OP}: radius must be >= 0, got {radius}")
