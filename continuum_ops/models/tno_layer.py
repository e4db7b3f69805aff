"""Pointwise networks and the encoder layer of the transformer neural operator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..nn import MultiheadAttention

Activation = Callable[[Tensor], Tensor]
_ACTIVATIONS: dict[str, Activation] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh}


def resolve_activation(activation: str | Activation) -> Activation:
    """The function behind a name; a callable is returned as it is."""
    if isinstance(activation, str):
        if activation not in _ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {sorted(_ACTIVATIONS)} or a callable, was {activation!r}"
            )
        return _ACTIVATIONS[activation]
    if not callable(activation):
        raise TypeError(f"activation must be a str or a callable, was {type(activation).__name__}")
    return activation


class PointwiseNetwork(nn.Module):
    """x -> A2 f(A1 x + b1) + b2 at each point: the lift (CA 32) and the projection (CA 33).

    (..., in_features) -> (..., out_features).
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        activation: Activation,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.linear1 = nn.Linear(in_features, hidden_features, device=device, dtype=dtype)
        self.linear2 = nn.Linear(hidden_features, out_features, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.activation(self.linear1(x)))


class TNOEncoderLayer(nn.Module):
    """One encoder layer: CA eq. (10), or CA eq. (34) without layer norm.

    ::

        v <- norm1(W1 v + A(v))        A: multi-head continuum attention (CA 11, 57-59)
        v <- norm2(W2 v + F(v))        F(v) = linear2(f(linear1(v))) (CA 18)

    and with ``norm_first`` the pre-norm order v <- W1 v + A(norm1(v)), v <- W2 v + F(norm2(v)). W1 and W2 are
    learnable d_model x d_model matrices that start as the identity, or the identity itself
    (``residual_weights=False``). Parameters and their names are those of ``torch.nn.TransformerEncoderLayer``,
    with ``residual1`` and ``residual2`` (W1, W2) besides.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        dim_feedforward: int,
        dropout: float,
        activation: Activation,
        *,
        norm_first: bool,
        layer_norm: bool,
        residual_weights: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.self_attn = MultiheadAttention(
            d_model, num_heads, dropout=dropout, batch_first=True, device=device, dtype=dtype
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, device=device, dtype=dtype)
        self.linear2 = nn.Linear(dim_feedforward, d_model, device=device, dtype=dtype)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

        def norm() -> nn.Module:
            return nn.LayerNorm(d_model, device=device, dtype=dtype) if layer_norm else nn.Identity()

        def residual() -> nn.Module:
            if not residual_weights:
                return nn.Identity()
            linear = nn.Linear(d_model, d_model, bias=False, device=device, dtype=dtype)
            nn.init.eye_(linear.weight)
            return linear

        self.norm1, self.norm2 = norm(), norm()
        self.residual1, self.residual2 = residual(), residual()

    def forward(self, v: Tensor, weights: Tensor | None = None) -> Tensor:
        """v (B, N, d_model), weights (N,) or (B, N) -> (B, N, d_model)."""
        if self.norm_first:
            v = self.residual1(v) + self._attention(self.norm1(v), weights)
            return self.residual2(v) + self._feed_forward(self.norm2(v))
        v = self.norm1(self.residual1(v) + self._attention(v, weights))
        return self.norm2(self.residual2(v) + self._feed_forward(v))

    def _attention(self, v: Tensor, weights: Tensor | None) -> Tensor:
        # need_weights would form the N x N attention matrix.
        return self.dropout(self.self_attn(v, v, v, need_weights=False, weights=weights)[0])

    def _feed_forward(self, v: Tensor) -> Tensor:
        return self.dropout(self.linear2(self.dropout(self.activation(self.linear1(v)))))
