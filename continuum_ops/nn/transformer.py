"""Transformer encoder with continuum attention and the interface of ``torch.nn``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .multihead_attention import MultiheadAttention
from .quadrature_context import Mesh

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

    from ..distributed import ShardedMesh


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """``torch.nn.TransformerEncoderLayer`` whose self-attention is ``continuum_ops.nn.MultiheadAttention``.

    With A the multi-head continuum attention and F the pointwise feed-forward network (CA section 4.2),

        x <- norm1(x + A(x)),  x <- norm2(x + F(x)),      or with norm_first
        x <- x + A(norm1(x)),  x <- x + F(norm2(x)).

    Constructor arguments, parameters, initialisation, state dict and, with equal weights or none, outputs are
    those of the stock layer. The inference fast path of the stock layer, which knows no weights, is never
    taken. A stock ``torch.nn.TransformerEncoder`` around this layer needs ``enable_nested_tensor=False``,
    else it warns; ``continuum_ops.nn.TransformerEncoder`` does not, and passes ``weights`` on.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device=device,
            dtype=dtype,
        )
        # Adopted, not built anew: the same seed gives the same parameters as the stock layer.
        self.self_attn.__class__ = MultiheadAttention
        forbid_fast_path(self)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        weights: Tensor | Mesh | None = None,
        group: ProcessGroup | DeviceMesh | ShardedMesh | None = None,
    ) -> Tensor:
        """Pass ``src`` through the layer.

        Args:
            src: (N, B, d_model), or (B, N, d_model) with ``batch_first``, or (N, d_model).
            src_mask: (N, N) or (B * nhead, N, N); bool (True masks out) or floating point (added to the
                scores).
            src_key_padding_mask: (B, N), or (N,) without a batch; bool (True takes the point out) or
                floating point.
            is_causal: point i sees the points j <= i; ``src_mask`` is not read then.
            weights: quadrature weights of the points: (N,), (B, N), (B, nhead, N) or a mesh; see
                :meth:`MultiheadAttention.forward`, also for the errors.
            group: the ranks that the points are spread over, see there; None: this process has all points.

        Returns:
            A tensor of the shape of ``src``.
        """
        x = src
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), src_mask, src_key_padding_mask, is_causal, weights, group)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(x + self._sa_block(x, src_mask, src_key_padding_mask, is_causal, weights, group))
        return self.norm2(x + self._ff_block(x))

    def _sa_block(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool = False,
        weights: Tensor | Mesh | None = None,
        group: ProcessGroup | DeviceMesh | ShardedMesh | None = None,
    ) -> Tensor:
        out, _ = self.self_attn(
            x,
            x,
            x,
            key_padding_mask=key_padding_mask,
            need_weights=False,
            attn_mask=attn_mask,
            is_causal=is_causal,
            weights=weights,
            group=group,
        )
        return self.dropout1(out)


class TransformerEncoder(nn.TransformerEncoder):
    """``torch.nn.TransformerEncoder`` that hands quadrature weights to each of its layers.

    Args:
        encoder_layer: a :class:`TransformerEncoderLayer`, copied ``num_layers`` times.
        num_layers: number of layers.
        norm: applied after the last layer, or None.
        enable_nested_tensor, mask_check: accepted as by torch.nn; nested tensors are not used, so that
            neither changes anything.

    Raises:
        TypeError: ``encoder_layer`` is not a :class:`TransformerEncoderLayer` of this package.
    """

    def __init__(
        self,
        encoder_layer: TransformerEncoderLayer,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        if not isinstance(encoder_layer, TransformerEncoderLayer):
            raise TypeError(
                "encoder_layer must be a continuum_ops.nn.TransformerEncoderLayer, "
                f"got {type(encoder_layer).__module__}.{type(encoder_layer).__qualname__}"
            )
        super().__init__(encoder_layer, num_layers, norm, enable_nested_tensor=False)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        *,
        weights: Tensor | Mesh | None = None,
        group: ProcessGroup | DeviceMesh | ShardedMesh | None = None,
    ) -> Tensor:
        """Pass ``src`` through the layers in turn; arguments as in :meth:`TransformerEncoderLayer.forward`.

        ``is_causal=None`` is False: unlike the stock encoder, this one does not look for a causal pattern in
        ``mask``. The result is the same; ``is_causal=True`` is faster.
        """
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, bool(is_causal), weights=weights, group=group)
        return src if self.norm is None else self.norm(src)


def forbid_fast_path(layer: nn.TransformerEncoderLayer) -> None:
    """Keep a stock encoder layer, or a subclass of it, off the fused inference path that skips ``self_attn``.

    The layer, and ``torch.nn.TransformerEncoder`` at construction, take that path only where this attribute
    says that the activation is one that the fused kernel knows; ``activation`` itself stays what it was.
    """
    layer.activation_relu_or_gelu = 0
