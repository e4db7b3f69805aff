"""Encoder layer of the Galerkin transformer, with either layer norm scheme of GT."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .galerkin_attention import AttentionType, GalerkinAttention
from .quadrature_context import Mesh

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

    from ..distributed import ShardedMesh

LayerNormScheme = Literal["galerkin", "regular", "post"]


class GalerkinEncoderLayer(nn.Module):
    """Attention and a two-layer pointwise network g, each with a skip connection (GT section 4.1).

    layer_norm="galerkin": z = y + Attn(y), out = z + g(z), with the norms inside the attention, before its
    products (GT eq. 4-6); scales pass through the layer.
    layer_norm="regular": z = y + Attn(y), out = Ln(z + g(Ln(z))), with no norm inside (GT eq. 7).
    layer_norm="post": z = Ln(y + Attn(y)), out = Ln(z + g(z)), with no norm inside: the order of Vaswani et
    al., whose second skip connection carries the normalised z.

    Args:
        d_model, num_heads: as of :class:`GalerkinAttention`.
        dim_feedforward: hidden channels of g; None: 2 d_model.
        attention_type, coord_dim, eta, delta: as of :class:`GalerkinAttention`.
        layer_norm: "galerkin", "regular" or "post".
        attention_dropout, dropout: probabilities in the attention and after the activation of g; both act in
            training only.
        activation: of g, a function of a tensor.
        device, dtype: of the parameters.

    Raises:
        ValueError: an unknown layer_norm, a number out of range, or what GalerkinAttention refuses.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        dim_feedforward: int | None = None,
        *,
        attention_type: AttentionType = "galerkin",
        coord_dim: int = 0,
        layer_norm: LayerNormScheme = "galerkin",
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = F.silu,
        eta: float = 1e-2,
        delta: float = 1e-2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if layer_norm not in ("galerkin", "regular", "post"):
            raise ValueError(f'layer_norm must be "galerkin", "regular" or "post", got {layer_norm!r}')
        self.post_norm = layer_norm == "post"
        regular = layer_norm != "galerkin"
        hidden = 2 * d_model if dim_feedforward is None else dim_feedforward
        if hidden < 1:
            raise ValueError(f"dim_feedforward must be at least 1, got {hidden}")
        self.attention = GalerkinAttention(
            d_model,
            num_heads,
            attention_type=attention_type,
            coord_dim=coord_dim,
            normalize=not regular,
            dropout=attention_dropout,
            eta=eta,
            delta=delta,
            device=device,
            dtype=dtype,
        )
        self.linear1 = nn.Linear(d_model, hidden, device=device, dtype=dtype)
        self.linear2 = nn.Linear(hidden, d_model, device=device, dtype=dtype)
        self.norm1: nn.Module = (
            nn.LayerNorm(d_model, device=device, dtype=dtype) if regular else nn.Identity()
        )
        self.norm2: nn.Module = (
            nn.LayerNorm(d_model, device=device, dtype=dtype) if regular else nn.Identity()
        )
        self.dropout = nn.Dropout(dropout)
        self.activation = activation

    def forward(
        self,
        src: Tensor,
        pos: Tensor | None = None,
        *,
        weights: Tensor | Mesh | None = None,
        group: ProcessGroup | DeviceMesh | ShardedMesh | None = None,
    ) -> Tensor:
        """src (B, N, d_model), pos (N, coord_dim) or (B, N, coord_dim) -> (B, N, d_model).

        weights and group as of :meth:`GalerkinAttention.forward`.
        """
        z = src + self.attention(src, query_pos=pos, weights=weights, group=group)
        z = self.norm1(z) if self.post_norm else z
        hidden = self.dropout(self.activation(self.linear1(z if self.post_norm else self.norm1(z))))
        return self.norm2(z + self.linear2(hidden))
