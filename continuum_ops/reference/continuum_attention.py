"""Continuum attention, dense: forms the N x M scores. For tests and for reading."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def continuum_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    query_pos: Tensor | None = None,
    key_pos: Tensor | None = None,
    rate: Tensor | float | None = None,
    period: Sequence[float] | None = None,
    radius: Tensor | float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """out_i = sum_k w_k e^{s_ik} v_k / sum_k w_k e^{s_ik}, s = scale q_i . k_k (CA def. 5, 11).

    Arguments as of :func:`continuum_ops.continuum_attention` but dropout; computed in the dtype of query.
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    n, m = query.shape[-2], key.shape[-2]
    w = query.new_ones(m) if weights is None else weights.to(query.dtype)
    dead = w == 0
    # A key of weight zero does not exist: blank it before any product, so that NaN there cannot spread.
    key = torch.where(dead[..., None], 0.0, key) if weights is not None else key
    value = torch.where(dead[..., None], 0.0, value) if weights is not None else value
    scores = scale * (query @ key.transpose(-2, -1))
    keep = ~dead[..., None, :]
    if query_pos is not None and key_pos is not None:
        d2 = _squared_distance(query_pos, key_pos, period)
        d2 = d2[..., None, :, :] if query.dim() > 2 else d2  # the same for all heads
        if rate is not None:
            scores = scores - torch.as_tensor(rate, dtype=query.dtype)[..., None, None] * d2
        if radius is not None:
            reach = torch.as_tensor(radius, dtype=query.dtype)
            if reach.dim() > 0:
                reach = reach[..., None, :, None] if query.dim() > 2 else reach[:, None]
            keep = keep & (d2 <= reach**2 * (1 + 8 * torch.finfo(query.dtype).eps))
    if is_causal:
        keep = keep & torch.ones(n, m, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            keep = keep & attn_mask
        else:
            scores = scores + attn_mask
            keep = keep & (attn_mask != -math.inf)
    logits = scores + torch.where(dead, 1.0, w).log()[..., None, :]
    logits = logits.masked_fill(~keep, -math.inf)
    live = keep.any(-1, keepdim=True) if m > 0 else keep.new_zeros((*keep.shape[:-1], 1))
    logits = torch.where(live, logits, 0.0)
    p = torch.where(live & keep, logits.softmax(-1), 0.0)
    out = p @ value
    if not return_lse:
        return out
    lse = torch.where(live[..., 0], logits.logsumexp(-1), -math.inf)
    return out, lse


def _squared_distance(query_pos: Tensor, key_pos: Tensor, period: Sequence[float] | None) -> Tensor:
    """|x_i - y_k|^2, (..., N, M), to the nearest image along periodic axes."""
    difference = query_pos[..., :, None, :] - key_pos[..., None, :, :]
    if period is not None:
        length = difference.new_tensor(list(period))
        images = torch.where(length.isinf(), 0.0, (difference / length).round())
        difference = difference - images * torch.where(length.isinf(), 0.0, length)
    return difference.square().sum(-1)
