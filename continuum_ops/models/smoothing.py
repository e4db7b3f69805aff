"""Smoothing by a power of the Laplacian's resolvent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..mesh import Grid
from ..nn._patches import crop

BOUNDARIES = ("periodic", "dirichlet")


class Smoothing(nn.Module):
    r"""z -> (I - eps Laplace)^(-alpha) z, which evens out jumps between patches (CA remark 21, eq. 29).

    An eigenfunction of the Laplacian with eigenvalue -lambda is divided by (1 + eps lambda)^alpha, lambda
    that of the continuous operator: exact on a grid for each eigenfunction that the grid resolves.

    * "periodic": e^{2 pi i k x / L}, lambda = (2 pi k / L)^2. The axis is of kind "periodic" or "cell".
    * "dirichlet": sin(pi k (x - a) / L) on [a, a + L], lambda = (pi k / L)^2. On an axis of kind "endpoint"
      both ends are the boundary, on one of kind "periodic", taken as half open, its first point and the one
      behind its last; there the result is 0. On one of kind "cell" the boundary is half a cell away.

    In several dimensions the eigenfunctions are products and the lambda of the axes add up. There are no
    parameters to learn.

    Args:
        boundary: one name for all axes or one per axis.
        eps: > 0, in units of length squared.
        alpha: > 0; CA asks for more than 1.

    Raises:
        ValueError: an unknown name, a number that is not finite and positive.
    """

    def __init__(self, boundary: str | Sequence[str], eps: float = 1e-3, alpha: float = 1.001) -> None:
        super().__init__()
        names = (boundary,) if isinstance(boundary, str) else tuple(boundary)
        if not names or any(name not in BOUNDARIES for name in names):
            raise ValueError(
                f'boundary must be "periodic" or "dirichlet", one for all axes or one each, was {boundary!r}'
            )
        for name, number in (("eps", eps), ("alpha", alpha)):
            if not (number > 0 and math.isfinite(number)):
                raise ValueError(f"{name} must be finite and > 0, was {number}")
        self.boundary, self.eps, self.alpha = names, eps, alpha

    def forward(self, z: Tensor, grid: Grid) -> Tensor:
        """Smooth each channel.

        Args:
            z: (B, n_1, .., n_d, C), channels last, at the points of the grid.
            grid: evenly spaced, with at least 2 points an axis (3 for "dirichlet" between end points).

        Returns:
            A tensor of the shape and dtype of z; transforms run in float32 or wider.

        Raises:
            ValueError: a shape that does not fit, an axis too short or of a kind that the boundary excludes.
        """
        names = self.boundaries(grid)
        if tuple(z.shape[1:-1]) != grid.shape:
            wanted = ", ".join(map(str, grid.shape))
            raise ValueError(f"z must have shape (B, {wanted}, C) on this grid, was {tuple(z.shape)}")
        dtype = torch.promote_types(z.dtype, torch.float32)
        v = z.to(dtype)
        axes = tuple(range(1, z.dim() - 1))
        for axis, name, kind in zip(axes, names, grid.kind, strict=True):
            v = v if name == "periodic" else _odd_extension(v, axis, kind)
        shape = v.shape[1:-1]
        eigenvalue = torch.zeros((), dtype=torch.float64, device=z.device)
        for i, (x, n) in enumerate(zip(grid.axes, shape, strict=True)):
            spacing = (x[-1] - x[0]).to(torch.float64) / (len(x) - 1)
            fftfreq = torch.fft.rfftfreq if i == len(shape) - 1 else torch.fft.fftfreq
            k = fftfreq(n, dtype=torch.float64, device=z.device) * (2 * math.pi / spacing)
            eigenvalue = eigenvalue.unsqueeze(-1) + k**2
        symbol = (1 + self.eps * eigenvalue) ** -self.alpha
        spectrum = torch.fft.rfftn(v, dim=axes) * symbol.to(dtype).unsqueeze(-1)
        v = torch.fft.irfftn(spectrum, s=shape, dim=axes)
        return crop(v, grid.shape).to(z.dtype)

    def boundaries(self, grid: Grid) -> tuple[str, ...]:
        """The condition on each axis of a grid, which must allow it."""
        names = self.boundary * grid.ndim if len(self.boundary) == 1 else self.boundary
        if len(names) != grid.ndim:
            raise ValueError(f"grid must have {len(names)} axes for boundary {names}, had {grid.ndim}")
        for i, (name, kind, n) in enumerate(zip(names, grid.kind, grid.shape, strict=True)):
            if name == "periodic" and kind == "endpoint":
                raise ValueError(
                    f'grid must be of kind "periodic" or "cell" along axis {i} to be smoothed periodically, '
                    'was "endpoint", which has the same point twice'
                )
            least = 3 if name == "dirichlet" and kind == "endpoint" else 2
            if n < least:
                raise ValueError(f"grid must have at least {least} points along axis {i}, had {n}")
        return names

    def extra_repr(self) -> str:
        return f"boundary={self.boundary}, eps={self.eps}, alpha={self.alpha}"


def _odd_extension(v: Tensor, axis: int, kind: str) -> Tensor:
    """The odd function of twice the period that begins with v, its boundary values taken as 0."""
    if kind == "cell":
        return torch.cat([v, -v.flip(axis)], dim=axis)
    n = v.shape[axis]
    inner = v.narrow(axis, 1, n - 2 if kind == "endpoint" else n - 1)
    zero = torch.zeros_like(v.narrow(axis, 0, 1))
    return torch.cat([zero, inner, zero, -inner.flip(axis)], dim=axis)
