"""Multi-head attention between the patches of a grid, with pointwise projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..ops.patch_attention import patch_attention
from ._patches import patch_size, patches_of, per_axis
from .quadrature_context import Mesh, as_weights, current_weights

if TYPE_CHECKING:
    from ..distributed import ShardedMesh


class PatchAttention(nn.Module):
    r"""Multi-head patch attention with pointwise linear Q, K, V (CA definitions 13, 14 and eq. 62-64).

    The grid is cut into num_patches equal patches, the same number whatever the resolution. Head h computes

    .. math::
        out_p(x) = \sum_j \mathrm{softmax}_j\Big(scale \int_{D'} q_p \cdot k_j\Big) \, v_j(x), \qquad
        \int_{D'} f \approx \sum_{x \in D'} w(x) f(x)

    and ``out_proj`` mixes the concatenated heads at each point. The integrals make the scores those of the
    functions, not of their samples: a finer grid changes them by the error of the quadrature.

    Args:
        embed_dim: channels, divisible by num_heads.
        num_heads: heads of embed_dim / num_heads channels each.
        num_patches: patches along each of 1 to 3 axes of the query's grid; an int makes a 1-D layer.
        bias: of the four projections.
        scale: factor of the integrals; CA (63) has 1.
        device, dtype: of the parameters.

    Raises:
        TypeError: a number that is no int.
        ValueError: a number below 1, other than 1 to 3 axes, embed_dim not divisible by num_heads.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_patches: int | Sequence[int],
        *,
        bias: bool = True,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, number in (("embed_dim", embed_dim), ("num_heads", num_heads)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.num_patches = per_axis("num_patches", num_patches)
        self.scale = scale
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform matrices, biases 0."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        *,
        weights: Tensor | Mesh | None = None,
        group: ShardedMesh | None = None,
    ) -> Tensor:
        """Attend from the patches of one function to those of another, or of the same.

        Args:
            query: (B, n_1, .., n_d, embed_dim), channels last, n_i a multiple of num_patches[i].
            key: (B, m_1, .., m_d, embed_dim), any number of patches of the same shape, which are the values
                too (CA definition 18); None: query.
            weights: quadrature weights >= 0 of the query's grid, of its shape or (N,) in row-major order, or
                a mesh with ``.weights``; used as they are, in the integrals only. None: those of an enclosing
                ``continuum_ops.nn.quadrature`` block of length N, else 1 / N, a domain of volume 1.
            group: the query's grid, spread over ranks in boxes of these patches
                (``continuum_ops.distributed.shard`` with num_patches); query, key and weights are then this
                rank's part, N the points of all ranks, and the patches of keys go round a ring
                (:func:`continuum_ops.distributed.patch_attention`). None: this process has all patches.

        Returns:
            (B, n_1, .., n_d, embed_dim).

        Raises:
            ValueError: a shape that does not fit, a grid that the patches do not divide, negative weights.
        """
        key = query if key is None else key
        d = len(self.num_patches)
        for name, x in (("query", query), ("key", key)):
            if x.dim() != d + 2 or x.shape[-1] != self.embed_dim:
                axes = ", ".join(f"n_{i + 1}" for i in range(d))
                raise ValueError(
                    f"{name} must have shape (B, {axes}, {self.embed_dim}), got {tuple(x.shape)}"
                )
        shape = query.shape[1:-1]
        size = patch_size("query", shape, patches_of(group, self.num_patches))
        given = current_weights(shape.numel()) if weights is None else as_weights(weights)
        w = None if given is None else grid_weights(given, shape)
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, self.head_dim))
            for projection, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, key))
        )
        out = attend_patches(q, k, v, size, w, self.scale, group)
        return self.out_proj(out.flatten(-2))

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_patches={self.num_patches}, "
            f"scale={self.scale}"
        )


def attend_patches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Sequence[int],
    w: Tensor | None,
    factor: float,
    group: ShardedMesh | None,
) -> Tensor:
    """Patch attention of (B, *grid, H, head_dim), the integrals in its scores, or means, times `factor`."""
    if group is not None:
        from .. import distributed

        # The mean is over the points of all ranks.
        q = factor * q if w is None and factor != 1.0 else q
        scale = None if w is None else factor
        out = distributed.patch_attention(q, k, v, size, w, group.group, scale=scale)
    else:
        if w is None and factor != 1.0:
            w = equal_weights(q)
        out = patch_attention(q, k, v, size, w, scale=None if w is None else factor)
    assert isinstance(out, Tensor)
    return out


def equal_weights(q: Tensor) -> Tensor:
    """1 / N at the N points of q (B, *grid, H, C), for a factor other than 1 that means are multiplied with.

    A scale of factor / N would be a constant of a compiled graph, which serves one N only.
    """
    shape = q.shape[1:-2]
    return q.new_ones(shape, dtype=torch.promote_types(q.dtype, torch.float32)) / max(1, shape.numel())


def grid_weights(w: Tensor, shape: torch.Size) -> Tensor:
    """Weights (N,) in row-major order, or of the grid's shape already, in the grid's shape."""
    if w.shape not in (shape, (shape.numel(),)):
        raise ValueError(
            f"weights must have shape {tuple(shape)} or {(shape.numel(),)}, got {tuple(w.shape)}"
        )
    return w.reshape(shape)
