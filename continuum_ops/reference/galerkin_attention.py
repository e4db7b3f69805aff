"""Galerkin attention in the order of the formula. For tests and for reading."""

from __future__ import annotations

import torch
from torch import Tensor


def galerkin_attention(query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None = None) -> Tensor:
    """out = q (k^T W v), W = diag(w), default w = 1/M (GT eq. 6).

    Arguments as of :func:`continuum_ops.galerkin_attention`; computed in the dtype of query.
    """
    key, value, w = live_rows(key, value, weights)
    return query @ (key.transpose(-2, -1) @ (w[..., None] * value))


def live_rows(key: Tensor, value: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """key, value and weights, the rows of weight zero blanked: they do not exist, even if they hold NaN."""
    m = key.shape[-2]
    if weights is None:
        return key, value, key.new_full((m,), 1.0 / m if m > 0 else 0.0)
    w = weights.to(key.dtype)
    dead = (w == 0)[..., None]
    return torch.where(dead, 0.0, key), torch.where(dead, 0.0, value), torch.where(w == 0, 0.0, w)
