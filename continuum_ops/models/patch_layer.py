"""The encoder layer and the final spectral layer of the models on patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..nn import PatchSpectralConv, SpectralConv
from ..nn._patches import patch_size, patches_of
from ..nn.fourier_patch_attention import FourierPatchAttention
from ..nn.patch_attention import attend_patches
from ..ops._fourier_patch_modes import PatchModes
from .tno_layer import Activation, identity_map

if TYPE_CHECKING:
    from ..distributed import ShardedMesh


class PatchEncoderLayer(nn.Module):
    """One encoder layer, CA eq. (10), pointwise but for the attention, on a grid with channels last.

    ::

        v <- norm1(W1 v + A(v))        A: multi-head patch attention (CA definition 14, eq. 62-64)
        v <- norm2(W2 v + F(v))        F(v) = linear2(f(linear1(v))) (CA 25)

    and with ``norm_first`` the pre-norm order v <- W1 v + A(norm1(v)), v <- W2 v + F(norm2(v)). W1 and W2
    are as in `TNOEncoderLayer`. ``norm_residual`` normalises what the residuals carry too, v <- norm1(v),
    v <- W1 v + A(v), v <- norm2(W2 v + F(v)). (B, *grid, d_model) -> the same.
    """

    def __init__(
        self,
        attention: nn.Module,
        d_model: int,
        dim_feedforward: int,
        dropout: float,
        activation: Activation,
        *,
        norm_first: bool,
        residual_weights: bool,
        norm_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.linear1 = nn.Linear(d_model, dim_feedforward, device=device, dtype=dtype)
        self.linear2 = nn.Linear(dim_feedforward, d_model, device=device, dtype=dtype)
        self.norm1 = nn.LayerNorm(d_model, device=device, dtype=dtype)
        self.norm2 = nn.LayerNorm(d_model, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation
        self.norm_first, self.norm_residual = norm_first, norm_residual
        self.residual1: nn.Module = nn.Identity()
        self.residual2: nn.Module = nn.Identity()
        if residual_weights:
            self.residual1 = identity_map(d_model, device, dtype)
            self.residual2 = identity_map(d_model, device, dtype)

    def forward(self, v: Tensor, weights: Tensor | None, group: ShardedMesh | None = None) -> Tensor:
        if self.norm_residual:
            v = self.norm1(v)
            v = self.residual1(v) + self._attend(v, weights, group)
            return self.norm2(self.residual2(v) + self._feed_forward(v))
        if self.norm_first:
            v = self.residual1(v) + self._attend(self.norm1(v), weights, group)
            return self.residual2(v) + self._feed_forward(self.norm2(v))
        v = self.norm1(self.residual1(v) + self._attend(v, weights, group))
        return self.norm2(self.residual2(v) + self._feed_forward(v))

    def _attend(self, v: Tensor, weights: Tensor | None, group: ShardedMesh | None) -> Tensor:
        return self.dropout(self.attention(v, weights=weights, group=group))

    def _feed_forward(self, v: Tensor) -> Tensor:
        return self.dropout(self.linear2(self.dropout(self.activation(self.linear1(v)))))


class FourierAttention(FourierPatchAttention):
    """`FourierPatchAttention` for a number of patches, with a factor of the integrals in the scores."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        patch_size: Sequence[int],
        modes: Sequence[int],
        num_patches: Sequence[int],
        *,
        factor: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, patch_size, modes, device=device, dtype=dtype)
        self.num_patches, self.factor = num_patches, factor

    def forward(  # type: ignore[override]
        self, u: Tensor, weights: Tensor | None = None, *, group: ShardedMesh | None = None
    ) -> Tensor:
        size = patch_size("u", u.shape[1:-1], patches_of(group, self.num_patches))
        return super().forward(u, weights, patch_size=size, group=group)

    def _counts(self, grid: Sequence[int], points: Sequence[int]) -> Sequence[int]:
        return self.num_patches  # numbers, where a compiled graph has symbols for grid and points

    def _weights(self, modes: PatchModes, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._weights(modes, dtype)
        return (q if self.factor == 1.0 else self.factor * q), k, v


class ExtendedAttention(nn.Module):
    """Multi-head patch attention whose Q, K, V are spectral convolutions of the mirrored patches (CA 6.2.3).

    The extension is removed before the inner products, in which the modes, those of twice the period, are
    then not orthogonal: Q, K and V are evaluated at the points. (B, *grid, embed_dim) -> the same.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        modes: Sequence[int],
        num_patches: Sequence[int],
        *,
        factor: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_patches, self.factor = num_heads, num_patches, factor
        self.in_conv = PatchSpectralConv(
            embed_dim,
            3 * embed_dim,
            modes,
            num_patches,
            periodic_extension=True,
            device=device,
            dtype=dtype,
        )
        self.out_proj = nn.Linear(embed_dim, embed_dim, device=device, dtype=dtype)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self, u: Tensor, weights: Tensor | None = None, *, group: ShardedMesh | None = None
    ) -> Tensor:
        qkv = self.in_conv(u, group=group)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in qkv.chunk(3, dim=-1))
        size = patch_size("u", u.shape[1:-1], patches_of(group, self.num_patches))
        return self.out_proj(attend_patches(q, k, v, size, weights, self.factor, group).flatten(-2))


class FinalSpectral(SpectralConv):
    """z -> z + K z with a spectral convolution K on the whole grid that starts as 0 (CA 6.2, remark 21)."""

    def __init__(
        self,
        channels: int,
        modes: Sequence[int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, channels, modes, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, u: Tensor) -> Tensor:
        return u + super().forward(u)
