"""Position attention, dense: forms the N x M distances. For tests and for reading."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def position_attention(
    query_pos: Tensor,
    key_pos: Tensor,
    value: Tensor,
    rate: Tensor,
    weights: Tensor | None = None,
    *,
    radius: Tensor | float | None = None,
    period: Sequence[float] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """out_i = sum_k w_k e^{s_ik} v_k / sum_k w_k e^{s_ik}, s_ik = -rate_h |x_i - y_k|^2.

    PiT eq. 5, 9, 10, 22.
    Arguments as of :func:`continuum_ops.position_attention`, positions as tensors; computed in the widest
    dtype among positions, value and rate.
    """
    dtype = torch.promote_types(torch.promote_types(query_pos.dtype, value.dtype), rate.dtype)
    x, y, v, rate = (t.to(dtype) for t in (query_pos, key_pos, value, rate))
    v = v if v.dim() == 4 else v[:, None]  # (B, H or 1, M, C)
    d2 = squared_distance(x, y, period)
    d2 = d2[:, None] if d2.dim() == 3 else d2  # (B, 1, N, M) or (N, M)
    w = v.new_ones(y.shape[-2]) if weights is None else weights.to(dtype)
    w = w[:, None, None, :] if w.dim() == 2 else w
    keep = (w != 0) & torch.ones_like(d2, dtype=torch.bool)
    if radius is not None:
        reach = torch.as_tensor(radius, dtype=dtype, device=d2.device)
        reach = (
            reach[..., None] if reach.dim() == 1 else reach[:, None, :, None] if reach.dim() == 2 else reach
        )
        keep = keep & (d2 <= reach.square() * (1 + 8 * torch.finfo(dtype).eps))
    logits = -rate[:, None, None] * d2 + torch.where(w == 0, 1.0, w).log()  # (B or 1, H, N, M)
    logits = logits.masked_fill(~keep, -math.inf)
    live = keep.any(-1, keepdim=True)
    logits = torch.where(live, logits, 0.0)
    p = torch.where(live & keep, logits.softmax(-1), 0.0)
    v = torch.where((w == 0).transpose(-1, -2) if w.dim() == 4 else (w == 0)[:, None], 0.0, v)  # may hold NaN
    out = p @ v
    if not return_lse:
        return out
    lse = torch.where(live[..., 0], logits.logsumexp(-1), -math.inf)
    return out, lse.expand(out.shape[:-1])


def squared_distance(query_pos: Tensor, key_pos: Tensor, period: Sequence[float] | None) -> Tensor:
    """|x_i - y_k|^2, (..., N, M), to the nearest image along periodic axes; by direct differences."""
    difference = query_pos[..., :, None, :] - key_pos[..., None, :, :]
    if period is not None:
        length = difference.new_tensor(list(period))
        images = torch.where(length.isinf(), 0.0, (difference / length).round())
        difference = difference - images * torch.where(length.isinf(), 0.0, length)
    return difference.square().sum(-1)
