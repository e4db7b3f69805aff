"""Multi-head continuum attention with the interface of ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.continuum_attention import continuum_attention
from ._quadrature_blocks import Mesh, as_weights, current_weights

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

    from ..distributed import ShardedMesh


class MultiheadAttention(nn.MultiheadAttention):
    r"""``torch.nn.MultiheadAttention`` whose sum over the keys is a quadrature rule.

    Head h computes, with projected queries q_i, keys k_j and values v_j (CA definitions 5 and 11, and 12
    for the heads),

        out_i = sum_j w_j e^{s_ij} v_j / sum_j w_j e^{s_ij},   s_ij = q_i . k_j / sqrt(head_dim),

    and ``out_proj`` mixes the concatenated heads. With equal weights, or none, that is the stock layer.

    The constructor, the parameters, their initialisation and the state dict are those of
    ``torch.nn.MultiheadAttention`` (``embed_dim, num_heads, dropout=0.0, bias=True, add_bias_kv=False,
    add_zero_attn=False, kdim=None, vdim=None, batch_first=False, device=None, dtype=None``), of which this
    is a subclass without state of its own. It never takes that class's inference fast path, which knows no
    weights.

    Where it differs from the stock layer, besides ``weights``:

    * a query with no key left (all masked, or all weights zero) gives attention 0, where torch gives NaN;
    * ``is_causal=True`` needs no ``attn_mask``; with one it is the promise that the mask is the causal one,
      which is then not read. The keys of ``add_bias_kv`` and ``add_zero_attn`` are visible to every query
      even so;
    * the attention probabilities returned by ``need_weights=True`` are those before dropout, and the output
      is the same to rounding whether they are asked for or not;
    * ``out_proj`` is called as a module, so that its hooks run.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        weights: Tensor | Mesh | None = None,
        group: ProcessGroup | DeviceMesh | ShardedMesh | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from N queries to M keys.

        Args:
            query: (N, B, embed_dim), or (B, N, embed_dim) with ``batch_first``, or (N, embed_dim).
            key: (M, B, kdim), (B, M, kdim) or (M, kdim) likewise.
            value: (M, B, vdim), (B, M, vdim) or (M, vdim) likewise.
            key_padding_mask: (B, M), or (M,) without a batch. bool: True takes the key out. Floating point:
                added to the scores, which is to multiply w_j by its exponential; an entry so far below the
                largest of its row that this underflows (87 in float32) takes the key out.
            need_weights: also return the attention probabilities, formed densely (O(N M) memory).
            attn_mask: (N, M) or (B * num_heads, N, M). bool: True masks out. Floating point: added to the
                scores.
            average_attn_weights: average the returned probabilities over the heads.
            is_causal: query i sees the keys j <= i.
            weights: quadrature weights w_j >= 0 of the keys: (M,), (B, M) or (B, num_heads, M) whatever
                ``batch_first`` (B = 1 without a batch), floating point (used in the precision of the
                computation, at least float32), or a mesh with ``.weights``. None: those of an enclosing
                ``continuum_ops.nn.quadrature`` block of length M, else ones. Only ratios matter. A key with
                w_j = 0 does not exist. The keys that ``add_bias_kv`` and ``add_zero_attn`` append get the
                mean of the nonzero weights each.
            group: the ranks that the points are spread over, or a ``ShardedMesh`` whose points they are;
                query, key, value, weights and key_padding_mask are then this rank's part, attn_mask the rows
                of its queries with a column for each key of all ranks, and the sum runs over the keys of all
                ranks (:func:`continuum_ops.distributed.continuum_attention`, also for what ``is_causal`` and
                dropout mean there). Without ``need_weights``, whose N x M numbers no rank has, and without
                appended keys, which are in no rank's part. None: this process has all keys.

        Returns:
            The output, of the shape of ``query``, and the probabilities w_j e^{s_ij} / sum_j w_j e^{s_ij}:
            (B, N, M), or (B, num_heads, N, M) if not averaged, without B if there is no batch; None unless
            ``need_weights``. M counts appended keys.

        Raises:
            ValueError: a shape that does not fit, negative weights, nested tensors, or with ``group`` what it
                does not go with.
            TypeError: a mask that is neither bool nor floating point, weights that are not floating point.
        """
        batched = query.dim() == 3
        self._check_inputs(query, key, value)
        if group is not None:
            self._check_sharded(need_weights)
        # Projections run in the layout of the input; only views of their results are rearranged.
        q, k, v = (self._split_heads(x, batched) for x in self._project(query, key, value))
        batch, _, num_queries, _ = q.shape
        num_keys = k.shape[-2]

        w = current_weights(num_keys) if weights is None else as_weights(weights)
        if w is not None:
            w = self._canonical_weights(w, batch, num_keys, q)
        dropout_p = self.dropout if self.training else 0.0
        columns = num_keys if group is None or attn_mask is None else attn_mask.shape[-1]
        mask = _canonical_attn_mask(attn_mask, batch, self.num_heads, num_queries, columns, q.dtype)
        if is_causal:
            mask = None
        if group is not None:
            from ..distributed import continuum_attention as over_ranks

            if key_padding_mask is not None:
                padding = _canonical_padding_mask(key_padding_mask, batched, batch, num_keys)
                w = _fold_padding(w, padding, q.dtype, group)
            heads = over_ranks(*(q, k, v, w, group), attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal)
            assert isinstance(heads, Tensor)
            return self.out_proj(self._merge_heads(heads, batched)), None
        k, v, appended = self._append_keys(k, v)
        if appended:
            if is_causal:
                # The causal rule of the operator would hide the appended keys, which come last.
                mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril()
                is_causal = False
            if mask is not None:
                # Appended keys are visible: True to a keep-mask, 0 to an additive one.
                mask = F.pad(mask, (0, appended), value=1.0 if mask.dtype == torch.bool else 0.0)
            if w is not None:
                w = _append_mean(w, appended)
        if key_padding_mask is not None:
            padding = _canonical_padding_mask(key_padding_mask, batched, batch, num_keys)
            w = _fold_padding(w, F.pad(padding, (0, appended)), q.dtype)

        heads = continuum_attention(q, k, v, w, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal)
        assert isinstance(heads, Tensor)
        out = self.out_proj(self._merge_heads(heads, batched))
        if not need_weights:
            return out, None
        probabilities = _probabilities(q, k, w, mask, is_causal)
        if average_attn_weights:
            probabilities = probabilities.mean(dim=1)
        return out, probabilities if batched else probabilities.squeeze(0)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        widths = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        for name, x, width in widths:
            if x.is_nested:
                raise ValueError(
                    f"{name} must be a dense tensor, got a nested one; pad it and pass key_padding_mask"
                )
            if x.dim() not in (2, 3) or x.dim() != query.dim():
                raise ValueError(
                    "query, key and value must all be 3-D (batched) or all 2-D, "
                    f"got query of shape {tuple(query.shape)} and {name} of shape {tuple(x.shape)}"
                )
            if x.shape[-1] != width:
                raise ValueError(f"{name} must have {width} features, got shape {tuple(x.shape)}")
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"value must have the batch and length of key, {tuple(key.shape[:-1])}, "
                f"got {tuple(value.shape[:-1])}"
            )
        batch_dim = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch_dim] != key.shape[batch_dim]:
            raise ValueError(
                f"key must have the batch size of query, {query.shape[batch_dim]}, got {key.shape[batch_dim]}"
            )

    def _check_sharded(self, need_weights: bool) -> None:
        for name, given, why in (
            ("need_weights", need_weights, "no rank has the N x M probabilities"),
            ("add_bias_kv", self.bias_k is not None, "an appended key is in no rank's part"),
            ("add_zero_attn", self.add_zero_attn, "an appended key is in no rank's part"),
        ):
            if given:
                raise ValueError(f"{name} must be False where group is given, was True; {why}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        bias = self.in_proj_bias
        if self._qkv_same_embed_dim:
            packed = self.in_proj_weight
            e = self.embed_dim
            if query is key and key is value:
                return F.linear(query, packed, bias).chunk(3, dim=-1)
            if key is value:
                q = F.linear(query, packed[:e], None if bias is None else bias[:e])
                return q, *F.linear(key, packed[e:], None if bias is None else bias[e:]).chunk(2, dim=-1)
            projections = packed.chunk(3)
        else:
            projections = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(
            F.linear(x, p, b) for x, p, b in zip((query, key, value), projections, biases, strict=True)
        )

    def _split_heads(self, x: Tensor, batched: bool) -> Tensor:
        """(N, B, E), (B, N, E) or (N, E) -> a view (B, H, N, head_dim)."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if not batched:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _merge_heads(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.squeeze(0).transpose(0, 1).flatten(-2)
        return (x.transpose(1, 2) if self.batch_first else x.permute(2, 0, 1, 3)).flatten(-2)

    def _canonical_weights(self, w: Tensor, batch: int, num_keys: int, q: Tensor) -> Tensor:
        """Weights that broadcast to (B, H, M), in the precision that the operator keeps for them."""
        full = (batch, self.num_heads, num_keys)
        shaped = w.unsqueeze(1) if w.dim() == 2 else w
        fits = shaped.shape[-1] == num_keys and all(
            a in (1, b) for a, b in zip(reversed(shaped.shape), reversed(full), strict=False)
        )
        if not fits:
            raise ValueError(
                f"weights must have shape {full[2:]}, {full[::2]} or {full}, got {tuple(w.shape)}"
            )
        return shaped.to(_accumulation_dtype(q.dtype))

    def _append_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        appended = 0
        if self.bias_k is not None and self.bias_v is not None:
            rows = [
                b.view(1, self.num_heads, 1, self.head_dim).to(k.dtype) for b in (self.bias_k, self.bias_v)
            ]
            k, v = (
                torch.cat([x, r.expand(x.shape[0], -1, -1, -1)], dim=2)
                for x, r in zip((k, v), rows, strict=True)
            )
            appended += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            appended += 1
        return k, v, appended


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check_mask(mask: Tensor, name: str) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must be bool or floating point, got {mask.dtype}")


