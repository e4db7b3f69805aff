"""Fourier attention, dense: forms the N x M products. For tests and for reading."""

from __future__ import annotations

from torch import Tensor

from .galerkin_attention import live_rows


def fourier_attention(query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None = None) -> Tensor:
    """out = (q k^T) W v, W = diag(w), default w = 1/M (GT eq. 5).

    Arguments as of :func:`continuum_ops.fourier_attention`; computed in the dtype of query.
    """
    key, value, w = live_rows(key, value, weights)
    return (query @ key.transpose(-2, -1)) @ (w[..., None] * value)
