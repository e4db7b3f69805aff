"""Statistics of training samples that hold on other grids."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..mesh import Grid, Mesh


class PointwiseNormalizer(nn.Module):
    """Mean and standard deviation of functions at each point of a Grid, on other meshes by interpolation.

    ``encode`` maps samples to (y - mean(x)) / std(x), ``decode`` back. On the Grid of the samples mean and
    std are theirs; on another mesh they are interpolated, linearly along each axis; beyond the range of an
    axis the end values hold. A point where all samples agree, as on a boundary with Dirichlet values, has
    std 0: ``decode`` gives the value itself there, whatever the model says, and ``encode`` gives 0.

    Args:
        samples: (n, N, C), at the points of the grid, n >= 2.
        grid: the Grid.

    Raises:
        ValueError: samples of another shape.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, samples: Tensor, grid: Grid) -> None:
        super().__init__()
        if samples.ndim != 3 or samples.shape[1] != len(grid) or len(samples) < 2:
            raise ValueError(
                f"samples must have shape (n, {len(grid)}, C) with n >= 2, was {tuple(samples.shape)}"
            )
        self.axes = len(grid.axes)
        self.register_buffer("mean", samples.mean(0).unflatten(0, grid.shape))
        self.register_buffer("std", samples.std(0).unflatten(0, grid.shape))
        for i, axis in enumerate(grid.axes):
            self.register_buffer(f"axis{i}", axis.to(samples.dtype))

    def encode(self, y: Tensor, mesh: Mesh) -> Tensor:
        """(B, N, C) at the points of the mesh -> normalised samples."""
        std = self.deviation(mesh)
        return torch.where(std > 0, (y - self.center(mesh)) / torch.where(std > 0, std, 1.0), 0.0)

    def decode(self, y: Tensor, mesh: Mesh) -> Tensor:
        """(B, N, C) normalised samples at the points of the mesh -> samples."""
        return self.center(mesh) + self.deviation(mesh) * y

    def center(self, mesh: Mesh) -> Tensor:
        """(N, C), the mean at the points of the mesh."""
        return self._on(self.mean, mesh)

    def deviation(self, mesh: Mesh) -> Tensor:
        """(N, C), the standard deviation at the points of the mesh."""
        return self._on(self.std, mesh)

    def _on(self, values: Tensor, mesh: Mesh) -> Tensor:
        """(*shape, C) interpolated to a mesh: (N, C)."""
        if not isinstance(mesh, Grid):
            return self._at(values, mesh.points)
        for i, x in enumerate(mesh.axes):
            nodes: Tensor = getattr(self, f"axis{i}")
            x = x.to(nodes.dtype)
            if x.shape == nodes.shape and torch.equal(x, nodes):
                continue
            right, fraction = _cells(nodes, x)
            shape = [-1 if j == i else 1 for j in range(values.ndim)]
            values = torch.lerp(
                values.index_select(i, right - 1), values.index_select(i, right), fraction.view(shape)
            )
        return values.reshape(math.prod(mesh.shape), values.shape[-1])

    def _at(self, values: Tensor, points: Tensor) -> Tensor:
        """(*shape, C) at points (N, d): multilinear in the cell of each."""
        cells = [
            _cells(nodes, x.contiguous().to(nodes.dtype))
            for nodes, x in zip(
                (getattr(self, f"axis{i}") for i in range(self.axes)), points.unbind(-1), strict=True
            )
        ]
        total = values.new_zeros(len(points), values.shape[-1])
        for corner in itertools.product((0, 1), repeat=self.axes):
            weight, index = values.new_ones(len(points)), []
            for end, (right, fraction) in zip(corner, cells, strict=True):
                weight = weight * (fraction if end else 1 - fraction)
                index.append(right - 1 + end)
            total = total + weight[:, None] * values[tuple(index)]
        return total


class ScaleNormalizer(nn.Module):
    """One affine map for each channel, the same on every mesh: encode is (y - shift) / scale.

    Args:
        samples: (n, N, C).
        kind: "standard", mean and standard deviation over samples and points; "rms", shift 0 and the root
            of the mean square; "range", the smallest value becomes -1, the largest 1; "log", "standard" of
            log y, for positive values over many orders of magnitude, as of a lognormal field.

    Raises:
        ValueError: an unknown kind, samples of another shape, "log" of samples that are not all > 0.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, samples: Tensor, kind: Literal["standard", "rms", "range", "log"]) -> None:
        super().__init__()
        if samples.ndim != 3 or samples.numel() == 0:
            raise ValueError(f"samples must have shape (n, N, C), was {tuple(samples.shape)}")
        flat = samples.flatten(0, 1)
        self.logarithmic = kind == "log"
        if self.logarithmic:
            if not bool((flat > 0).all()):
                raise ValueError(f'samples must be > 0 for "log", got {float(flat.min())}')
            flat = flat.log()
        if kind in ("standard", "log"):
            shift, scale = flat.mean(0), flat.std(0)
        elif kind == "rms":
            shift, scale = torch.zeros_like(flat[0]), flat.square().mean(0).sqrt()
        elif kind == "range":
            low, high = flat.amin(0), flat.amax(0)
            shift, scale = (high + low) / 2, (high - low) / 2
        else:
            raise ValueError(f"kind must be standard, rms, range or log, was {kind!r}")
        self.register_buffer("shift", shift)
        self.register_buffer("scale", torch.where(scale > 0, scale, 1.0))

    def encode(self, y: Tensor, mesh: Mesh | None = None) -> Tensor:
        """(..., C) -> normalised samples; the mesh does not matter."""
        return ((y.log() if self.logarithmic else y) - self.shift) / self.scale

    def decode(self, y: Tensor, mesh: Mesh | None = None) -> Tensor:
        """(..., C) normalised samples -> samples."""
        y = y * self.scale + self.shift
        return y.exp() if self.logarithmic else y

    def center(self, mesh: Mesh | None = None) -> Tensor:
        """(C,), the samples that become 0; the mesh does not matter."""
        return self.shift.exp() if self.logarithmic else self.shift


def _cells(nodes: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The node to the right of each x, and how far x is from the one to the left; the ends hold beyond."""
    right = torch.searchsorted(nodes, x).clamp(1, len(nodes) - 1)
    return right, ((x - nodes[right - 1]) / (nodes[right] - nodes[right - 1])).clamp(0.0, 1.0)
