"""Quantile radius, dense: forms the N x M distances. For tests and for reading."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .position_attention import squared_distance


def quantile_radius(
    query_pos: Tensor, key_pos: Tensor, quantile: float, *, period: Sequence[float] | None = None
) -> Tensor:
    """The quantile of |x_i - y_k| over the keys k, with linear interpolation; positions as tensors."""
    return squared_distance(query_pos, key_pos, period).sqrt().quantile(quantile, dim=-1)
