"""Continuum attention on NVIDIA GPUs: shapes, strides and launches of the Triton kernels beside this file.

``forward`` and ``backward`` have the arguments and results of the registered operators
``continuum_ops::continuum_attention_forward`` and ``_backward`` (continuum_ops/ops/_library.py).
Nothing here waits for the device. Leading dimensions are read in place: those that merge become two, the
others are looped over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ._continuum_attention_backward import over_keys_kernel, over_queries_kernel, rows_kernel
from ._continuum_attention_configs import MAX_WIDTH, MIN_CAPABILITY, Config, configs, split_config
from ._continuum_attention_forward import forward_kernel, key_norms_kernel, log2_weights_kernel
from ._continuum_attention_split import PART_BLOCK, exponents_kernel, split_kernel

__all__ = ["backward", "forward", "serves"]

# Fewer scores than this are not worth a look at the norms of the keys.
BOUNDED_FROM = 2**22
# Least log2(w / max w) with which exponents need no shift; a triangle may leave a row nothing but light keys.
MIN_BIAS, MIN_BIAS_CAUSAL = -80.0, -20.0
FP16_MARGIN = 12.0
NORMS_BLOCK = 256
# Fewer scores than this, of all leads, are not worth the launches that split keys and values.
SPLIT_FROM = 2**26
SPLIT_MARGIN = 15.0  # probabilities as float16 parts, up to 2^15
SPLIT_NUMBERS = 4096  # of key and of value in a program that splits them


class Inputs(NamedTuple):
    """The inputs of the operators, in the order of the schema."""

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor | None
    attn_mask: Tensor | None
    query_pos: Tensor | None
    key_pos: Tensor | None
    rate: Tensor | None
    radius: Tensor | None
    seed: Tensor | None
    period: Sequence[float] | None
    scale: float
    dropout_p: float
    is_causal: bool


def serves(query: Tensor, value: Tensor) -> bool:
    """Whether the kernels take these dtypes, widths and this device."""
    if query.dtype == torch.float64 or max(query.shape[-1], value.shape[-1]) > MAX_WIDTH:
        return False
    return capability(query) >= MIN_CAPABILITY


def capability(tensor: Tensor) -> int:
    """10 * major + minor of the device."""
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


# --- leading dimensions --------------------------------------------------------------------------


def _merged(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """(size, stride of each tensor) of the leading dimensions, neighbours merged where all tensors allow
    it."""
    merged: list[tuple[int, list[int]]] = []
    for axis, size in enumerate(sizes):
        own = [s[axis] for s in strides]
        if size == 1:
            continue
        if merged and all(outer == inner * size for outer, inner in zip(merged[-1][1], own, strict=True)):
            merged[-1] = (merged[-1][0] * size, own)
        else:
            merged.append((size, own))
    return merged


def _slices(
    leads: Sequence[int], tensors: Sequence[Tensor | None], trailing: Sequence[int]
) -> Iterator[tuple[int, list[Tensor | None]]]:
    """(first flattened lead, views (Z0, Z1, ...)) of tensors whose leading sizes are 1 or those of
    `leads`."""
    given = [(t, n) for t, n in zip(tensors, trailing, strict=True) if t is not None]
    strides = []
    for t, n in given:
        if t.dim() - n != len(leads):
            raise ValueError(f"leading dimensions must be {len(leads)}, got shape {tuple(t.shape)}")
        strides.append([0 if t.shape[axis] == 1 else t.stride(axis) for axis in range(len(leads))])
    dims = _merged(leads, strides)
    dims = [(1, [0] * len(given))] * max(0, 2 - len(dims)) + dims
    outer, (z0, z1) = dims[:-2], dims[-2:]
    for number, index in enumerate(itertools.product(*(range(size) for size, _ in outer))):
        views = iter(
            t.as_strided(
                (z0[0], z1[0], *t.shape[t.dim() - n :]),
                (z0[1][j], z1[1][j], *t.stride()[t.dim() - n :]),
                t.storage_offset() + sum(i * s[j] for i, (_, s) in zip(index, outer, strict=True)),
            )
            for j, (t, n) in enumerate(given)
        )
        yield number * z0[0] * z1[0], [None if t is None else next(views) for t in tensors]


def _distinct(tensor: Tensor | None, trailing: int) -> Tensor | None:
    """Expanded leading dimensions cut to one entry."""
    if tensor is None:
        return None
    for axis in range(tensor.dim() - trailing):
        if tensor.stride(axis) == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


# --- launches ------------------------------------------------------------------------------------


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tensor.stride()


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _precision(dtype: torch.dtype) -> str:
    if dtype != torch.float32:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _periods(period: Sequence[float] | None) -> tuple[float, ...] | None:
    if period is None or not any(map(math.isfinite, period)):
        return None
    lengths = [p if math.isfinite(p) else 0.0 for p in period]
    return (*lengths, *(1.0 / p if p > 0.0 else 0.0 for p in lengths))


def _split_mask(x: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """(mask that removes keys for all queries, mask that differs between queries)."""
    if x.attn_mask is None:
        return None, None
    mask = x.attn_mask.view(torch.uint8)
    return (mask, None) if mask.stride(-2) == 0 or mask.shape[-2] == 1 else (None, mask)


def _log2_weights(weights: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """log2(w / max w) (*L, M) and log2 max w (*L, 1), sizes 1 where all leads share them."""
    if weights is None and key_mask is None:
        return None, None
    w = _distinct(weights, 1)
    mask = None if key_mask is None else _distinct(key_mask, 2)[..., :1, :]  # type: ignore[index]
    sources = [t for t, n in ((w, 1), (mask, 2)) if t is not None]
    count = max(t.dim() - n for t, n in ((w, 1), (mask, 2)) if t is not None)
    leads = tuple(max(t.shape[axis] for t in sources) for axis in range(count))
    keys = sources[0].shape[-1]
    bias = sources[0].new_empty((*leads, keys), dtype=torch.float32)
    largest = bias.new_empty((*leads, 1), dtype=torch.float64)
    for _, (w_, mask_, bias_, largest_) in _slices(leads, [w, mask, bias, largest], [1, 2, 1, 1]):
        assert bias_ is not None and largest_ is not None
        log2_weights_kernel[(bias_.shape[0] * bias_.shape[1],)](
            w_,
            _strides(w_),
            mask_,
            _strides(mask_),
            largest_,
            bias_,
            bias_.shape[1],
            keys,
            w_ is not None,
            BLOCK=2048,
            num_warps=8,
        )
    return bias, largest


class _Options(NamedTuple):
    """Constants of all launches of a call."""

    padded: dict[str, Any]
    period: tuple[float, ...] | None
    threshold: int
    dropout_scale: float
    factor: float
    configs: tuple[Config, Config, Config]
    split: Config


def _options(x: Inputs) -> _Options:
    width, value_width = x.query.shape[-1], x.value.shape[-1]
    padded = {"D": width, "BD": _padded(width), "DV": value_width, "BDV": _padded(value_width)}
    widest = max(padded["BD"], padded["BDV"])
    padded |= {
        "NDIM": 0 if x.query_pos is None else x.query_pos.shape[-1],
        "PRECISION": _precision(x.query.dtype),
        "CAUSAL": x.is_causal,
        "NEGATIVE": x.scale < 0.0,
    }
    return _Options(
        padded,
        _periods(x.period),
        int(x.dropout_p * 2.0**32),
        1.0 / (1.0 - x.dropout_p) if x.dropout_p < 1.0 else 0.0,
        abs(x.scale) * math.log2(math.e),
        configs(x.query.dtype, widest, capability(x.query)),
        split_config(widest, capability(x.query), padded["NDIM"] > 0),
    )


def _launch(config: Config) -> dict[str, int]:
    return {
        "QUERIES": config.queries,
        "KEYS": config.keys,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _key_norms(key: Tensor, bias: Tensor | None, is_causal: bool, padded: dict[str, Any]) -> Tensor:
    """max |key| of each of the leads (Z0, Z1), or inf; see key_norms_kernel."""
    keys, z0, z1 = key.shape[2], key.shape[0], key.shape[1]
    chunks = triton.cdiv(keys, NORMS_BLOCK)
    norms = key.new_empty((z0 * z1, chunks), dtype=torch.float32)
    key_norms_kernel[(z0 * z1 * chunks,)](
        key, _strides(key), bias, _strides(bias), norms, chunks, z1, keys,
        MIN_BIAS_CAUSAL if is_causal else MIN_BIAS, padded["D"], padded["BD"], NORMS_BLOCK,
    )  # fmt: skip
    return norms.amax(-1)


def _split(x: Inputs, bias: Tensor | None, padded: dict[str, Any]) -> list[Tensor | None]:
    """float16 parts of key and value (*L, 2 rows, width), their exponents (*L, 1, widths) and that of the
    smallest row of value (*L), sizes 1 where all leads share them; see _continuum_attention_split.py."""
    key, value = _distinct(x.key, 2), _distinct(x.value, 2)
    assert key is not None and value is not None
    given = [key.shape[:-2], value.shape[:-2]] + ([] if bias is None else [bias.shape[:-1]])
    leads, keys = torch.broadcast_shapes(*given), x.key.shape[-2]
    widths = padded["BD"], padded["BDV"]
    padded_keys = triton.cdiv(keys, PART_BLOCK.value) * PART_BLOCK.value
    block = min(PART_BLOCK.value, SPLIT_NUMBERS // max(widths))
    chunks = padded_keys // block
    tops = key.new_empty((*leads, chunks, sum(widths)), dtype=torch.int32)
    least = key.new_empty((*leads, chunks), dtype=torch.int32)
    shape = {name: padded[name] for name in ("D", "BD", "DV", "BDV")} | {"BLOCK": block}
    for _, (k, v, b, tops_) in _slices(leads, [key, value, bias, tops], [2, 2, 1, 2]):
        assert k is not None and v is not None and tops_ is not None
        z0, z1 = tops_.shape[:2]
        exponents_kernel[(z0 * z1 * chunks,)](
            k, _strides(k), v, _strides(v), b, _strides(b), tops_, chunks, z1, keys, **shape, num_warps=8
        )
    tops = tops.amax(-2, keepdim=True)
    k_parts, v_parts = (
        key.new_empty((*leads, 2 * padded_keys, width), dtype=torch.float16) for width in widths
    )
    for _, (k, v, b, *views) in _slices(
        leads, [key, value, bias, tops, k_parts, v_parts, least], [2, 2, 1, 2, 2, 2, 1]
    ):
        assert k is not None and v is not None and views[0] is not None
        z0, z1 = views[0].shape[:2]
        split_kernel[(z0 * z1 * chunks,)](
            k, _strides(k), v, _strides(v), b, _strides(b), *views, chunks, z1, keys, **shape, num_warps=8
        )
    return [k_parts, v_parts, tops, least.amin(-1)]


def _tensors(x: Inputs, bias: Tensor | None, mask: Tensor | None) -> tuple[list[Tensor | None], list[int]]:
    return [x.query, x.key, x.value, bias, mask, x.query_pos, x.key_pos, x.rate, x.radius], [
        2,
        2,
        2,
        1,
        2,
        2,
        2,
        0,
        1,
    ]


def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, stats) of the operator; stats: the shift of the exponents (base 2) and sum_k w_k / max w
    2^(s - shift)."""
    x = Inputs(*args)
    leads, rows, keys = x.query.shape[:-2], x.query.shape[-2], x.key.shape[-2]
    out = x.query.new_empty((*leads, rows, x.value.shape[-1]))
    lse = x.query.new_empty((*leads, rows), dtype=torch.float32)
    stats = x.query.new_empty((*leads, rows, 2), dtype=torch.float32)
    if 0 in (*leads, rows, keys):
        return out.zero_(), lse.fill_(-math.inf), stats.zero_()
    o = _options(x)
    key_mask, mask = _split_mask(x)
    bias, largest = _log2_weights(x.weights, key_mask)
    tensors, trailing = _tensors(x, bias, mask)
    # fp16 holds no probability of 2^40.
    plain = mask is None and x.query_pos is None and x.query.dtype != torch.float16
    bounded = plain and rows * keys >= BOUNDED_FROM
    parts: list[Tensor | None] = [None] * 4
    if o.padded["PRECISION"] == "tf32x3" and math.prod(leads) * rows * keys >= SPLIT_FROM:
        bounded, parts = False, _split(x, bias, o.padded)
    split, config = o.split, o.configs[0]
    margin = FP16_MARGIN if x.query.dtype == torch.float16 else 0.0
    for first, views in _slices(
        leads, [*tensors, *parts, largest, out, lse, stats], [*trailing, 2, 2, 2, 0, 1, 2, 1, 2]
    ):
        q, k, v, b, m, xp, yp, rate, radius, k_parts, v_parts, tops, least, top, out_, lse_, stats_ = views
        assert q is not None and k is not None
        norms = _key_norms(k, b, x.is_causal, o.padded) if bounded else None
        z0, z1 = q.shape[:2]
        terms = (
            b, _strides(b), top, _strides(top), m, _strides(m),
            xp, _strides(xp), yp, _strides(yp), rate, _strides(rate), radius, _strides(radius), o.period,
            x.seed,
        )  # fmt: skip
        results = (out_, lse_, stats_, z1, rows, keys, first, o.threshold, o.factor, o.dropout_scale)
        done = None
        if k_parts is not None:
            done = q.new_empty((z0 * z1 * triton.cdiv(rows, split.queries),), dtype=torch.int8)
            forward_kernel[(done.numel(),)](
                q, _strides(q), k_parts, _strides(k_parts), v_parts, _strides(v_parts), *terms,
                None, tops, _strides(tops), least, _strides(least), done, *results,
                **o.padded, MARGIN=SPLIT_MARGIN, DONE=split.queries, **_launch(split),
            )  # fmt: skip
        forward_kernel[(triton.cdiv(rows, config.queries) * z0 * z1,)](
            q, _strides(q), k, _strides(k), v, _strides(v), *terms,
            norms, None, (), None, (), done, *results,
            **o.padded, MARGIN=margin, DONE=split.queries, **_launch(config),
        )  # fmt: skip
    return out, lse, stats


