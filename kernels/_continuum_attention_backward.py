"""The backward kernels of continuum attention: row terms, gradients over keys, gradients over queries.

With p = w e^s / sum the probability, g the gradient of out and D_i = g_i . out_i - grad_lse_i:
dS = p (g . v - D), dV = p^T g, dQ = scale dS K, dK = scale dS^T Q, d/dw_k = sum_i dS_ik / w_k.

Each exponential is computed twice, by the kernel that owns the sums over keys (query, rate, query_pos) and by
the one that owns those over queries (key, value, weights, key_pos). Once would need sums shared by programs:
atomics, whose order, and so the last bits, change from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._continuum_attention_tiles import (
    INFINITY,
    difference,
    kept_pairs,
    lead_base,
    load_axis,
    load_bias,
    load_rate,
    load_reach,
    load_rows,
    log2_scores,
    over_queries,
    squared_distance,
    store_rows,
    survivors,
)


@triton.jit
def rows_kernel(
    grad_out, g_strides, out, stats, grad_lse, gl_strides, shifts, deltas, factors, Z1, N,
    DV: tl.constexpr, BDV: tl.constexpr, SCALED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """For each query what turns its exponents into probabilities, its D, and (SCALED) a factor of g.

    SCALED: 1 / sum is a factor of g and D and the exponent keeps the exact shift: log2 sum in the exponent
    would be
    rounded at the size of the shift. In 16 bits a factor of g would be rounded, so log2 sum joins the shift.
    A query with nothing to attend to has the shift inf: its probabilities are 0, and its rows are not read.
    """
    blocks = tl.cdiv(N, QUERIES)
    pid = tl.program_id(0)
    z = pid // blocks
    z0, z1 = z // Z1, z % Z1
    queries = (pid % blocks) * QUERIES + tl.arange(0, QUERIES)
    inside = queries < N
    at = z.to(tl.int64) * N + queries
    shift = tl.load(stats + at * 2, mask=inside, other=0.0)
    total = tl.load(stats + at * 2 + 1, mask=inside, other=0.0)
    alive = total != 0.0
    g = load_rows(lead_base(grad_out, g_strides, z0, z1), queries, alive, g_strides, DV, BDV).to(tl.float32)
    columns = tl.arange(0, BDV)
    row_stride = tl.full([], DV, tl.int64)
    o_at = out + (at.to(tl.int64)[:, None] * row_stride + columns[None, :])
    o = tl.load(o_at, mask=alive[:, None] & (columns < DV)[None, :], other=0.0).to(tl.float32)
    delta = tl.sum(g * o, 1)
    if grad_lse is not None:
        gl_at = lead_base(grad_lse, gl_strides, z0, z1) + queries.to(tl.int64) * gl_strides[2]
        delta -= tl.load(gl_at, mask=alive, other=0.0)
    divisor = tl.where(alive, total, 1.0)
    if SCALED:
        factor = tl.div_rn(1.0 + tl.zeros([QUERIES], tl.float32), divisor)
        delta = delta * factor
        tl.store(factors + at, factor, mask=inside)
    else:
        shift += tl.log2(divisor)
    tl.store(shifts + at, tl.where(alive, shift, INFINITY), mask=inside)
    tl.store(deltas + at, delta, mask=inside)


@triton.jit
def load_query_block(
    q_base, q_strides, g_base, g_strides, shifts, deltas, factors, queries, inside,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """q, g, shift, D and which queries are alive."""
    shift = tl.load(shifts + queries, mask=inside, other=INFINITY)
    alive = shift != INFINITY
    q = load_rows(q_base, queries, alive, q_strides, D, BD)
    g = load_rows(g_base, queries, alive, g_strides, DV, BDV)
    if g.dtype == tl.float32:
        g = g * tl.load(factors + queries, mask=alive, other=0.0)[:, None]
    delta = tl.load(deltas + queries, mask=alive, other=0.0)
    return q, g, shift, delta, alive


@triton.jit
def gradient_tile(
    product, g_dot_v, shift, delta, keep, survive, squared, rate, bias, factor, dropout_scale,
    NEGATIVE: tl.constexpr, KEY_MAJOR: tl.constexpr,
):  # fmt: skip
    """(p after dropout, dS) of a tile, both relative to the row's factor."""
    t = log2_scores(product, factor, bias, rate, squared, NEGATIVE, KEY_MAJOR)
    p = tl.exp2(t - over_queries(shift, KEY_MAJOR))
    if keep is not None:
        p = tl.where(keep, p, 0.0)
    mixed = p
    if survive is not None:
        g_dot_v = tl.where(survive, g_dot_v * dropout_scale, 0.0)
        mixed = tl.where(survive, p * dropout_scale, 0.0)
    ds = p * (g_dot_v - over_queries(delta, KEY_MAJOR))
    if keep is not None:  # 0 * inf: a dropped pair has no gradient whatever its value row holds
        ds = tl.where(keep, ds, 0.0)
    return mixed, ds


