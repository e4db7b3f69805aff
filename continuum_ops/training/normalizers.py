"""Statistics of training samples that hold on other grids."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..mesh import Grid


class PointwiseNormalizer(nn.Module):
    """Mean and standard deviation of functions at each point of a Grid, on other Grids by interpolation.

    ``encode`` maps samples to (y - mean(x)) / std(x), ``decode`` back. On the Grid of the samples mean and
    std are theirs; on another one they are interpolated, linearly along each axis; beyond the range of an
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

    def encode(self, y: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) at the points of the grid -> normalised samples."""
        std = self._on(self.std, grid)
        return torch.where(std > 0, (y - self._on(self.mean, grid)) / torch.where(std > 0, std, 1.0), 0.0)

    def decode(self, y: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) normalised samples at the points of the grid -> samples."""
        return self._on(self.mean, grid) + self._on(self.std, grid) * y

    def _on(self, values: Tensor, grid: Grid) -> Tensor:
        """(*shape, C) interpolated to a grid: (N, C)."""
        for i, x in enumerate(grid.axes):
            nodes: Tensor = getattr(self, f"axis{i}")
            x = x.to(nodes.dtype)
            if x.shape == nodes.shape and torch.equal(x, nodes):
                continue
            right = torch.searchsorted(nodes, x).clamp(1, len(nodes) - 1)
            fraction = ((x - nodes[right - 1]) / (nodes[right] - nodes[right - 1])).clamp(0.0, 1.0)
            shape = [-1 if j == i else 1 for j in range(values.ndim)]
            values = torch.lerp(
                values.index_select(i, right - 1), values.index_select(i, right), fraction.view(shape)
            )
        return values.reshape(math.prod(grid.shape), values.shape[-1])
