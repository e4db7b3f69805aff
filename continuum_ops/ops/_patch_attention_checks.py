"""Argument checks of patch attention: which argument, what it must be and what it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..mesh import Mesh
from . import _checks as shared

OP = "patch_attention"
AXES = 3  # at most


def check_qkv(query: Any, key: Any, value: Any) -> None:
    """(B, *grid, H, D), (B, *kgrid, H, D) and (B, *kgrid, H, Dv) of one dtype."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        shared.check_tensor(OP, name, tensor, like=None if name == "query" else query)
        shared.check_floating(OP, name, tensor)
    shared.check_dtype(OP, "query", query)
    if query.dim() not in range(4, 4 + AXES):
        raise ValueError(
            f"{OP}: query must have shape (B, *grid, H, D) with a grid of 1 to {AXES} axes, "
            f"got {tuple(query.shape)}"
        )
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype is not query.dtype:
            raise TypeError(f"{OP}: {name} must have query's dtype {query.dtype}, got {tensor.dtype}")
        if tensor.dim() != query.dim():
            raise ValueError(
                f"{OP}: {name} must have as many grid axes as query, {query.dim() - 3}, "
                f"got shape {tuple(tensor.shape)}"
            )
        if tensor.shape[0] != query.shape[0] or tensor.shape[-2] != query.shape[-2]:
            raise ValueError(
                f"{OP}: {name} must have query's batch B = {query.shape[0]} and heads H = "
                f"{query.shape[-2]} in (B, *grid, H, channels), got {tuple(tensor.shape)}"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{OP}: key must have as many channels as query, {query.shape[-1]}, got {tuple(key.shape)}"
        )
    if value.shape[1:-2] != key.shape[1:-2]:
        raise ValueError(
            f"{OP}: value must have the grid of key, {tuple(key.shape[1:-2])}, got {tuple(value.shape)}"
        )


def check_patch_size(patch_size: Any, query: Tensor, key: Tensor) -> list[int]:
    """One size per grid axis, which divides both grids; returns them."""
    axes = query.dim() - 3
    sizes = [patch_size] * axes if isinstance(patch_size, int) else patch_size
    if not isinstance(sizes, Sequence) or not all(
        isinstance(n, int) and not isinstance(n, bool) for n in sizes
    ):
        raise TypeError(f"{OP}: patch_size must be an int or one int for each grid axis, got {patch_size!r}")
    if len(sizes) != axes:
        raise ValueError(
            f"{OP}: patch_size must be an int or have one for each grid axis, {axes}, got {patch_size!r}"
        )
    if not all(n >= 1 for n in sizes):
        raise ValueError(f"{OP}: patch_size must be at least 1, got {patch_size!r}")
    for name, tensor in (("query", query), ("key", key)):
        if any(n % size != 0 for n, size in zip(tensor.shape[1:-2], sizes, strict=True)):
            raise ValueError(
                f"{OP}: patch_size must divide the grid of {name}, {tuple(tensor.shape[1:-2])}, along every "
                f"axis, got {tuple(sizes)}; pad or resample the grid first"
            )
    return list(sizes)


def check_weights(weights: Any, query: Tensor) -> Tensor:
    """(*grid) or (B, *grid), sizes of 1 expanded along the grid; returns (B or 1, *grid)."""
    batch, grid = query.shape[0], query.shape[1:-2]
    if isinstance(weights, Mesh):
        raise TypeError(
            f"{OP}: weights must be a Tensor, got {type(weights).__name__}; pass its .weights, reshaped to "
            "the grid"
        )
    shared.check_tensor(OP, "weights", weights, like=query)
    shared.check_floating(OP, "weights", weights)
    shape = weights.shape if weights.dim() == len(grid) + 1 else (1, *weights.shape)
    if len(shape) != len(grid) + 1 or any(
        size != 1 and size != full for size, full in zip(shape, (batch, *grid), strict=True)
    ):
        raise ValueError(
            f"{OP}: weights must have the shape of the query grid, {tuple(grid)}, or (B, *grid) = "
            f"{(batch, *grid)}, sizes of 1 being expanded, got {tuple(weights.shape)}"
        )
    return weights.view(shape).expand(shape[0], *grid)
