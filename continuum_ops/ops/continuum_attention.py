"""Continuum attention: softmax attention whose sum over keys is a quadrature rule."""

from __future__ import annotations

from torch import Tensor

from .. import reference


def continuum_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    query_pos: Tensor | None = None,
    key_pos: Tensor | None = None,
    rate: Tensor | None = None,
    period: object = None,
    radius: object = None,
) -> Tensor | tuple[Tensor, Tensor]:
    return reference.continuum_attention(
        query, key, value, weights, attn_mask=attn_mask, is_causal=is_causal, scale=scale, return_lse=return_lse
    )
