"""Spectral convolution on 1-, 2- and 3-D periodic grids."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SpectralConv(nn.Module):
    r"""Convolution with a learned kernel of few Fourier modes.

    .. math::
        \hat{out}(\kappa) = R_\kappa \, \hat{u}(\kappa), \qquad |\kappa_i| \le modes_i,

    for complex matrices :math:`R_\kappa` (in_channels, out_channels); the other modes are dropped. Along the
    last axis the modes 0 .. modes - 1 of the half spectrum are kept, along each axis before it 0 .. modes - 1
    and -modes .. -1. Spectra are those of the function (the transform carries 1/n), so one set of parameters
    serves every resolution. The inverse real transform takes the real part of a mode that is its own
    conjugate partner (DC, and Nyquist on an even axis). It is the layer of Li et al., "Fourier Neural
    Operator", that the decoders of GT and the models of CA use.

    The complex weights are one real parameter ``weight`` (2^(d-1), *modes, in_channels, out_channels, 2) of
    real and imaginary parts, so that DistributedDataParallel, optimizers and torch.compile see real numbers.
    Transforms and products run in float32 (float64 for float64 inputs) also under autocast; the result then
    has the autocast dtype, else that of the input.

    Args:
        in_channels, out_channels: channels.
        modes: kept modes, one number per axis; an int makes a 1-D layer.
        device, dtype: of the parameters.

    Raises:
        ValueError: a number below 1, or other than 1 to 3 axes.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        modes: int | Sequence[int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.modes = (modes,) if isinstance(modes, int) else tuple(modes)
        if not 1 <= len(self.modes) <= 3:
            raise ValueError(f"modes must be one number for each of 1 to 3 axes, got {modes!r}")
        for name, number in (
            ("in_channels", in_channels),
            ("out_channels", out_channels),
            *((f"modes[{i}]", m) for i, m in enumerate(self.modes)),
        ):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        self.in_channels, self.out_channels = in_channels, out_channels
        blocks = 2 ** (len(self.modes) - 1)
        shape = (blocks, *self.modes, in_channels, out_channels, 2)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Real and imaginary parts of variance 1 / (2 in_channels): a mode keeps its size."""
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(2 * self.in_channels))

    def forward(self, u: Tensor) -> Tensor:
        """Convolve a function on an evenly spaced grid of one period.

        Args:
            u: (B, n_1, .., n_d, in_channels), channels last.

        Returns:
            (B, n_1, .., n_d, out_channels).

        Raises:
            ValueError: a shape that does not fit; in training mode, a grid that lacks modes (an axis with
                less than 2 modes points, or, the last one, with modes > n // 2 + 1): they would overlap or
                stay untrained. In evaluation mode the modes that a grid lacks are left out and each other
                mode is used once.
        """
        d = len(self.modes)
        if u.dim() != d + 2 or u.shape[-1] != self.in_channels:
            raise ValueError(
                f"u must have shape (B, {', '.join(f'n_{i + 1}' for i in range(d))}, {self.in_channels}), "
                f"got {tuple(u.shape)}"
            )
        shape = u.shape[1:-1]
        if self.training:
            self._check_modes(shape)
        device = u.device.type
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        out_dtype = u.dtype
        if autocast and u.dtype != torch.float64:
            out_dtype = torch.get_autocast_dtype(device)
        if not autocast:
            return self._convolve(u, shape).to(out_dtype)
        with torch.autocast(device, enabled=False):
            return self._convolve(u, shape).to(out_dtype)

    def _check_modes(self, shape: Sequence[int]) -> None:
        for i, (n, m) in enumerate(zip(shape, self.modes, strict=True)):
            most = n // 2 + 1 if i == len(shape) - 1 else n // 2
            if m > most:
                raise ValueError(
                    f"modes[{i}] must be at most {most} to train on an axis of {n} points, where more would "
                    f"overlap, got {m}; in evaluation mode the modes that a grid lacks are left out"
                )

    def _convolve(self, u: Tensor, shape: Sequence[int]) -> Tensor:
        dims = tuple(range(1, len(shape) + 1))
        wide = torch.promote_types(u.dtype, torch.float32)
        spectrum = torch.fft.rfftn(u.to(wide), dim=dims, norm="forward")
        weight = torch.view_as_complex(self.weight.to(wide).contiguous())
        mixed = spectrum.new_zeros((*spectrum.shape[:-1], self.out_channels))
        for block, (there, here) in enumerate(self._blocks(shape)):
            part = torch.einsum("b...i,...io->b...o", spectrum[there], weight[block][here])
            mixed[there] = part
        return torch.fft.irfftn(mixed, s=list(shape), dim=dims, norm="forward")

    def _blocks(self, shape: Sequence[int]) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """For each block of the weights: where its modes lie in the spectrum, and which of them exist."""
        last = min(self.modes[-1], shape[-1] // 2 + 1)
        per_axis = []
        for n, m in zip(shape[:-1], self.modes[:-1], strict=True):
            up, down = min(m, (n + 1) // 2), min(m, n // 2)  # 0 .. (n - 1) // 2 and -(n // 2) .. -1
            per_axis.append(
                (
                    (slice(0, up), slice(0, up)),
                    (slice(n - down, n), slice(m - down, m)),
                )
            )
        blocks = []
        for choice in itertools.product(*per_axis):
            there = (slice(None), *(c[0] for c in choice), slice(0, last))
            here = (*(c[1] for c in choice), slice(0, last))
            blocks.append((there, here))
        return blocks

    def extra_repr(self) -> str:
        return f"in_channels={self.in_channels}, out_channels={self.out_channels}, modes={self.modes}"
