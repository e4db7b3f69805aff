"""Blocks of the position-induced transformer."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..mesh import Mesh
from ..nn import PositionAttention
from ..nn.quadrature_context import current_weights
from ..ops.continuum_attention import continuum_attention
from .tno_layer import PointwiseNetwork

Weights = Literal["mesh", "equal"]


class MeshPair(NamedTuple):
    """The meshes between which an attention layer works.

    query, key: meshes or tensors of points. radius: (N,) or (B, N), that of a local layer; None: global.
    period: lengths of the domain, or None where no axis is periodic. group: the ranks that the keys are
    spread over, the queries being the same on all; None: this process has all keys.
    """

    query: Mesh | Tensor
    key: Mesh | Tensor
    radius: Tensor | None
    period: tuple[float, ...] | None
    group: Any = None


class SelfAttention(nn.Module):
    r"""Self-attention over the points of one mesh, with or without positions in the score.

    .. math::
        out_i = \operatorname{concat}_h \frac{\sum_k w_k e^{s_{ik}} (u_k V_h)}{\sum_k w_k e^{s_{ik}}}, \qquad
        s_{ik} = \frac{(u_i Q_h) \cdot (u_k K_h)}{\sqrt{width / H}} - r_h |x_i - x_k|^2

    PiT eq. (12), with the scale that belongs to several heads; without the last term eq. (3), vanilla
    self-attention. No biases. With weights w the sums are integrals over the mesh.

    Args:
        width: channels, divisible by num_heads.
        num_heads: heads H.
        rate: arguments of `PositionAttention` for r_h; None: no positions in the score.
        factory: device and dtype of the parameters.
    """

    def __init__(
        self, width: int, num_heads: int, rate: dict[str, Any] | None, factory: dict[str, Any]
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_proj = nn.Linear(width, width, bias=False, **factory)
        self.key_proj = nn.Linear(width, width, bias=False, **factory)
        # Position attention's own layer holds the values' projection and the rates; it is not called.
        self.position = (
            None if rate is None else PositionAttention(width, width, num_heads, **rate, **factory)
        )
        self.value_proj = nn.Linear(width, width, bias=False, **factory) if rate is None else None
        for linear in (self.query_proj, self.key_proj, self.value_proj):
            if linear is not None:
                nn.init.normal_(linear.weight, std=width**-0.5)

    def forward(self, u: Tensor, pair: MeshPair, weights: Weights) -> Tensor:
        """u (B, N, width) at the points of pair.key -> (B, N, width)."""
        project_value = self.value_proj if self.position is None else self.position.value_proj
        assert project_value is not None
        q, k, v = (
            linear(u).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.query_proj, self.key_proj, project_value)
        )
        w: Tensor | None = None
        if weights == "mesh":
            w = pair.key.weights if isinstance(pair.key, Mesh) else current_weights(u.shape[1])
        w = w[:, None] if w is not None and w.ndim == 2 else w
        if self.position is None:
            out = continuum_attention(q, k, v, w)
        else:
            points = pair.key.points if isinstance(pair.key, Mesh) else pair.key
            out = continuum_attention(
                q, k, v, w, query_pos=points, key_pos=points, rate=self.position.rate, period=pair.period
            )
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).flatten(2)


def attend(
    attention: PositionAttention | SelfAttention, u: Tensor, pair: MeshPair, weights: Weights
) -> Tensor:
    """Apply an attention layer of either kind between two meshes."""
    if isinstance(attention, SelfAttention):
        return attention(u, pair, weights)
    return attention(
        u,
        pair.query,
        pair.key,
        weights=weights,
        radius=pair.radius,
        period=pair.period,
        group=pair.group,
        query_replicated=pair.group is not None,
    )


class PiTBlock(nn.Module):
    """One module of the processor (PiT 2.3), with f = GELU, A attention over one mesh.

    ::

        u <- f(MLP(f(A(u))) + LINEAR(u))        heads that split the width
        u <- f(MLP([u, A(u)]))                  heads concatenated to the input (the later published code)

    Args:
        width: channels of u.
        attention: A, to width channels, or to num_heads * width with concatenate.
        concatenate: the second form.
        factory: device and dtype of the parameters.
    """

    def __init__(
        self,
        width: int,
        attention: PositionAttention | SelfAttention,
        concatenate: bool,
        factory: dict[str, Any],
    ) -> None:
        super().__init__()
        self.attention = attention
        features = width
        if concatenate:
            assert isinstance(attention, PositionAttention)
            features = width + attention.out_features
        self.mlp = PointwiseNetwork(features, width, width, F.gelu, **factory)
        self.linear = None if concatenate else nn.Linear(width, width, **factory)

    def forward(self, u: Tensor, pair: MeshPair, weights: Weights) -> Tensor:
        """u (B, N, width) -> (B, N, width), at the points of pair.key, which are those of pair.query."""
        mixed = attend(self.attention, u, pair, weights)
        if self.linear is None:
            return F.gelu(self.mlp(torch.cat([u, mixed], dim=-1)))
        return F.gelu(self.mlp(F.gelu(mixed)) + self.linear(u))