def backward(grad_out: Tensor, grad_lse: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    """(grad_query, grad_key, grad_value, grad_weights, grad_query_pos, grad_key_pos, grad_rate); (0,) for
    the unwanted."""
    *inputs, period, scale, dropout_p, is_causal, weights_grad, positions_grad, rate_grad = args
    *inputs, out, stats = inputs
    x = Inputs(*inputs, period, scale, dropout_p, is_causal)
    leads, rows, keys = x.query.shape[:-2], x.query.shape[-2], x.key.shape[-2]

    def new(tensor: Tensor | None, wanted: bool = True) -> Tensor | None:
        """A gradient with all leading dimensions; sums over shared ones follow."""
        if tensor is None or not wanted:
            return None
        return tensor.new_empty((*leads, *tensor.shape[len(leads) :]))

    grads = [new(x.query), new(x.key), new(x.value), new(x.weights, weights_grad)]
    grads += [new(x.query_pos, positions_grad), new(x.key_pos, positions_grad)]
    if x.rate is not None and rate_grad:
        grads.append(x.rate.new_empty((*leads, rows)))
    else:
        grads.append(None)
    sources = [x.query, x.key, x.value, x.weights, x.query_pos, x.key_pos, x.rate]
    if 0 in (*leads, rows, keys):
        grads = [None if g is None else s.new_zeros(s.shape) for g, s in zip(grads, sources, strict=True)]  # type: ignore[union-attr]
    else:
        _launch_backward(x, leads, grad_out, grad_lse, out, stats, grads)
        grads[6] = None if grads[6] is None else grads[6].sum(-1)
        grads = [
            None if g is None or s is None else g if g.shape == s.shape else g.sum_to_size(s.shape)
            for g, s in zip(grads, sources, strict=True)
        ]
    empty = x.query.new_empty(0, dtype=torch.float32)
    return tuple(empty.clone() if g is None else g for g in grads)


def _launch_backward(
    x: Inputs,
    leads: Sequence[int],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    stats: Tensor,
    grads: list[Tensor | None],
) -> None:
    rows, keys = x.query.shape[-2], x.key.shape[-2]
    o = _options(x)
    key_mask, mask = _split_mask(x)
    bias, _ = _log2_weights(x.weights, key_mask)
    tensors, trailing = _tensors(x, bias, mask)
    row_terms = [stats.new_empty((*leads, rows)) for _ in range(3)]
    weights = None if grads[3] is None else x.weights
    more = [weights, grad_out, grad_lse, out, stats, *row_terms, *grads]
    _, keys_config, queries_config = o.configs
    for first, views in _slices(
        leads, [*tensors, *more], [*trailing, 1, 2, 1, 2, 2, 1, 1, 1, 2, 2, 2, 1, 2, 2, 1]
    ):
        q, k, v, b, m, xp, yp, rate, radius, w, g, gl, out_, stats_, *terms, gq, gk, gv, gw, gx, gy, gr = (
            views
        )
        assert q is not None and v is not None
        z0, z1 = q.shape[:2]
        rows_kernel[(triton.cdiv(rows, 32) * z0 * z1,)](
            g, _strides(g), out_, stats_, gl, _strides(gl), *terms, z1, rows,
            DV=o.padded["DV"], BDV=o.padded["BDV"], SCALED=q.dtype == torch.float32, QUERIES=32,
        )  # fmt: skip
        geometry = (
            m,
            _strides(m),
            xp,
            _strides(xp),
            yp,
            _strides(yp),
            rate,
            _strides(rate),
            radius,
            _strides(radius),
            o.period,
            x.seed,
        )
        numbers = (z1, rows, keys, first, o.threshold, o.factor, x.scale, o.dropout_scale)
        over_keys_kernel[(triton.cdiv(rows, keys_config.queries) * z0 * z1,)](
            q, _strides(q), k, _strides(k), v, _strides(v), b, _strides(b), *geometry, g, _strides(g), *terms,
            gq, gx, gr, *numbers, **o.padded, **_launch(keys_config),
        )  # fmt: skip
        over_queries_kernel[(triton.cdiv(keys, queries_config.keys) * z0 * z1,)](
            q, _strides(q), k, _strides(k), v, _strides(v), w, _strides(w), b, _strides(b), *geometry, g,
            _strides(g), *terms,
            gk, gv, gw, gy, *numbers, **o.padded, **_launch(queries_config),
        )  # fmt: skip
