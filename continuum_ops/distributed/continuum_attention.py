"""Continuum attention over a mesh that is spread over ranks: keys go round a ring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends import triton_kernels
from ..ops import _checks as shared
from ..ops import _continuum_attention_checks as checks
from ..ops import _direct as direct
from ..ops import continuum_attention as one_process
from ..ops._continuum_attention_autograd import _backward_op, forward_op
from ..ops._continuum_attention_chunked import accumulation_dtype
from ._attend import Block, Reduced, Rows, attend
from ._group import Group, Link, check_values, link, wanted
from ._replicated import merged_over_ranks
from ._routes import Ring

OP = "distributed.continuum_attention"
# A kernel may take g . out of a short block of keys from those keys alone, which is right where they are all
# the keys there are.
SHORT = 256
# Exponents up to this size need no shift.
BOUND = 40.0


@torch.compiler.disable
def continuum_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor | None = None,
    group: Group = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    return_lse: bool = False,
    query_replicated: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""``continuum_ops.continuum_attention`` with the points spread over the ranks of a process group.

    .. math::
        out_i = \frac{\sum_k w_k e^{s_{ik}} v_k}{\sum_k w_k e^{s_{ik}}}, \qquad
        s_{ik} = scale \; q_i \cdot k_k

    where k runs over the keys of all ranks (Calvello, Kovachki, Levine, Stuart, "Continuum Attention for
    Neural Operators", definitions 5 and 11). Every rank holds the queries and keys of its points, any number
    of them, also none. Keys, values and weights go round a ring while each rank computes with those it has
    (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023); partial results merge by the
    logarithms of their sums, and the backward pass goes round in the same way. Memory per rank is
    O((N + M) / ranks), N and M over all ranks and even parts.

    Args:
        query: (..., H, N_r, D), the queries of this rank; float64, float32, bfloat16 or float16.
        key: (..., H, M_r, D), query's dtype.
        value: (..., H, M_r, Dv), query's dtype. N_r and M_r are each rank's own; the other sizes, the dtype
            and which of the tensors require a gradient are the same on all ranks.
        weights: quadrature weights >= 0 and finite, (M_r,) or (..., M_r) broadcastable to (..., H, M_r); on
            all ranks or on none.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.
        scale: factor of q . k, the same on all ranks. None: 1 / sqrt(D).
        is_causal: must be False; the parts of a mesh have no order.
        return_lse: return (out, lse).
        query_replicated: query is the same on all ranks (a latent mesh), and so is the result: two
            all-reduces of the queries' size take the place of the ring.

    Returns:
        out (..., H, N_r, Dv) in query's dtype; with ``return_lse`` also lse (..., H, N_r), float32 (float64
        for float64 queries). They are what one process gives, to rounding, whatever the number of ranks; the
        same number of ranks gives the same bits. In a 16-bit dtype the partial results of the ranks are
        rounded besides.

    Gradients exist for query, key, value and weights, through out and lse, by the rule of this package (see
    ``continuum_ops.distributed``); every rank must use its result in what it differentiates. There are
    no second derivatives (but for ``query_replicated``), no masks and no dropout. ``torch.compile`` does not
    look inside. Argument, value and autocast rules are those of ``continuum_ops.continuum_attention``.

    Raises:
        TypeError: an argument of the wrong type or dtype, on this rank.
        ValueError: a wrong shape, device or value on this rank; sizes, dtypes or requirements of gradients
            that differ between the ranks.
        RuntimeError: another rank refused its arguments, died, or did not answer within the timeout of the
            process group.
    """
    at = link(OP, group)
    if isinstance(query, Tensor):
        query, key, value = shared.autocast(query, key, value)

    def look() -> Any:
        leads = _check(query, key, value, weights, scale, is_causal)
        sizes = tuple(key.shape), tuple(value.shape), None if weights is None else tuple(weights.shape)
        common = (
            ("the leading dimensions and the width of query, key and value", _common(query, key, value)),
            ("the leading dimensions of weights", None if weights is None else tuple(weights.shape[:-1])),
            ("the dtype of query", str(query.dtype)),
            ("the scale", scale),
            ("query_replicated", query_replicated),
            (
                "which of query, key, value and weights require a gradient",
                wanted(query, key, value, weights),
            ),
            ("the number of queries", query.shape[-2] if query_replicated else None),
        )
        return sizes, common, tuple(leads)

    seen = at.agree(look)
    for i, (what, _) in enumerate(seen[0][1]):
        at.same(what, [common[i][1] for _, common, _ in seen])
    leads = torch.Size(seen[0][2])
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] > 0 else 1.0
    own = [key, value]
    if weights is not None:
        own.append(weights.to(accumulation_dtype(query.dtype)))
    if query_replicated:
        out, lse = _replicated(query, own, float(scale), at)
    else:
        route = Ring(at, [[s for s in sizes if s is not None] for sizes, _, _ in seen])
        kernel = _stats_are_known(query, value)
        # The choice is the same on all ranks only by chance; nothing depends on that.
        form = (_Kernel if kernel else _Blocks)(leads, float(scale))
        out, lse = attend(form, route, [query], own)
    return (out, lse) if return_lse else out


