"""Convolutional networks between a fine and a coarse grid, scaled by interpolation (GT appendix B)."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tno_layer import Activation


class ResidualConv(nn.Module):
    """act(conv(x) + x), one 3 x 3 convolution; the sum takes the channels that both have.

    plain: without the skip, act(conv(x)).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        activation: Activation,
        dropout: float,
        *,
        plain: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.conv = _conv(in_channels, out_channels, device, dtype)
        self.dropout = nn.Dropout(dropout)
        self.activation, self.plain = activation, plain

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.conv(x))
        if self.plain:
            return self.activation(y)
        shared = min(x.shape[1], y.shape[1])
        skip = F.pad(x[:, :shared], (0, 0, 0, 0, 0, y.shape[1] - shared))
        return self.activation(y + skip)


class Downsample(nn.Module):
    """(B, in_channels, n_f, n_f') -> (B, channels, n_c, n_c'), by way of n_m = sqrt(n_f n_c) (GT figure 6).

    A convolution to all channels on the fine grid, interpolation, three residual convolutions in a row whose
    outputs are stacked, interpolation. plain: convolutions without skips, and the activation once more after
    each interpolation.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        activation: Activation,
        dropout: float,
        *,
        plain: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.conv = _conv(in_channels, channels, device, dtype)
        self.activation, self.plain = activation, plain
        third = channels // 3
        widths = [channels, third, third, channels - 2 * third]
        self.blocks = nn.ModuleList(
            ResidualConv(i, o, activation, dropout, plain=plain, device=device, dtype=dtype)
            for i, o in itertools.pairwise(widths)
        )

    def forward(self, x: Tensor, shape: tuple[int, ...], middle: tuple[int, ...] | None = None) -> Tensor:
        middle = _middle(x.shape[2:], shape) if middle is None else middle
        x = resample(self.activation(self.conv(x)), middle)
        x = self.activation(x) if self.plain else x
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        out = resample(torch.cat(outputs, dim=1), shape)
        return self.activation(out) if self.plain else out


class Upsample(nn.Module):
    """The way back: interpolation to n_m, a convolution, interpolation to n_f (GT figure 7).

    plain: the activation twice after the convolution.
    """

    def __init__(
        self,
        channels: int,
        activation: Activation,
        dropout: float,
        *,
        plain: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.conv = _conv(channels, channels, device, dtype)
        self.dropout = nn.Dropout(dropout)
        self.activation, self.plain = activation, plain

    def forward(self, x: Tensor, shape: tuple[int, ...], middle: tuple[int, ...] | None = None) -> Tensor:
        middle = _middle(x.shape[2:], shape) if middle is None else middle
        x = self.activation(self.dropout(self.conv(resample(x, middle))))
        return resample(self.activation(x) if self.plain else x, shape)


def resample(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(B, C, n, n') to another grid of the same box, corners on corners, bilinear."""
    return F.interpolate(x, size=list(shape), mode="bilinear", align_corners=True)


def coarse_axis(axis: Tensor, n: int) -> Tensor:
    """What `resample` makes of the values (coordinates, weights) along one axis."""
    return F.interpolate(axis[None, None], size=n, mode="linear", align_corners=True)[0, 0]


def _middle(fine: torch.Size | tuple[int, ...], coarse: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(round(math.sqrt(a * b)) for a, b in zip(fine, coarse, strict=True))


def _conv(i: int, o: int, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Conv2d:
    return nn.Conv2d(i, o, 3, padding=1, bias=False, device=device, dtype=dtype)
