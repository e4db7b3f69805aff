"""Spectral convolution of each patch of a grid on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._patches import crop, extend_evenly, from_patches, patches_of, per_axis, to_patches
from .spectral_conv import SpectralConv

if TYPE_CHECKING:
    from ..distributed import ShardedMesh


class PatchSpectralConv(SpectralConv):
    r"""A :class:`SpectralConv` that acts on each patch: the lift of ViT-NO (CA 21, 60, 61).

    The grid is cut into num_patches equal patches, the same number whatever the resolution, and the same
    kernel of few Fourier modes is convolved with the function on each, taken as periodic there.

    A patch of a function is seldom periodic. With ``periodic_extension`` each patch is mirrored behind the
    end of every axis, which makes a continuous function of twice the period; that is convolved, and the
    extension removed (CA 6.2.3, which leaves open how to extend). Mode k then has k / 2 waves a patch, and a
    patch of s points holds the modes below s, where without the extension it holds those below s / 2. The
    transform grows by 2^d.

    Args:
        in_channels, out_channels, device, dtype: as in :class:`SpectralConv`.
        modes: kept modes of a patch, one number per axis; an int is the same on every axis.
        num_patches: patches along each axis; an int makes a 1-D layer.
        periodic_extension: mirror each patch first.

    Raises:
        TypeError: a number that is no int.
        ValueError: a number below 1, or other than 1 to 3 axes.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        modes: int | Sequence[int],
        num_patches: int | Sequence[int],
        *,
        periodic_extension: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        patches = per_axis("num_patches", num_patches)
        super().__init__(
            in_channels, out_channels, per_axis("modes", modes, len(patches)), device=device, dtype=dtype
        )
        self.num_patches = patches
        self.periodic_extension = periodic_extension

    def forward(self, u: Tensor, *, group: ShardedMesh | None = None) -> Tensor:
        """Convolve each patch of a function on an evenly spaced grid.

        Args:
            u: (B, n_1, .., n_d, in_channels), channels last, n_i a multiple of num_patches[i].
            group: as of :class:`PatchAttention`; u is then this rank's part, and nothing is sent.

        Returns:
            (B, n_1, .., n_d, out_channels).

        Raises:
            ValueError: a shape that does not fit; in training mode, modes that a patch lacks, as in
                :class:`SpectralConv`. In evaluation mode they are left out and each other one is used once.
        """
        d = len(self.num_patches)
        if u.dim() != d + 2:
            raise ValueError(
                f"u must have shape (B, {', '.join(f'n_{i + 1}' for i in range(d))}, {self.in_channels}), "
                f"got {tuple(u.shape)}"
            )
        counts = patches_of(group, self.num_patches)
        patches = to_patches(u, counts)
        if not self.periodic_extension:
            return from_patches(super().forward(patches), counts)
        shape = patches.shape[1:-1]
        out = super().forward(extend_evenly(patches))
        return from_patches(crop(out, shape), counts)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, num_patches={self.num_patches}, "
            f"periodic_extension={self.periodic_extension}"
        )