def _check(query: Any, key: Any, value: Any, weights: Any, scale: Any, is_causal: Any) -> torch.Size:
    shared.check_tensor(OP, "query", query)
    leads = shared.check_qkv(OP, query, key, value)
    checks.check_numbers(0.0, scale, query.dtype)
    if weights is not None:
        shared.check_weights(OP, weights, query, (*leads, key.shape[-2]))
        if weights.shape[-1:] != key.shape[-2:-1]:
            raise ValueError(
                f"{OP}: weights must have an entry for each of the {key.shape[-2]} rows of key, "
                f"got shape {tuple(weights.shape)}"
            )
        check_values(OP, "weights", weights)
    if is_causal:
        raise ValueError(f"{OP}: is_causal must be False, the parts of a mesh have no order; got {is_causal}")
    return leads


def _common(query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple((*t.shape[:-2], t.shape[-1]) for t in (query, key, value))


def _stats_are_known(query: Tensor, value: Tensor) -> bool:
    """Whether the compiled kernels serve, whose record of a row is (shift, sum w / max w 2^(s - shift))."""
    if query.device.type == "cpu":
        return direct.KERNELS
    if query.device.type != "cuda" or not triton_kernels()[0]:
        return False
    from ..kernels import continuum_attention as kernel

    return bool(kernel.serves(query, value))


def _replicated(query: Tensor, own: Block, scale: float, at: Link) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(query.dtype)
    key, value, *weights = own
    with torch.autocast(query.device.type, enabled=False):
        out, lse = one_process(
            query.to(dtype), key.to(dtype), value.to(dtype), *weights, scale=scale, return_lse=True
        )
        out, lse = merged_over_ranks(out, lse, at)
    return out.to(query.dtype), lse


class _Blocks(Reduced):
    """Any backend, by the public operator."""

    value_at = 1

    def __init__(self, leads: torch.Size, scale: float) -> None:
        self.leads, self.scale = leads, scale

    def out_shape(self, local: Block, own: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rows = (*self.leads, local[0].shape[-2])
        return (*rows, own[1].shape[-1]), rows

    def empty(self, local: Block, block: Block) -> bool:
        return 0 in (*self.leads, local[0].shape[-2], block[0].shape[-2])

    def attend(self, local: Block, block: Block) -> tuple[Tensor, Tensor]:
        out, lse = one_process(*local, *block, scale=self.scale, return_lse=True)
        return out, lse


class _Kernel(_Blocks):
    """The compiled kernels, whose backward takes the record of all blocks: no block is computed again."""

    def share(self, local: Block, block: Block, shift: Tensor, all_: Rows) -> Tensor:
        # The kernel's record instead of lse, which is too coarse for large logits.
        part = self.forward(self._wide(local), self._wide(block))
        return super().share(local, block, part.shift, all_) * part.total

    def _inputs(self, local: Block, block: Block) -> tuple[list[Tensor | None], Tensor]:
        """The ten tensors of the operator, and log2 max w of each leading dimension."""
        query, key, value = (t.expand(*self.leads, *t.shape[-2:]) for t in (*local, *block[:2]))
        weights = block[2].expand(*self.leads, key.shape[-2]) if len(block) > 2 else None
        if weights is None:
            largest = query.new_zeros((*self.leads, 1), dtype=torch.float64)
        else:
            largest = weights.amax(-1, keepdim=True).double().log2()
        return [query, key, value, weights, *(None,) * 6], largest

    def forward(self, local: Block, block: Block) -> Rows:
        inputs, largest = self._inputs(local, block)
        out, _, stats = forward_op(*inputs, None, self.scale, 0.0, False)
        shift, total = stats.double().unbind(-1)
        return Rows(out, torch.where(total == 0, -math.inf, shift + largest), total)

    def backward(
        self, local: Block, block: Block, all_: Rows, g: Tensor, g_lse: Tensor | None, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        inputs, largest = self._inputs(local, block)
        if _short(inputs[1], inputs[3]):
            return super().backward(local, block, all_, g, g_lse, needs)  # which computes the block again
        shift = all_.shift - largest
        dead = (all_.total == 0) | (largest == -math.inf)
        small = shift.abs() <= BOUND
        # What the kernel's own type cannot hold of the shift goes into the sum.
        kept = torch.where(dead | small, 0.0, shift).to(accumulation_dtype(g.dtype))
        total = all_.total * torch.where(dead, 0.0, shift - kept.double()).exp2()
        stats = torch.stack([kept, torch.where(dead, 0.0, total).to(kept.dtype)], -1)
        grads = direct.call(
            _backward_op,
            *(g, g_lse, *inputs, all_.out, stats),
            *(None, self.scale, 0.0, False),
            *(needs[-1] and len(block) > 2, False, False),
        )
        given = (*local, *block)
        return [
            grad.sum_to_size(t.shape) if need else None
            for grad, t, need in zip(grads, given, needs, strict=False)
        ]


def _short(key: Tensor | None, weights: Tensor | None) -> bool:
    assert key is not None
    if key.device.type != "cpu" or key.shape[-2] <= SHORT:
        return key.device.type == "cpu"
    return weights is not None and int((weights != 0).sum(-1).min()) <= SHORT
