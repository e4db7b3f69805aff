"""The forward kernel of continuum attention, and the two that look at weights and keys before it."""

from __future__ import annotations

import triton
import triton.language as tl

from ._continuum_attention_split import (
    TOP,
    load_part,
    part_rows,
    scaled,
    split,
    split_as_tf32,
    split_product,
    split_query,
)
from ._continuum_attention_tiles import (
    INFINITY,
    LN_2,
    kept_pairs,
    lead_base,
    load_bias,
    load_rate,
    load_reach,
    load_rows,
    log2_scores,
    squared_distance,
    store_rows,
    survivors,
)

# Before the first score. Finite, so that a score of -inf counts as nothing instead of as -inf - (-inf).
NO_SHIFT = tl.constexpr(-(2.0**120))
# Exponents in [-40, 40] need no shift: sums and products stay far from overflow.
BOUND = tl.constexpr(40.0)


@triton.jit
def log2_weights_kernel(
    weights, strides, mask, mask_strides, largest, bias, Z1, M, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr
):
    """bias[k] = log2(w_k / max w), -inf for keys that do not exist, NaN for weights that are no weights.

    In float64 and relative to the largest weight, since a common size of all weights would cost its digits.
    One program a lead: linear in M beside the M N of attention.
    """
    z = tl.program_id(0)
    z0, z1 = z // Z1, z % Z1
    top = tl.full([], 0.0, tl.float32)
    if HAS_WEIGHTS:
        base = lead_base(weights, strides, z0, z1)
        tops = tl.zeros([BLOCK], tl.float32)
        for start in range(0, M, BLOCK):
            keys = start + tl.arange(0, BLOCK)
            w = tl.load(base + keys.to(tl.int64) * strides[2], mask=keys < M, other=0.0)
            tops = tl.where((w > tops) & (w < INFINITY), w, tops)
        top = tl.max(tops, 0)
    top = tl.where(top > 0.0, top, 1.0)
    log2_top = tl.log2(top.to(tl.float64))
    tl.store(largest + z, log2_top)
    for start in range(0, M, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        inside = keys < M
        value = tl.zeros([BLOCK], tl.float32)
        if HAS_WEIGHTS:
            w = tl.load(
                lead_base(weights, strides, z0, z1) + keys.to(tl.int64) * strides[2], mask=inside, other=0.0
            )
            valid = (w > 0.0) & (w < INFINITY)
            ratio = tl.log2(tl.where(valid, w, 1.0).to(tl.float64)) - log2_top
            value = tl.where(valid, ratio.to(tl.float32), tl.where(w == 0.0, -INFINITY, float("nan")))
        if mask is not None:
            at = lead_base(mask, mask_strides, z0, z1) + keys.to(tl.int64) * mask_strides[3]
            value = tl.where(tl.load(at, mask=inside, other=0) != 0, value, -INFINITY)
        row_stride = tl.full([], 1, tl.int64) * M
        tl.store(bias + z.to(tl.int64) * row_stride + keys, value, mask=inside)


@triton.jit
def key_norms_kernel(
    key,
    key_strides,
    bias,
    bias_strides,
    norms,
    chunks,
    Z1,
    M,
    MIN_BIAS: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """max |key_k| over a chunk of keys; inf if that is no bound or a weight is below 2^MIN_BIAS of the
    largest."""
    pid = tl.program_id(0)
    z = pid // chunks
    z0, z1 = z // Z1, z % Z1
    keys = (pid % chunks) * BLOCK + tl.arange(0, BLOCK)
    live = keys < M
    least = tl.full([BLOCK], 0.0, tl.float32)
    if bias is not None:
        b = load_bias(lead_base(bias, bias_strides, z0, z1), keys, M, True)
        live = b != -INFINITY
        least = tl.where(live, b, 0.0)
    k = load_rows(lead_base(key, key_strides, z0, z1), keys, live, key_strides, D, BD).to(tl.float32)
    squares = tl.sum(k * k, 1)
    norm = tl.sqrt(tl.max(tl.where((squares < INFINITY) & (least >= MIN_BIAS), squares, INFINITY), 0))
    tl.store(norms + pid, norm)


@triton.jit
def forward_tile(
    total, denominator, shift, q, q_low, k_base, k_strides, v_base, v_strides, bias_base, mask_base,
    mask_strides, x_base, x_strides, y_base, y_strides, rate, reach, period, queries, inside, start, M, seed,
    lead, threshold, factor,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, NDIM: tl.constexpr,
    PRECISION: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr, MARGIN: tl.constexpr,
    BOUNDED: tl.constexpr, EDGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds a tile of keys to the sums of a block of queries."""
    keys = start + tl.arange(0, KEYS)
    # Keys of weight 0 are not read, since NaN there must not matter. None: all are.
    bias, live = None, None
    if bias_base is not None:
        bias = load_bias(bias_base, keys, M, EDGE)
        live = bias != -INFINITY
    elif EDGE:
        live = keys < M
    if q_low is not None:
        low = part_rows(M)
        k, k_low = load_part(k_base, start, KEYS, BD), load_part(k_base + low * BD, start, KEYS, BD)
        product = split_product(q, q_low, tl.trans(k), tl.trans(k_low))
    else:
        k = load_rows(k_base, keys, live, k_strides, D, BD)
        product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    squared = None
    if NDIM > 0:
        squared = squared_distance(
            x_base, x_strides, queries, inside, y_base, y_strides, keys, live, period, NDIM, False
        )
    t = log2_scores(product, factor, bias, rate, squared, NEGATIVE, False)
    if EDGE:
        keep = kept_pairs(queries, inside, keys, M, mask_base, mask_strides, squared, reach, CAUSAL, False)
        t = tl.where(keep, t, -INFINITY)
    if BOUNDED:
        p = tl.exp2(t)
        denominator += tl.sum(p, 1)
    else:
        # fp16 keeps probabilities down to 2^-24 only: MARGIN shifts them to the upper end of its range.
        before = shift
        shift = tl.maximum(before, tl.max(t, 1) - MARGIN)
        p = tl.exp2(t - shift[:, None])
        rescale = tl.exp2(before - shift)
        denominator = denominator * rescale + tl.sum(p, 1)
    if seed is not None:
        p = tl.where(survivors(seed, lead, queries, start, threshold, KEYS, False), p, 0.0)
    if q_low is not None:
        v, v_low = load_part(v_base, start, KEYS, BDV), load_part(v_base + low * BDV, start, KEYS, BDV)
    else:
        v = load_rows(v_base, keys, live, v_strides, DV, BDV)
    if q_low is not None or v.dtype == tl.float32:
        # Summed outside the tensor cores, which round towards 0: over thousands of tiles that would show.
        if q_low is not None:
            p, p_low = split(p)
            part = split_product(p, p_low, v, v_low)
        else:
            part = tl.dot(p, v, input_precision=PRECISION)
        if BOUNDED:  # noqa: SIM108
            total = total + part
        else:
            total = tl.fma(total, rescale[:, None], part)
    else:
        if not BOUNDED:
            total = total * rescale[:, None]
        total = tl.dot(p.to(v.dtype), v, total, input_precision=PRECISION)
    return total, denominator, shift


@triton.jit
def forward_kernel(
    query, q_strides, key, k_strides, value, v_strides, bias, bias_strides, largest, largest_strides,
    mask, mask_strides, query_pos, x_strides, key_pos, y_strides, rate_pointer, rate_strides,
    radius, radius_strides, period, seed_pointer, norms, tops, tops_strides, least, least_strides, done,
    out, lse, stats, Z1, N, M, first_lead, threshold, factor, dropout_scale,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, NDIM: tl.constexpr,
    PRECISION: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr, MARGIN: tl.constexpr,
    DONE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """With tops, key and value are the parts of split_kernel, and done tells the blocks of queries that they
    served; with done alone those blocks, of DONE queries each, are left as they are."""
    blocks = tl.cdiv(N, QUERIES)
    pid = tl.program_id(0)
    z, first = pid // blocks, (pid % blocks) * QUERIES
    z0, z1 = z // Z1, z % Z1
    if done is not None and tops is None:  # noqa: SIM102, known when compiled, and not
        if tl.load(done + z.to(tl.int64) * tl.cdiv(N, DONE) + first // DONE) != 0:
            return
    queries = first + tl.arange(0, QUERIES)
    inside = queries < N
    k_base, v_base = lead_base(key, k_strides, z0, z1), lead_base(value, v_strides, z0, z1)
    q = load_rows(lead_base(query, q_strides, z0, z1), queries, inside, q_strides, D, BD)
    q_low = None
    if tops is not None:
        tops_base = lead_base(tops, tops_strides, z0, z1)
        q, factor, served = split_query(
            q, tops_base, lead_base(least, least_strides, z0, z1), factor, BD, BDV
        )
        tl.store(done + pid, served.to(tl.int8))
        if not served:
            return
        q, q_low = split_as_tf32(q)
        factor = factor[:, None]
    lead = first_lead + z.to(tl.int64)
    seed = None
    if seed_pointer is not None:
        seed = tl.load(seed_pointer)
    bias_base = None
    if bias is not None:
        bias_base = lead_base(bias, bias_strides, z0, z1)
    mask_base = None
    if mask is not None:
        mask_base = lead_base(mask, mask_strides, z0, z1)
    x_base, y_base = None, None
    if NDIM > 0:
        x_base, y_base = lead_base(query_pos, x_strides, z0, z1), lead_base(key_pos, y_strides, z0, z1)
    rate = None
    if rate_pointer is not None:
        rate = load_rate(rate_pointer, rate_strides, z0, z1)
    reach = None
    if radius is not None:
        reach = load_reach(lead_base(radius, radius_strides, z0, z1), radius_strides, queries, inside)

    # Full tiles need no look at indices. The others, with the diagonal and the last keys, come after them.
    end, full = M, M // KEYS * KEYS
    if CAUSAL:
        end = tl.minimum(M, first + QUERIES)
        full = tl.minimum(M, first + 1) // KEYS * KEYS
    if mask is not None or radius is not None:
        full = 0
    shift = tl.full([QUERIES], NO_SHIFT, tl.float32)
    denominator = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, BDV], tl.float32)
    bounded = False
    if norms is not None:
        # |q . k| <= |q| |k|: where that is small no exponential needs a shift, hence no maximum, no
        # subtraction and no rescaling: the score costs one FMA, ex2 and one addition.
        length = tl.sqrt(tl.max(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1), 0))
        bounded = length * tl.load(norms + z) * factor <= BOUND
        if bounded:
            shift = tl.zeros([QUERIES], tl.float32)
            for start in range(0, full, KEYS):
                total, denominator, shift = forward_tile(
                    total, denominator, shift, q, q_low, k_base, k_strides, v_base, v_strides, bias_base,
                    mask_base, mask_strides, x_base, x_strides, y_base, y_strides, rate, reach, period,
                    queries, inside, start, M, seed, lead, threshold, factor, D, BD, DV, BDV, NDIM, PRECISION,
                    CAUSAL, NEGATIVE, MARGIN, True, False, KEYS,
                )  # fmt: skip
            begin = full
        else:
            begin = full * 0
    else:
        begin = full * 0
    for start in range(begin, full, KEYS):
        total, denominator, shift = forward_tile(
            total, denominator, shift, q, q_low, k_base, k_strides, v_base, v_strides, bias_base,
            mask_base, mask_strides, x_base, x_strides, y_base, y_strides, rate, reach, period, queries,
            inside, start, M, seed, lead, threshold, factor, D, BD, DV, BDV, NDIM, PRECISION, CAUSAL,
            NEGATIVE, MARGIN, False, False, KEYS,
        )  # fmt: skip
    for start in range(full, end, KEYS):
        total, denominator, shift = forward_tile(
            total, denominator, shift, q, q_low, k_base, k_strides, v_base, v_strides, bias_base,
            mask_base, mask_strides, x_base, x_strides, y_base, y_strides, rate, reach, period, queries,
            inside, start, M, seed, lead, threshold, factor, D, BD, DV, BDV, NDIM, PRECISION, CAUSAL,
            NEGATIVE, MARGIN, False, True, KEYS,
        )  # fmt: skip

    # No score above -inf (and none NaN): nothing to attend to.
    denominator = tl.where((shift == NO_SHIFT) & (denominator == denominator), 0.0, denominator)
    if radius is not None:
        denominator = tl.where(reach == reach, denominator, float("nan"))
    empty = denominator == 0.0
    divisor = tl.where(empty, 1.0, denominator)
    result = total * (tl.div_rn(1.0 + tl.zeros([QUERIES], tl.float32), divisor) * dropout_scale)[:, None]
    if tops is not None:
        result = scaled(result, (tl.load(tops_base + BD + tl.arange(0, BDV)) - TOP)[None, :])
    rows = z.to(tl.int64) * N + queries
    store_rows(out, rows, inside, tl.where(empty[:, None], 0.0, result), DV, BDV)
    shift = tl.where(empty, 0.0, shift)
    log2_sum = shift.to(tl.float64) + tl.log2(divisor).to(tl.float64)
    if largest is not None:
        log2_sum += tl.load(lead_base(largest, largest_strides, z0, z1))
    tl.store(lse + rows, tl.where(empty, -INFINITY, (log2_sum * LN_2).to(tl.float32)), mask=inside)
    if tops is not None:
        # The backward kernels divide by the sum: 2^MARGIN in it would cost digits of small gradients.
        before = shift
        shift = before + MARGIN
        denominator = denominator * tl.exp2(before - shift)
    tl.store(stats + rows * 2, shift, mask=inside)
    tl.store(stats + rows * 2 + 1, denominator, mask=inside)
