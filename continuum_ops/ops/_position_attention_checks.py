"""Argument checks of position attention: which argument, what it must be and what it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..mesh import Grid, Mesh
from . import _checks as shared

OP = "position_attention"


def check_tensor(name: str, value: Any, like: Tensor | None = None) -> None:
    """A dense floating-point tensor, and on the device of `like`."""
    if isinstance(value, Mesh):
        attribute = "weights" if name == "weights" else "points"
        raise TypeError(f"{OP}: {name} must be a Tensor, got {type(value).__name__}; pass its .{attribute}")
    shared.check_tensor(OP, name, value, like, reference="value")
    shared.check_floating(OP, name, value)


def check_value(value: Any) -> None:
    check_tensor("value", value)
    shared.check_dtype(OP, "value", value)
    if value.dim() not in (3, 4):
        raise ValueError(f"{OP}: value must have shape (B, M, C) or (B, H, M, C), got {tuple(value.shape)}")


def check_rate(rate: Any, value: Tensor) -> None:
    check_tensor("rate", rate, like=value)
    if rate.dim() != 1:
        raise ValueError(f"{OP}: rate must have shape (H,), one for each head, got {tuple(rate.shape)}")
    if value.dim() == 4 and value.shape[1] not in (1, rate.shape[0]):
        raise ValueError(
            f"{OP}: value must have shape (B, M, C) or (B, H, M, C) with H = {rate.shape[0]} as rate has, "
            f"got {tuple(value.shape)}"
        )


def check_positions(query_pos: Any, key_pos: Any, value: Tensor) -> None:
    """(N, d) or (B, N, d) and (M, d) or (B, M, d), with value's B and M."""
    batch, keys = value.shape[0], value.shape[-2]
    for name, positions, symbol in (("query_pos", query_pos, "N"), ("key_pos", key_pos, "M")):
        check_tensor(name, positions, like=value)
        shared.check_dtype(OP, name, positions)
        shape = tuple(positions.shape)
        if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] != batch):
            raise ValueError(
                f"{OP}: {name} must have shape ({symbol}, d) or (B, {symbol}, d) with B = {batch} as value "
                f"has, got {shape}"
            )
    if query_pos.shape[-1] != key_pos.shape[-1]:
        raise ValueError(
            f"{OP}: key_pos must have as many coordinates as query_pos, {query_pos.shape[-1]}, "
            f"got {key_pos.shape[-1]}"
        )
    if key_pos.shape[-2] != keys:
        raise ValueError(
            f"{OP}: key_pos must have a row for each of the {keys} rows of value, got {tuple(key_pos.shape)}"
        )


def check_weights(weights: Any, value: Tensor) -> Tensor:
    """(M,) or (B, M); returns them."""
    check_tensor("weights", weights, like=value)
    batch, keys = value.shape[0], value.shape[-2]
    if tuple(weights.shape) not in ((keys,), (batch, keys)):
        raise ValueError(
            f"{OP}: weights must have shape (M,) or (B, M) = {(batch, keys)}, got {tuple(weights.shape)}"
        )
    return weights


def check_axis_weights(weights: Any, grid: Grid, value: Tensor) -> None:
    """One tensor (n_i,) for each axis of a grid."""
    if not isinstance(weights, Sequence):
        raise TypeError(
            f"{OP}: weights must be a Tensor, or with a Grid one tensor for each axis, "
            f"got {type(weights).__name__}"
        )
    sizes = [axis.shape[0] for axis in grid.axes]
    if len(weights) != len(sizes):
        raise ValueError(
            f"{OP}: weights must be a Tensor or one tensor for each axis of key_pos, {len(sizes)}, "
            f"got {len(weights)}"
        )
    for i, (w, size) in enumerate(zip(weights, sizes, strict=True)):
        check_tensor(f"weights[{i}]", w, like=value)
        if tuple(w.shape) != (size,):
            raise ValueError(f"{OP}: weights[{i}] must have shape {(size,)}, got {tuple(w.shape)}")


def check_radius(radius: Any, value: Tensor, queries: int) -> None:
    batch = value.shape[0]
    if isinstance(radius, Tensor):
        check_tensor("radius", radius, like=value)
        if tuple(radius.shape) not in ((), (queries,), (batch, queries)):
            raise ValueError(
                f"{OP}: radius must be a number or have shape (N,) or (B, N) = {(batch, queries)}, "
                f"got {tuple(radius.shape)}"
            )
    elif not isinstance(radius, (int, float)):
        raise TypeError(f"{OP}: radius must be None, a number or a Tensor, got {type(radius).__name__}")
    elif not radius >= 0:
        raise ValueError(f"{OP}: radius must be >= 0, got {radius}")