@triton.jit
def add_position_gradients(
    sums, ds, x_base, x_strides, queries, inside, y_base, y_strides, keys, live, period,
    NDIM: tl.constexpr, KEY_MAJOR: tl.constexpr,
):  # fmt: skip
    """sums[row, axis] += sum over the columns of ds (x_i - y_k)."""
    for axis in tl.static_range(NDIM):
        x = load_axis(x_base, queries, inside, x_strides, axis)
        y = load_axis(y_base, keys, live, y_strides, axis)
        part = tl.sum(ds * difference(x, y, period, axis, NDIM, KEY_MAJOR), 1)
        sums += tl.where((tl.arange(0, sums.shape[1]) == axis)[None, :], part[:, None], 0.0)
    return sums


@triton.jit
def over_keys_tile(
    grad_q, grad_x, grad_rate, q, g, shift, delta, alive, k_base, k_strides, v_base, v_strides, bias_base,
    mask_base, mask_strides, x_base, x_strides, y_base, y_strides, rate, reach, period, queries, start, M,
    seed, lead,
    threshold, factor, dropout_scale,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, NDIM: tl.constexpr,
    PRECISION: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr, POSITIONS: tl.constexpr,
    RATE: tl.constexpr, EDGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    keys = start + tl.arange(0, KEYS)
    # Keys of weight 0 are not read, since NaN there must not matter. None: all are.
    bias, live = None, None
    if bias_base is not None:
        bias = load_bias(bias_base, keys, M, EDGE)
        live = bias != -INFINITY
    elif EDGE:
        live = keys < M
    k = load_rows(k_base, keys, live, k_strides, D, BD)
    v = load_rows(v_base, keys, live, v_strides, DV, BDV)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    g_dot_v = tl.dot(g, tl.trans(v), input_precision=PRECISION)
    squared = None
    if NDIM > 0:
        squared = squared_distance(
            x_base, x_strides, queries, alive, y_base, y_strides, keys, live, period, NDIM, False
        )
    keep = None
    if EDGE:
        keep = kept_pairs(queries, alive, keys, M, mask_base, mask_strides, squared, reach, CAUSAL, False)
    survive = None
    if seed is not None:
        survive = survivors(seed, lead, queries, start, threshold, KEYS, False)
    _, ds = gradient_tile(
        product,
        g_dot_v,
        shift,
        delta,
        keep,
        survive,
        squared,
        rate,
        bias,
        factor,
        dropout_scale,
        NEGATIVE,
        False,
    )
    grad_q = tl.dot(ds.to(k.dtype), k, grad_q, input_precision=PRECISION)
    if RATE:
        grad_rate -= tl.sum(ds * squared, 1)
    if POSITIONS:
        grad_x = add_position_gradients(
            grad_x, ds, x_base, x_strides, queries, alive, y_base, y_strides, keys, live, period, NDIM, False
        )
    return grad_q, grad_x, grad_rate


@triton.jit
def over_keys_kernel(
    query, q_strides, key, k_strides, value, v_strides, bias, bias_strides, mask, mask_strides,
    query_pos, x_strides, key_pos, y_strides, rate_pointer, rate_strides, radius, radius_strides, period,
    seed_pointer, grad_out, g_strides, shifts, deltas, factors, grad_query, grad_query_pos, grad_rate_rows,
    Z1, N, M, first_lead, threshold, factor, scale, dropout_scale,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, NDIM: tl.constexpr,
    PRECISION: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A program owns a block of queries: gradients of query and, where wanted, of query_pos and rate."""
    POSITIONS: tl.constexpr = grad_query_pos is not None
    RATE: tl.constexpr = grad_rate_rows is not None
    AXES: tl.constexpr = triton.next_power_of_2(max(NDIM, 1))
    blocks = tl.cdiv(N, QUERIES)
    pid = tl.program_id(0)
    z, first = pid // blocks, (pid % blocks) * QUERIES
    z0, z1 = z // Z1, z % Z1
    queries = first + tl.arange(0, QUERIES)
    inside = queries < N
    row0 = z.to(tl.int64) * N
    lead = first_lead + z.to(tl.int64)
    k_base, v_base = lead_base(key, k_strides, z0, z1), lead_base(value, v_strides, z0, z1)
    q, g, shift, delta, alive = load_query_block(
        lead_base(query, q_strides, z0, z1), q_strides, lead_base(grad_out, g_strides, z0, z1), g_strides,
        shifts + row0, deltas + row0, factors + row0, queries, inside, D, BD, DV, BDV,
    )  # fmt: skip
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
    end, full = M, M // KEYS * KEYS
    if CAUSAL:
        end = tl.minimum(M, first + QUERIES)
        full = tl.minimum(M, first + 1) // KEYS * KEYS
    if mask is not None or radius is not None:
        full = 0
    grad_q = tl.zeros([QUERIES, BD], tl.float32)
    grad_x = tl.zeros([QUERIES, AXES], tl.float32)
    grad_rate = tl.zeros([QUERIES], tl.float32)
    for start in range(0, full, KEYS):
        grad_q, grad_x, grad_rate = over_keys_tile(
            grad_q, grad_x, grad_rate, q, g, shift, delta, alive, k_base, k_strides, v_base, v_strides,
            bias_base,
            mask_base, mask_strides, x_base, x_strides, y_base, y_strides, rate, reach, period, queries,
            start, M, seed,
            lead, threshold, factor, dropout_scale, D, BD, DV, BDV, NDIM, PRECISION, CAUSAL, NEGATIVE,
            POSITIONS, RATE,
            False, KEYS,
        )  # fmt: skip
    for start in range(full, end, KEYS):
        grad_q, grad_x, grad_rate = over_keys_tile(
            grad_q, grad_x, grad_rate, q, g, shift, delta, alive, k_base, k_strides, v_base, v_strides,
            bias_base,
            mask_base, mask_strides, x_base, x_strides, y_base, y_strides, rate, reach, period, queries,
            start, M, seed,
            lead, threshold, factor, dropout_scale, D, BD, DV, BDV, NDIM, PRECISION, CAUSAL, NEGATIVE,
            POSITIONS, RATE,
            True, KEYS,
        )  # fmt: skip
    grad_q = tl.where(alive[:, None], grad_q * scale, 0.0)
    store_rows(grad_query, row0 + queries, inside, grad_q, D, BD)
    if RATE:
        tl.store(grad_rate_rows + row0 + queries, tl.where(alive, grad_rate, 0.0), mask=inside)
    if POSITIONS:
        slope = 0.0
        if rate_pointer is not None:
            slope = -2.0 * tl.load(lead_base(rate_pointer, rate_strides, z0, z1))
        store_rows(
            grad_query_pos, row0 + queries, inside, tl.where(alive[:, None], grad_x * slope, 0.0), NDIM, AXES
        )


@triton.jit
def over_queries_tile(
    grad_k, grad_v, grad_b, grad_y, k, v, bias, live, q_base, q_strides, g_base, g_strides, shifts, deltas,
    factors,
    mask_base, mask_strides, x_base, x_strides, y_base, y_strides, rate, radius_base, radius_strides, period,
    keys, first, start, N, M, seed, lead, threshold, factor, dropout_scale,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, NDIM: tl.constexpr,
    PRECISION: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr, WEIGHTS: tl.constexpr,
    POSITIONS: tl.constexpr, EDGE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    queries = start + tl.arange(0, QUERIES)
    inside = queries < N
    q, g, shift, delta, alive = load_query_block(
        q_base, q_strides, g_base, g_strides, shifts, deltas, factors, queries, inside, D, BD, DV, BDV
    )
    product = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    g_dot_v = tl.dot(v, tl.trans(g), input_precision=PRECISION)
    squared = None
    if NDIM > 0:
        squared = squared_distance(
            x_base, x_strides, queries, alive, y_base, y_strides, keys, live, period, NDIM, True
        )
    keep = None
    if EDGE:
        reach = None
        if radius_base is not None:
            reach = load_reach(radius_base, radius_strides, queries, alive)
        keep = kept_pairs(queries, alive, keys, M, mask_base, mask_strides, squared, reach, CAUSAL, True)
    survive = None
    if seed is not None:
        survive = survivors(seed, lead, queries, first, threshold, KEYS, True)
    mixed, ds = gradient_tile(
        product,
        g_dot_v,
        shift,
        delta,
        keep,
        survive,
        squared,
        rate,
        bias,
        factor,
        dropout_scale,
        NEGATIVE,
        True,
    )
    grad_v = tl.dot(mixed.to(g.dtype), g, grad_v, input_precision=PRECISION)
    grad_k = tl.dot(ds.to(q.dtype), q, grad_k, input_precision=PRECISION)
    if WEIGHTS:
        grad_b += tl.sum(ds, 1)
    if POSITIONS:
        grad_y = add_position_gradients(
            grad_y, ds, x_base, x_strides, queries, alive, y_base, y_strides, keys, live, period, NDIM, True
        )
    return grad_k, grad_v, grad_b, grad_y


@triton.jit
def over_queries_kernel(
    query, q_strides, key, k_strides, value, v_strides, weights, w_strides, bias, bias_strides, mask,
    mask_strides,
    query_pos, x_strides, key_pos, y_strides, rate_pointer, rate_strides, radius, radius_strides, period,
    seed_pointer, grad_out, g_strides, shifts, deltas, factors, grad_key, grad_value, grad_weights,
    grad_key_pos,
    Z1, N, M, first_lead, threshold, factor, scale, dropout_scale,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, NDIM: tl.constexpr,
    PRECISION: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A program owns a block of keys: gradients of key and value and, where wanted, of weights and
    key_pos."""
    WEIGHTS: tl.constexpr = grad_weights is not None
    POSITIONS: tl.constexpr = grad_key_pos is not None
    AXES: tl.constexpr = triton.next_power_of_2(max(NDIM, 1))
    blocks = tl.cdiv(M, KEYS)
    pid = tl.program_id(0)
    z, first = pid // blocks, (pid % blocks) * KEYS
    z0, z1 = z // Z1, z % Z1
    keys = first + tl.arange(0, KEYS)
    inside = keys < M
    lead = first_lead + z.to(tl.int64)
    bias_tile, live = None, inside
    if bias is not None:
        bias_tile = load_bias(lead_base(bias, bias_strides, z0, z1), keys, M, True)
        live = bias_tile != -INFINITY
    k = load_rows(lead_base(key, k_strides, z0, z1), keys, live, k_strides, D, BD)
    v = load_rows(lead_base(value, v_strides, z0, z1), keys, live, v_strides, DV, BDV)
    q_base, g_base = lead_base(query, q_strides, z0, z1), lead_base(grad_out, g_strides, z0, z1)
    row0 = z.to(tl.int64) * N
    seed = None
    if seed_pointer is not None:
        seed = tl.load(seed_pointer)
    mask_base = None
    if mask is not None:
        mask_base = lead_base(mask, mask_strides, z0, z1)
    x_base, y_base = None, None
    if NDIM > 0:
        x_base, y_base = lead_base(query_pos, x_strides, z0, z1), lead_base(key_pos, y_strides, z0, z1)
    rate = None
    if rate_pointer is not None:
        rate = load_rate(rate_pointer, rate_strides, z0, z1)
    radius_base = None
    if radius is not None:
        radius_base = lead_base(radius, radius_strides, z0, z1)
    # The queries [begin, full) need masks, the later ones none: past the last query the shift is inf.
    begin, full = 0, 0
    if CAUSAL:
        begin = first // QUERIES * QUERIES
        full = tl.minimum(tl.cdiv(first + KEYS - 1, QUERIES) * QUERIES, N)
    if mask is not None or radius is not None:
        full = N
    grad_k = tl.zeros([KEYS, BD], tl.float32)
    grad_v = tl.zeros([KEYS, BDV], tl.float32)
    grad_b = tl.zeros([KEYS], tl.float32)
    grad_y = tl.zeros([KEYS, AXES], tl.float32)
    for start in range(begin, full, QUERIES):
        grad_k, grad_v, grad_b, grad_y = over_queries_tile(
            grad_k, grad_v, grad_b, grad_y, k, v, bias_tile, live, q_base, q_strides, g_base, g_strides,
            shifts + row0, deltas + row0, factors + row0,
            mask_base, mask_strides, x_base, x_strides, y_base, y_strides, rate, radius_base,
            radius_strides, period,
            keys, first, start, N, M, seed, lead, threshold, factor, dropout_scale, D, BD, DV, BDV, NDIM,
            PRECISION, CAUSAL, NEGATIVE, WEIGHTS, POSITIONS, True, QUERIES, KEYS,
        )  # fmt: skip
    for start in range(full, N, QUERIES):
        grad_k, grad_v, grad_b, grad_y = over_queries_tile(
            grad_k, grad_v, grad_b, grad_y, k, v, bias_tile, live, q_base, q_strides, g_base, g_strides,
            shifts + row0, deltas + row0, factors + row0,
            mask_base, mask_strides, x_base, x_strides, y_base, y_strides, rate, radius_base,
            radius_strides, period,
            keys, first, start, N, M, seed, lead, threshold, factor, dropout_scale, D, BD, DV, BDV, NDIM,
            PRECISION, CAUSAL, NEGATIVE, WEIGHTS, POSITIONS, False, QUERIES, KEYS,
        )  # fmt: skip
    # Selected, not only multiplied by 0: a NaN query must not reach a key that does not exist.
    at = z.to(tl.int64) * M + keys
    store_rows(grad_key, at, inside, tl.where(live[:, None], grad_k * scale, 0.0), D, BD)
    store_rows(grad_value, at, inside, tl.where(live[:, None], grad_v, 0.0), DV, BDV)
    if WEIGHTS:
        w_at = lead_base(weights, w_strides, z0, z1) + keys.to(tl.int64) * w_strides[2]
        w = tl.load(w_at, mask=live, other=1.0)
        tl.store(grad_weights + at, tl.where(live, tl.div_rn(grad_b, w), 0.0), mask=inside)
    if POSITIONS:
        slope = 0.0
        if rate_pointer is not None:
            slope = 2.0 * tl.load(lead_base(rate_pointer, rate_strides, z0, z1))
        store_rows(grad_key_pos, at, inside, tl.where(live[:, None], grad_y * slope, 0.0), NDIM, AXES)
