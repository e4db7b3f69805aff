"""Argument checks that the models share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..mesh import Grid, Mesh

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from ..distributed import ShardedMesh


def is_spread(mesh: Any) -> TypeIs[ShardedMesh]:
    """Whether a mesh is spread over ranks; continuum_ops.distributed is not imported for it."""
    return not isinstance(mesh, (Mesh, Tensor)) and hasattr(mesh, "part")


def check_integer(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, was {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, was {value}")


def check_tensor(name: str, value: Tensor, u: Tensor, shapes: list[tuple[int, ...]]) -> None:
    """The shape is one of `shapes`, the dtype is floating, the device is that of u."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, was {type(value).__name__}")
    if tuple(value.shape) not in shapes:
        wanted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(
            f"{name} must have shape {wanted} for u of shape {tuple(u.shape)}, was {tuple(value.shape)}"
        )
    if not value.is_floating_point():
        raise ValueError(f"{name} must have a floating dtype, was {value.dtype}")
    if value.device != u.device:
        raise ValueError(f"{name} must be on the device of u, {u.device}, was on {value.device}")


def check_even(grid: Grid, who: str) -> None:
    """Even spacing, without which Fourier modes are not those of the function; looked at on the CPU only."""
    if grid.device.type != "cpu" or torch.compiler.is_compiling():
        return
    for i, axis in enumerate(grid.axes):
        gaps = axis.detach().diff()
        if len(gaps) > 0 and bool(gaps.max() > 1.01 * gaps.min()):
            raise ValueError(
                f"mesh must be evenly spaced for {who}, was spaced from {gaps.min():g} to {gaps.max():g} "
                f"along axis {i}"
            )
