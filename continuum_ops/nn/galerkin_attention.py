"""Multi-head attention without softmax, and the encoder layer around it (GT section 4)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import _galerkin_attention_fused as fused
from ..ops.continuum_attention import continuum_attention
from ..ops.fourier_attention import fourier_attention
from ..ops.galerkin_attention import galerkin_attention
from .quadrature_context import Mesh, as_weights, current_weights

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

    from ..distributed import ShardedMesh

AttentionType = Literal["galerkin", "fourier", "linear", "softmax"]
# Which projections are normalised per head (GT eq. 5, 6 and table 2).
NORMALIZED = {"galerkin": "kv", "fourier": "qk", "linear": "kv", "softmax": "qk"}
FUSED = ("galerkin", "fourier")  # what one operator can serve, norms and k^T W v together


class GalerkinAttention(nn.Module):
    r"""Multi-head attention of Cao, "Choose a Transformer: Fourier or Galerkin" (GT section 4).

    With the projections q, k, v of each head, Ln a layer norm over the channels of the head, x the
    coordinates and w the quadrature weights of the keys:

    ============== ============================================================================ ==========
    attention_type out                                                                          GT
    ============== ============================================================================ ==========
    "galerkin"     [x, q] ([x, Ln k]^T W [x, Ln v])                                             eq. (6)
    "fourier"      ([x, Ln q] @ [x, Ln k]^T) W [x, v], computed in the order q (k^T W v)        eq. (5)
    "linear"       softmax_channels(q) (softmax_points(k)^T v), q, k, v as in "galerkin"; the   LT, eq. (7)
                   softmax over the keys carries the weights: w e^k / sum w e^k
    "softmax"      continuum attention of [x, Ln q], [x, Ln k], [x, v] with weights w           ST
    ============== ============================================================================ ==========

    The coordinates join every head after the norm and before the products (the recurrent enrichment of
    positional encoding), so a head is head_dim + coord_dim wide; ``out_proj`` maps the concatenated heads
    back to embed_dim. All but "softmax" take O(N + M) memory and time.

    The projections start as W = eta U + delta I with U uniform on +-sqrt(3 / embed_dim), near the diagonal
    (GT eq. 17), and bias 0. Norms start with weight 1; in "fourier" that of q starts with 1 / sqrt(head_dim),
    so that q . k is of size 1 at first: nothing else bounds the scale of v there, and with products of size
    head_dim the layers amplify it until training diverges.

    Dropout acts in training mode only. For "galerkin", "fourier" and "linear" it acts on the (small) matrix
    k^T W v of each head, since the N x M matrix is never formed; for "softmax" on the attention
    probabilities.

    On CUDA the norms are torch's and the products BLAS. With ``CONTINUUM_OPS_FUSED_GALERKIN=1`` in the
    environment when the package is imported, one Triton kernel normalises k and v of "galerkin" (k of
    "fourier"), adds the coordinates and sums k^T W v, each of k and v read once; another one takes the
    gradients back, the norms computed anew. They serve float32, bfloat16 and float16 with head_dim <= 256 and
    coord_dim <= 3; other layers, ``group`` and the transforms of torch.func go the usual way. 16-bit
    projections are normalised in float32 and not rounded again before the product. The switch is off by
    default until the kernels have been measured on a GPU.

    Args:
        embed_dim: channels, divisible by num_heads.
        num_heads: number of heads.
        attention_type: see the table.
        coord_dim: dimension of the coordinates that join each head; 0: none.
        normalize: False leaves the norms Ln out, for the regular layer norm scheme (GT eq. 7).
        dropout: probability.
        bias: of the four projections.
        eta, delta: of the initialisation; eta=1, delta=0 is Xavier's.
        device, dtype: of the parameters.

    Raises:
        ValueError: a number out of range, embed_dim not divisible by num_heads, an unknown attention_type.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        attention_type: AttentionType = "galerkin",
        coord_dim: int = 0,
        normalize: bool = True,
        dropout: float = 0.0,
        bias: bool = True,
        eta: float = 1e-2,
        delta: float = 1e-2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        limits = (("embed_dim", embed_dim, 1), ("num_heads", num_heads, 1), ("coord_dim", coord_dim, 0))
        for name, number, least in limits:
            if number < least:
                raise ValueError(f"{name} must be at least {least}, got {number}")
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}")
        if attention_type not in NORMALIZED:
            raise ValueError(
                f"attention_type must be one of {', '.join(map(repr, NORMALIZED))}, got {attention_type!r}"
            )
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must be a probability in [0, 1], got {dropout}")
        self.embed_dim, self.num_heads, self.coord_dim = embed_dim, num_heads, coord_dim
        self.head_dim = embed_dim // num_heads
        self.attention_type, self.dropout = attention_type, dropout
        self.eta, self.delta = eta, delta
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.out_proj = nn.Linear(embed_dim + num_heads * coord_dim, embed_dim, bias, device, dtype)

        def norm(name: str) -> nn.Module:
            if not normalize or name not in NORMALIZED[attention_type]:
                return nn.Identity()
            return HeadNorm(num_heads, self.head_dim, device=device, dtype=dtype)

        self.q_norm, self.k_norm, self.v_norm = norm("q"), norm("k"), norm("v")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GT eq. (17) for the projections, Xavier for out_proj."""
        bound = math.sqrt(3.0 / self.embed_dim)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.uniform_(projection.weight, -self.eta * bound, self.eta * bound)
            with torch.no_grad():
                projection.weight.diagonal().add_(self.delta)
        nn.init.xavier_uniform_(self.out_proj.weight)
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        for norm in (self.q_norm, self.k_norm, self.v_norm):
            if isinstance(norm, HeadNorm):
                nn.init.ones_(norm.weight)
                nn.init.zeros_(norm.bias)
        if self.attention_type == "fourier" and isinstance(self.q_norm, HeadNorm):
            nn.init.constant_(self.q_norm.weight, 1.0 / math.sqrt(self.head_dim))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_pos: Tensor | None = None,
        *,
        weights: Tensor | Mesh | None = None,
        group: ProcessGroup | DeviceMesh | ShardedMesh | None = None,
    ) -> Tensor:
        """Attend from N points to M points.

        Args:
            query: (B, N, embed_dim).
            key: (B, M, embed_dim); None: query.
            value: (B, M, embed_dim); None: key.
            query_pos: (N, coord_dim) or (B, N, coord_dim); required if coord_dim > 0.
            key_pos: (M, coord_dim) or (B, M, coord_dim); None: query_pos, for M = N.
            weights: quadrature weights >= 0 of the keys, (M,), (B, M) or (B, num_heads, M), or a mesh with
                ``.weights``; used as they are. None: those of an enclosing ``continuum_ops.nn.quadrature``
                block of length M, else 1 / M ("linear" and "softmax", which see only ratios: equal). A key
                of weight 0 does not exist (its rows must be finite for the gradients of the projections).
            group: the ranks that the points are spread over, or a ``ShardedMesh`` whose points they are; all
                other arguments are then this rank's part, and M is the number of keys of all ranks
                (``continuum_ops.distributed``). Dropout is that of one process in the state of the first
                rank's generator. None: this process has all keys.

        Returns:
            (B, N, embed_dim).

        Raises:
            ValueError: a shape that does not fit, coordinates missing or not asked for, negative weights.
        """
        key = query if key is None else key
        value = key if value is None else value
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 3 or x.shape[-1] != self.embed_dim:
                raise ValueError(f"{name} must have shape (B, N, {self.embed_dim}), got {tuple(x.shape)}")
        key_pos = query_pos if key_pos is None else key_pos
        q = self._heads(self.q_norm(self._split(self.q_proj(query))), query_pos, "query_pos")
        k, v = self._split(self.k_proj(key)), self._split(self.v_proj(value))
        w = self._key_weights(weights, *k.shape[:2])
        if group is None and self._is_fused(k, v):
            out = self._attend_fused(q, k, v, key_pos, w)
        else:
            k = self._heads(self.k_norm(k), key_pos, "key_pos")
            v = self._heads(self.v_norm(v), key_pos, "key_pos")
            out = self._attend(q, k, v, w) if group is None else self._attend_over_ranks(q, k, v, w, group)
        return self.out_proj(out.transpose(1, 2).flatten(-2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def _key_weights(self, weights: Tensor | Mesh | None, batch: int, keys: int) -> Tensor | None:
        """(M,), (B, 1, M) or (B, H, M)."""
        w = current_weights(keys) if weights is None else as_weights(weights)
        if w is None:
            return None
        w = w.unsqueeze(1) if w.dim() == 2 else w
        full = (batch, self.num_heads, keys)
        if tuple(w.shape) not in (full[2:], (batch, 1, keys), full):
            raise ValueError(
                f"weights must have shape {full[2:]}, {full[::2]} or {full}, got {tuple(w.shape)}"
            )
        return w

    def _coordinates(self, pos: Tensor | None, batch: int, n: int, name: str) -> Tensor | None:
        """(1 or B, N, coord_dim); None for a layer without coordinates."""
        if self.coord_dim == 0:
            if pos is not None:
                raise ValueError(f"{name} must be None for a layer with coord_dim=0, got a tensor")
            return None
        shape = (n, self.coord_dim)
        if pos is None or tuple(pos.shape) not in (shape, (batch, *shape)):
            got = None if pos is None else tuple(pos.shape)
            raise ValueError(f"{name} must have shape {shape} or {(batch, *shape)}, got {got}")
        return pos if pos.dim() == 3 else pos.unsqueeze(0)

    def _heads(self, x: Tensor, pos: Tensor | None, name: str) -> Tensor:
        """(B, N, H, head_dim) -> (B, H, N, coord_dim + head_dim)."""
        batch, n = x.shape[:2]
        pos = self._coordinates(pos, batch, n, name)
        x = x.transpose(1, 2)
        if pos is None:
            return x
        pos = pos.unsqueeze(1).to(x.dtype)
        return torch.cat([pos.expand(*x.shape[:-1], self.coord_dim), x], dim=-1)

    def _is_fused(self, k: Tensor, v: Tensor) -> bool:
        if self.attention_type not in FUSED or k.shape != v.shape:
            return False
        return isinstance(self.k_norm, HeadNorm) and fused.chosen(k)

    def _attend_fused(
        self, q: Tensor, k: Tensor, v: Tensor, key_pos: Tensor | None, w: Tensor | None
    ) -> Tensor:
        """q (B, H, N, coord_dim + head_dim); k, v (B, M, H, head_dim), their norms not yet taken."""
        assert isinstance(self.k_norm, HeadNorm)
        batch, keys = k.shape[:2]
        pos = self._coordinates(key_pos, batch, keys, "key_pos")
        k_norm, v_norm = _scale_and_shift(self.k_norm), _scale_and_shift(self.v_norm)
        dropout_p = self.dropout if self.training else 0.0
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return fused.attention(q, k, v, pos, w, k_norm, v_norm, self.k_norm.eps, dropout_p)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None) -> Tensor:
        dropout_p = self.dropout if self.training else 0.0
        if self.attention_type == "softmax":
            out = continuum_attention(q, k, v, w, dropout_p=dropout_p)
            assert isinstance(out, Tensor)
            return out
        operator = fourier_attention if self.attention_type == "fourier" else galerkin_attention
        if self.attention_type == "linear":
            q, k, w = q.softmax(-1), _softmax_over_points(k, w), _live(k, w)
        if dropout_p == 0.0:
            return operator(q, k, v, w)
        # k^T W v itself is the answer to the queries e_1 .. e_D.
        unit = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        return q @ F.dropout(operator(unit.expand(*k.shape[:-2], -1, -1), k, v, w), dropout_p)

    def _attend_over_ranks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor | None,
        group: ProcessGroup | DeviceMesh | ShardedMesh,
    ) -> Tensor:
        from .. import distributed
        from ..distributed._group import first_of

        dropout_p = self.dropout if self.training else 0.0
        if self.attention_type == "softmax":
            out = distributed.continuum_attention(q, k, v, w, group, dropout_p=dropout_p)
            assert isinstance(out, Tensor)
            return out
        fourier = self.attention_type == "fourier"
        operator = distributed.fourier_attention if fourier else distributed.galerkin_attention
        if self.attention_type == "linear":
            q, k, w = q.softmax(-1), _softmax_over_points(k, w, group), _live(k, w)
        if dropout_p == 0.0:
            return operator(q, k, v, w, group)
        unit = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        matrix = operator(unit.expand(*k.shape[:-2], -1, -1), k, v, w, group)
        return q @ (matrix * first_of(F.dropout(torch.ones_like(matrix), dropout_p), group))

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, "
            f"attention_type={self.attention_type!r}, coord_dim={self.coord_dim}, dropout={self.dropout}"
        )


def _softmax_over_points(k: Tensor, w: Tensor | None, group: Any = None) -> Tensor:
    """w_k e^{k_kj} / sum_k w_k e^{k_kj} for each channel j, in float32 or wider; dead rows are 0.

    group: the ranks whose keys the sum runs over; None: these.
    """
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    if w is None and group is None:
        return k.softmax(-2)
    logits, dead = k, k.new_zeros((*k.shape[:-1], 1), dtype=torch.bool)
    if w is not None:
        dead = (w == 0).unsqueeze(-1)
        logits = torch.where(dead, -math.inf, k + torch.where(w == 0, 1.0, w).log().unsqueeze(-1).to(k.dtype))
    if group is None:
        # Without a live key there is no softmax: made finite, so that its gradient is 0 and not NaN.
        return logits.masked_fill(dead.all(-2, keepdim=True), 0.0).softmax(-2)
    from ..distributed._group import all_reduce, largest

    top = largest(F.pad(logits.detach(), (0, 0, 0, 1), value=-math.inf).amax(-2, keepdim=True), group)
    terms = (logits - top.masked_fill(top == -math.inf, 0.0)).exp()
    total = all_reduce(terms.sum(-2, keepdim=True), group)
    return terms / torch.where(total == 0.0, 1.0, total)


def _live(k: Tensor, w: Tensor | None) -> Tensor:
    """Weights of the product after the softmax over the points: 1 for a key that exists."""
    if w is None:
        return k.new_ones(k.shape[-2], dtype=torch.promote_types(k.dtype, torch.float32))
    # 0 stays; what is no weight reaches the operator, which refuses it.
    return torch.where((w > 0) & (w < math.inf), 1.0, w)


class HeadNorm(nn.Module):
    """Layer norm over the channels of each head, with weight and bias (num_heads, head_dim) of its own.

    (B, N, num_heads, head_dim) -> the same. GT eq. (5), (6): not over the batch, not over the points.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_heads, head_dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num_heads, head_dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight + self.bias


def _scale_and_shift(norm: nn.Module) -> fused.Norm:
    return fused.Norm(norm.weight, norm.bias) if isinstance(norm, HeadNorm) else fused.Norm(None, None)
