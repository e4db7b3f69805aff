"""Patches of a grid: P_1 x .. x P_d of them, whatever the number of points, as a batch and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..distributed import ShardedMesh


def per_axis(name: str, value: int | Sequence[int], axes: int | None = None) -> tuple[int, ...]:
    """One positive int per axis of 1 to 3; an int is repeated `axes` times (None: once)."""
    numbers = value if isinstance(value, Sequence) else (value,) * (1 if axes is None else axes)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise TypeError(f"{name} must be an int or one per axis, got {value!r}")
    numbers = tuple(numbers)
    if not 1 <= len(numbers) <= 3 or (axes is not None and len(numbers) != axes):
        wanted = "1 to 3 axes" if axes is None else f"{axes} axes"
        raise ValueError(f"{name} must be one number for each of {wanted}, got {value!r}")
    if min(numbers) < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    return numbers


def patches_of(mesh: ShardedMesh | None, num_patches: Sequence[int]) -> Sequence[int]:
    """Patches of this process along each axis: all, or this rank's of a mesh that is spread over ranks."""
    if mesh is None:
        return num_patches
    if mesh.num_patches is None or mesh.all_patches != tuple(num_patches):
        cut = "single points" if mesh.all_patches is None else f"{mesh.all_patches} patches"
        raise ValueError(
            f"mesh must be spread over the ranks in {tuple(num_patches)} patches, those of the model, by "
            f"distributed.shard(grid, group, num_patches=...); was spread in {cut}"
        )
    return mesh.num_patches


def patch_size(name: str, shape: Sequence[int], num_patches: Sequence[int]) -> tuple[int, ...]:
    """Points of a patch along each axis of a grid."""
    for axis, (n, patches) in enumerate(zip(shape, num_patches, strict=True)):
        if n == 0 or n % patches:
            raise ValueError(
                f"{name} must have a multiple of {patches} points along axis {axis} to make {patches} equal "
                f"patches, got {n} of the grid {tuple(shape)}"
            )
    return tuple(n // patches for n, patches in zip(shape, num_patches, strict=True))


def to_patches(v: Tensor, num_patches: Sequence[int]) -> Tensor:
    """(B, *grid, C) -> (B * P, *patch, C), patches in row-major order."""
    d = len(num_patches)
    shape = [v.shape[0]]
    for patches, size in zip(num_patches, patch_size("u", v.shape[1:-1], num_patches), strict=True):
        shape += [patches, size]
    counts, sizes = range(1, 2 * d, 2), range(2, 2 * d + 1, 2)
    return v.reshape(*shape, v.shape[-1]).permute(0, *counts, *sizes, 2 * d + 1).flatten(0, d)


def from_patches(v: Tensor, num_patches: Sequence[int]) -> Tensor:
    """(B * P, *patch, C) -> (B, *grid, C), what `to_patches` undoes."""
    d = len(num_patches)
    sizes = v.shape[1:-1]
    order = [0]
    for axis in range(d):
        order += [1 + axis, 1 + d + axis]
    grid = [patches * size for patches, size in zip(num_patches, sizes, strict=True)]
    v = v.unflatten(0, (-1, *num_patches)).permute(*order, 2 * d + 1)
    return v.reshape(v.shape[0], *grid, v.shape[-1])


def extend_evenly(v: Tensor) -> Tensor:
    """(B, *patch, C) -> (B, *(2 patch), C): mirrored behind the end of each axis, continuous and periodic."""
    for axis in range(1, v.dim() - 1):
        v = torch.cat([v, v.flip(axis)], dim=axis)
    return v


def crop(v: Tensor, shape: Sequence[int]) -> Tensor:
    """The first points along each axis of (B, *grid, C)."""
    for axis, n in enumerate(shape):
        v = v.narrow(axis + 1, 0, n)
    return v