def _canonical_attn_mask(
    mask: Tensor | None, batch: int, num_heads: int, num_queries: int, num_keys: int, dtype: torch.dtype
) -> Tensor | None:
    """torch.nn's mask (bool: True masks out) as the operator's (bool: True keeps), (N, M) or (B, H, N, M)."""
    if mask is None:
        return None
    _check_mask(mask, "attn_mask")
    flat = (batch * num_heads, num_queries, num_keys)
    if mask.shape not in (flat[1:], flat):
        raise ValueError(
            f"attn_mask must have shape {flat[1:]} or {flat}, got {tuple(mask.shape)}; "
            "quadrature weights are passed as weights="
        )
    mask = ~mask if mask.dtype == torch.bool else mask.to(dtype)
    return mask if mask.dim() == 2 else mask.unflatten(0, (batch, num_heads))


def _canonical_padding_mask(mask: Tensor, batched: bool, batch: int, num_keys: int) -> Tensor:
    _check_mask(mask, "key_padding_mask")
    expected = (batch, num_keys) if batched else (num_keys,)
    if mask.shape != expected:
        raise ValueError(
            f"key_padding_mask must have shape {expected}, got {tuple(mask.shape)}; "
            "quadrature weights are passed as weights="
        )
    # A look at the values: on the CPU, where it costs nothing, and not in a graph that is being traced.
    looked_at = mask.is_floating_point() and mask.device.type == "cpu" and not torch.compiler.is_compiling()
    if looked_at and not bool((mask < math.inf).all()):
        raise ValueError("key_padding_mask must be finite or -inf, got inf or NaN")
    return mask.view(batch, num_keys)


