"""Continuum attention over a mesh that is spread over ranks: keys go round a ring."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends import triton_kernels
from ..ops import _checks as shared
from ..ops import _continuum_attention_checks as checks
from ..ops import _direct as direct
from ..ops._continuum_attention_chunked import accumulation_dtype
from ..ops.continuum_attention import _draw_seed
from ._attend import Block, attend
from ._forms import Blocks, InChunks, Kernel, Rule
from ._group import Group, Link, check_values, link, wanted
from ._replicated import merged_over_ranks
from ._routes import Ring
from .mesh import ShardedMesh

OP = "distributed.continuum_attention"
# A rank's keys travel in so many pieces, and its queries are computed in so many chunks, of at least so many
# points: buffers are fractions of a part. Fewer points at a time would cost the kernels time.
PIECES, LEAST_KEYS = 32, 1024
CHUNKS, LEAST_QUERIES = 4, 4096


@torch.compiler.disable
def continuum_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor | None = None,
    group: Group = None,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    query_replicated: bool = False,
    query_index: Tensor | None = None,
    key_index: Tensor | None = None,
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

    Masks, causal order and dropout go by the places of queries and keys in the whole: those of the rows of
    all ranks put together in the order of the ranks, or `query_index` and `key_index`.

    Args:
        query: (..., H, N_r, D), the queries of this rank; float64, float32, bfloat16 or float16.
        key: (..., H, M_r, D), query's dtype.
        value: (..., H, M_r, Dv), query's dtype. N_r and M_r are each rank's own; the other sizes, the dtype
            and which of the tensors require a gradient are the same on all ranks.
        weights: quadrature weights >= 0 and finite, (M_r,) or (..., M_r) broadcastable to (..., H, M_r); on
            all ranks or on none.
        group: a ProcessGroup, a DeviceMesh of one dimension, None for all processes, or a
            :class:`ShardedMesh` whose points the queries and keys are: its group, and its index for both.
        attn_mask: broadcastable to (..., H, N_r, M), the rows of this rank's queries and a column for the
            place of each of the M keys of all ranks: bool (True = attend) or floating, which is added to the
            scores and receives a gradient. It stays where it is, N_r M numbers. A mask that is the same for
            all queries is better passed as weights of 0. On all ranks or on none.
        dropout_p: as of ``continuum_ops.continuum_attention``, the same on all ranks. The scores that are
            dropped are those that one process drops for the same state of the generator: every rank draws a
            number from the generator of query's device, and the first rank's counts.
        is_causal: query i attends to the keys whose place is at most its own. Not together with attn_mask.
            Ranks with early queries have less to do than the others, and wait for them.
        scale: factor of q . k, the same on all ranks. None: 1 / sqrt(D).
        return_lse: return (out, lse).
        query_replicated: query, and attn_mask, are the same on all ranks (a latent mesh), and so is the
            result: two all-reduces of the queries' size take the place of the ring. Not with is_causal:
            the queries have no place among the keys.
        query_index: (N_r,) int64 >= 0, the places of this rank's queries.
        key_index: (M_r,) int64 in [0, M), the places of this rank's keys. Each on all ranks or on none.

    Returns:
        out (..., H, N_r, Dv) in query's dtype; with ``return_lse`` also lse (..., H, N_r), float32 (float64
        for float64 queries). They are what one process gives, to rounding, whatever the number of ranks; the
        same number of ranks gives the same bits. In a 16-bit dtype the partial results of the ranks are
        rounded besides.

    Gradients exist for query, key, value, weights and a floating attn_mask, through out and lse, by the rule
    of this package (see ``continuum_ops.distributed``); every rank must use its result in what it
    differentiates. There are no second derivatives (but for ``query_replicated``). ``torch.compile`` does not
    look inside. Argument, value and autocast rules are those of ``continuum_ops.continuum_attention``.

    Floating masks, and dropout on a GPU, are computed by PyTorch, a chunk of queries at a time, and not by a
    kernel.

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
    if isinstance(group, ShardedMesh):
        key_index = group.index if key_index is None else key_index
        query_index = group.index if query_index is None and not query_replicated else query_index
    if isinstance(attn_mask, Tensor) and attn_mask.dim() < 2:
        attn_mask = attn_mask[(None,) * (2 - attn_mask.dim())]
    indices = (("query_index", query_index, "query"), ("key_index", key_index, "key"))

    def look() -> Any:
        leads = _check(query, key, value, weights, scale, dropout_p)
        _check_mask(attn_mask, query, leads, is_causal, query_replicated)
        tops = [
            -1 if index is None else _check_index(name, index, rows)
            for (name, index, _), rows in zip(indices, (query, key), strict=True)
        ]
        sizes = [tuple(t.shape) for t in (key, value, weights) if t is not None]
        common = (
            ("the leading dimensions and the width of query, key and value", _common(query, key, value)),
            ("the leading dimensions of weights", None if weights is None else tuple(weights.shape[:-1])),
            ("the dtype of query", str(query.dtype)),
            ("the scale", scale),
            ("dropout_p", float(dropout_p)),
            ("is_causal", bool(is_causal)),
            ("the columns and dtype of attn_mask", _columns(attn_mask)),
            ("which of query_index and key_index are given", tuple(i is not None for _, i, _ in indices)),
            ("query_replicated", query_replicated),
            (
                "which of query, key, value, weights and attn_mask require a gradient",
                wanted(query, key, value, weights, attn_mask),
            ),
            ("the number of queries", query.shape[-2] if query_replicated else None),
        )
        seed = int(_draw_seed(query)) if dropout_p > 0.0 else 0
        return sizes, common, tuple(leads), (query.shape[-2], key.shape[-2]), tops, seed

    seen = at.agree(look)
    for i, (what, _) in enumerate(seen[0][1]):
        at.same(what, [common[i][1] for _, common, *_ in seen])
    keys = sum(counts[1] for *_, counts, _, _ in seen)
    _check_places(attn_mask, keys, max(tops[1] for *_, tops, _ in seen))
    leads = torch.Size(seen[0][2])
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] > 0 else 1.0
    seed = torch.tensor([seen[0][-1]], device=query.device) if dropout_p > 0.0 else None
    rule = Rule(bool(is_causal), attn_mask is not None, float(dropout_p), seed)
    places = []
    for which, (_, index, _) in enumerate(indices):
        first = 0 if which == 0 and query_replicated else sum(s[3][which] for s in seen[: at.rank])
        rows = torch.arange(first, first + seen[at.rank][3][which], device=query.device)
        places.append(rows if index is None else index.to(query.device))

    local, own = [query], [key, value]
    if weights is not None:
        own.append(weights.to(accumulation_dtype(query.dtype)))
    floating = attn_mask is not None and attn_mask.dtype != torch.bool
    # The same on all ranks only by chance; nothing depends on that.
    kernel = not floating and _stats_are_known(query, value, dropout_p)

    def make(mask: Tensor | None, seed: Tensor | None) -> Blocks:
        return (Kernel if kernel else Blocks)(leads, float(scale), mask, float(dropout_p), seed)

    if query_replicated:
        out, lse = _replicated(query, own, attn_mask, places, make, rule, at)
        return (out, lse) if return_lse else out
    sizes = [shapes for shapes, *_ in seen]
    axes = [-2, -2, -1][: len(own)]
    if rule.placed:
        local += [places[0], *([] if attn_mask is None else [attn_mask])]
        own.append(places[1])
        sizes = [[*shapes, (counts[1],)] for shapes, (*_, counts, _, _) in zip(sizes, seen, strict=True)]
        axes.append(-1)
    most = max(counts[1] for *_, counts, _, _ in seen)
    route = Ring(at, sizes, axes, max(1, min(PIECES, most // LEAST_KEYS)))
    chunks = max(1, min(CHUNKS, query.shape[-2] // LEAST_QUERIES)) if route.pieces > 1 else 1
    form = InChunks(make, rule, chunks)
    out, lse = attend(form, route, local, own)
    return (out, lse) if return_lse else out


def _check(query: Any, key: Any, value: Any, weights: Any, scale: Any, dropout_p: Any) -> torch.Size:
    shared.check_tensor(OP, "query", query)
    leads = shared.check_qkv(OP, query, key, value)
    checks.check_numbers(dropout_p, scale, query.dtype)
    if weights is not None:
        shared.check_weights(OP, weights, query, (*leads, key.shape[-2]))
        if weights.shape[-1:] != key.shape[-2:-1]:
            raise ValueError(
                f"{OP}: weights must have an entry for each of the {key.shape[-2]} rows of key, "
                f"got shape {tuple(weights.shape)}"
            )
        check_values(OP, "weights", weights)
    return leads


def _check_mask(
    attn_mask: Any, query: Tensor, leads: torch.Size, is_causal: bool, query_replicated: bool
) -> None:
    if is_causal and query_replicated:
        raise ValueError(
            f"{OP}: is_causal must be False with query_replicated, whose queries have no place among the keys"
        )
    if attn_mask is None:
        return
    columns = attn_mask.shape[-1:] if isinstance(attn_mask, Tensor) else ()
    checks.check_mask(attn_mask, query, (*leads, query.shape[-2], *columns), is_causal)


def _check_index(name: str, index: Any, like: Tensor) -> int:
    """The largest place, -1 where there is none or a look at the values would wait for the device."""
    rows, of = like.shape[-2], name.split("_")[0]
    if not isinstance(index, Tensor) or index.dtype != torch.int64:
        got = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"{OP}: {name} must be an int64 tensor, got {got}")
    if tuple(index.shape) != (rows,):
        raise ValueError(
            f"{OP}: {name} must have shape ({rows},), a place for each row of {of}, got {tuple(index.shape)}"
        )
    if index.device.type != "cpu" or rows == 0:
        return -1
    if int(index.min()) < 0:
        raise ValueError(f"{OP}: {name} must be >= 0, got a smallest place of {int(index.min())}")
    return int(index.max())


def _columns(attn_mask: Tensor | None) -> tuple[int, str] | None:
    return None if attn_mask is None else (attn_mask.shape[-1], str(attn_mask.dtype))


def _check_places(attn_mask: Tensor | None, keys: int, last: int) -> None:
    """Of all ranks, so that all of them raise."""
    if attn_mask is not None and attn_mask.shape[-1] not in (1, keys):
        raise ValueError(
            f"{OP}: attn_mask must have a column for each of the {keys} keys of all ranks, or one for all, "
            f"got {attn_mask.shape[-1]}"
        )
    if last >= keys:
        raise ValueError(
            f"{OP}: key_index must be below {keys}, the number of keys of all ranks, got a place of {last}"
        )


def _common(query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple((*t.shape[:-2], t.shape[-1]) for t in (query, key, value))


def _stats_are_known(query: Tensor, value: Tensor, dropout_p: float = 0.0) -> bool:
    """Whether the compiled kernels serve, whose record of a row is (shift, sum w / max w 2^(s - shift))."""
    if query.device.type == "cpu":
        return direct.KERNELS
    if query.device.type != "cuda" or dropout_p > 0.0 or not triton_kernels()[0]:
        return False
    from ..kernels import continuum_attention as kernel

    return bool(kernel.serves(query, value))


def _replicated(
    query: Tensor,
    own: Block,
    attn_mask: Tensor | None,
    places: Sequence[Tensor],
    make: Callable[[Tensor | None, Tensor | None], Blocks],
    rule: Rule,
    at: Link,
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(query.dtype)
    key, value, *weights = own
    seed = None if rule.seed is None else torch.cat([rule.seed, *places])
    mask = attn_mask
    if mask is not None and mask.shape[-1] != 1:
        mask = mask.index_select(-1, places[1])
    local = [query.to(dtype)]
    if mask is not None and mask.dtype != torch.bool:
        local, mask = [*local, mask.to(dtype)], None
    with torch.autocast(query.device.type, enabled=False):
        out, lse = make(mask, seed).attend(local, [key.to(dtype), value.to(dtype), *weights])
        out, lse = merged_over_ranks(out, lse, at)
    return out.to(query.dtype), lse
