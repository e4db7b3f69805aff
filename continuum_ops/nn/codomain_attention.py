"""Attention between the channels of a function."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..ops.patch_attention import patch_attention
from ._patches import per_axis
from .patch_attention import grid_weights
from .quadrature_context import Mesh, as_weights, current_weights
from .spectral_conv import SpectralConv


class CodomainAttention(nn.Module):
    r"""Patch attention whose index is the channel instead of the patch (CA remark 16).

    The channels of u : D -> R^C are T = C / token_channels functions u_1, .., u_T on the whole domain. Head h
    computes, with integral operators Q, K, V that all of them share,

    .. math::
        out_t(x) = \sum_s \mathrm{softmax}_s\Big(scale \int_D (Q u_t) \cdot (K u_s)\Big) \, (V u_s)(x)

    and ``out_proj`` maps the concatenated heads back to token_channels at each point. Q, K and V are spectral
    convolutions, so one set of parameters serves every resolution, and any number of channels: permuting the
    functions permutes the output.

    Args:
        modes: kept modes of Q, K and V, one number for each of 1 to 3 axes; an int makes a 1-D layer.
        token_channels: channels that make one function of the sequence.
        num_heads: heads.
        head_dim: channels of Q, K and V in each head.
        bias: of out_proj.
        scale: factor of the integrals.
        device, dtype: of the parameters.

    Raises:
        TypeError: a number of modes that is no int.
        ValueError: a number below 1, or other than 1 to 3 axes.
    """

    def __init__(
        self,
        modes: int | Sequence[int],
        *,
        token_channels: int = 1,
        num_heads: int = 1,
        head_dim: int = 1,
        bias: bool = True,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        limits = (("token_channels", token_channels), ("num_heads", num_heads), ("head_dim", head_dim))
        for name, number in limits:
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        self.modes = per_axis("modes", modes)
        self.token_channels, self.num_heads, self.head_dim = token_channels, num_heads, head_dim
        self.scale = scale
        inner = num_heads * head_dim
        self.q_conv = SpectralConv(token_channels, inner, self.modes, device=device, dtype=dtype)
        self.k_conv = SpectralConv(token_channels, inner, self.modes, device=device, dtype=dtype)
        self.v_conv = SpectralConv(token_channels, inner, self.modes, device=device, dtype=dtype)
        self.out_proj = nn.Linear(inner, token_channels, bias, device, dtype)

    def forward(self, u: Tensor, *, weights: Tensor | Mesh | None = None) -> Tensor:
        """Attend between the channels of a function on an evenly spaced grid.

        Args:
            u: (B, n_1, .., n_d, T * token_channels), channels last; those of one function lie side by side.
            weights: quadrature weights >= 0 of the grid, of its shape or (N,) in row-major order, or a mesh
                with ``.weights``; used as they are. None: those of an enclosing
                ``continuum_ops.nn.quadrature`` block of length N, else 1 / N, a domain of volume 1.

        Returns:
            A tensor of the shape of u.

        Raises:
            ValueError: a shape that does not fit, modes that the grid lacks in training mode (as in
                :class:`SpectralConv`), negative weights.
        """
        d = len(self.modes)
        if u.dim() != d + 2 or u.shape[-1] == 0 or u.shape[-1] % self.token_channels:
            axes = ", ".join(f"n_{i + 1}" for i in range(d))
            raise ValueError(
                f"u must have shape (B, {axes}, C) with a multiple of {self.token_channels} channels, "
                f"got {tuple(u.shape)}"
            )
        batch, shape = u.shape[0], u.shape[1:-1]
        n, tokens = shape.numel(), u.shape[-1] // self.token_channels
        given = current_weights(n) if weights is None else as_weights(weights)
        w = None if given is None else grid_weights(given, shape).reshape(1, n).expand(tokens, n)
        functions = u.unflatten(-1, (tokens, self.token_channels)).movedim(-2, 1).flatten(0, 1)
        # A sequence of functions is a grid (T, N) whose patches are its rows.
        q, k, v = (
            conv(functions).reshape(batch, tokens, n, self.num_heads, self.head_dim)
            for conv in (self.q_conv, self.k_conv, self.v_conv)
        )
        scale = self.scale / n if w is None else self.scale
        out = patch_attention(q, k, v, (1, n), w, scale=scale)
        assert isinstance(out, Tensor)
        out = self.out_proj(out.flatten(-2))
        return out.movedim(1, 2).reshape(u.shape)

    def extra_repr(self) -> str:
        return (
            f"modes={self.modes}, token_channels={self.token_channels}, num_heads={self.num_heads}, "
            f"head_dim={self.head_dim}, scale={self.scale}"
        )