def _append_mean(w: Tensor, count: int) -> Tensor:
    """Weights of ``count`` appended keys: the mean of the nonzero ones, so that equal weights stay equal."""
    mean = w.sum(-1, keepdim=True) / (w != 0).sum(-1, keepdim=True).clamp(min=1)
    return torch.cat([w, mean.expand(*mean.shape[:-1], count)], dim=-1)


def _fold_padding(w: Tensor | None, padding: Tensor, dtype: torch.dtype, group: Any = None) -> Tensor:
    """A key padding mask is a factor of the weights: e^{s + m} = e^m e^s. Costs no N x M mask."""
    padding = padding.unsqueeze(1)
    if padding.dtype == torch.bool:
        factor = (~padding).to(_accumulation_dtype(dtype))
        return factor if w is None else torch.where(padding, 0.0, w)
    padding = padding.to(_accumulation_dtype(dtype))
    if padding.shape[-1] > 0 or group is not None:
        # A common factor of a row's weights cancels: shifting by the maximum keeps the exponential in range.
        top = F.pad(padding.detach(), (0, 1), value=-math.inf).amax(-1, keepdim=True)
        if group is not None:
            from ..distributed._group import largest

            top = largest(top, group)
        padding = padding - top.masked_fill(top == -math.inf, 0.0)
    factor = padding.exp()
    return factor if w is None else w * factor


def _probabilities(q: Tensor, k: Tensor, w: Tensor | None, mask: Tensor | None, is_causal: bool) -> Tensor:
    """w_j e^{s_ij} / sum_j w_j e^{s_ij}, dense; rows without a key are 0."""
    dtype = _accumulation_dtype(q.dtype)
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    if is_causal:
        keep = keep.tril()
    if mask is not None and mask.dtype == torch.bool:
        keep = keep & mask
    bias = None
    if w is not None:
        live = (w != 0).unsqueeze(-2)
        keep = keep & live
        # A key of weight 0 does not exist: blanked before the product, so that NaN there cannot spread.
        k = torch.where(live.transpose(-2, -1), k, 0.0)
        bias = torch.where(live, w.unsqueeze(-2), 1.0).log()
    scores = (q.to(dtype) / math.sqrt(q.shape[-1])) @ k.to(dtype).transpose(-2, -1)
    scores = scores if bias is None else scores + bias
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
        keep = keep & (mask != -math.inf)
    scores = scores.masked_fill(~keep, -math.inf)
    # A row of -inf has no softmax; it is made finite first so that its gradient is 0 and not NaN.
    scores = scores.masked_fill(~keep.any(-1, keepdim=True), 0.0)
    return scores.softmax(-1).masked_fill(~keep, 0.0).to(q.dtype)
