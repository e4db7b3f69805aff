"""Position attention: Gaussian attention between two meshes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import reference
from ..mesh import Grid


def position_attention(
    query_pos: Tensor | Grid,
    key_pos: Tensor | Grid,
    value: Tensor,
    rate: Tensor,
    weights: Tensor | Sequence[Tensor] | None = None,
    *,
    radius: Tensor | float | None = None,
    period: Sequence[float] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Softmax attention whose scores are -rate_h |x_i - y_k|^2 (PiT eq. 5, 9, 10, 22)."""
    x, y = (p.points if isinstance(p, Grid) else p for p in (query_pos, key_pos))
    if weights is not None and not isinstance(weights, Tensor):
        product = weights[0]
        for w in weights[1:]:
            product = (product[:, None] * w).flatten()
        weights = product
    return reference.position_attention(
        x, y, value, rate, weights, radius=radius, period=period, return_lse=return_lse
    )
