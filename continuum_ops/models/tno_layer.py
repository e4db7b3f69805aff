"""Pointwise networks and the encoder layer of the transformer neural operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..nn import TransformerEncoderLayer
from ..nn.quadrature_context import Mesh

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

    from ..distributed import ShardedMesh

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


class TNOEncoderLayer(TransformerEncoderLayer):
    """One encoder layer: CA eq. (10), or CA eq. (34) without layer norm.

    ::

        v <- norm1(W1 v + A(v))        A: multi-head continuum attention (CA 11, 57-59)
        v <- norm2(W2 v + F(v))        F(v) = linear2(f(linear1(v))) (CA 18)

    and with ``norm_first`` the pre-norm order v <- W1 v + A(norm1(v)), v <- W2 v + F(norm2(v)). W1 and W2
    are learnable d_model x d_model matrices ``residual1`` and ``residual2`` that start as the identity, or
    the identity itself (``residual_weights=False``), which leaves the parent class's layer, batch first.
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
        super().__init__(
            d_model,
            num_heads,
            dim_feedforward,
            dropout,
            activation,
            batch_first=True,
            norm_first=norm_first,
            device=device,
            dtype=dtype,
        )
        if not layer_norm:
            self.register_module("norm1", nn.Identity())
            self.register_module("norm2", nn.Identity())
        self.residual1: nn.Module = nn.Identity()
        self.residual2: nn.Module = nn.Identity()
        if residual_weights:
            self.residual1 = identity_map(d_model, device, dtype)
            self.residual2 = identity_map(d_model, device, dtype)

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
        """src (B, N, d_model) -> (B, N, d_model); the other arguments as in the parent class."""

        def attention(v: Tensor) -> Tensor:
            return self._sa_block(v, src_mask, src_key_padding_mask, is_causal, weights, group)

        v = src
        if self.norm_first:
            v = self.residual1(v) + attention(self.norm1(v))
            return self.residual2(v) + self._ff_block(self.norm2(v))
        v = self.norm1(self.residual1(v) + attention(v))
        return self.norm2(self.residual2(v) + self._ff_block(v))


def identity_map(size: int, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Linear:
    """A learnable linear map that starts as the identity."""
    linear = nn.Linear(size, size, bias=False, device=device, dtype=dtype)
    nn.init.eye_(linear.weight)
    return linear
