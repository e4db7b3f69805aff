"""The Triton kernels of position attention: sums of rows, and sums of the scores' gradient.

Rows are queries, or keys if KEY_MAJOR; the other points are looped over. Positions are (parts * D, points),
coordinate by coordinate; the second part, if any (SPLIT), is what float32 leaves of float64 coordinates.
Stats are (rows, 3): the squared distance to a row's nearest key, which the exponents are relative to, their
shift (base 2), and the denominator. Index vectors are 64-bit before they meet a stride.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _difference(
    row,
    r,
    r_in,
    rows,
    other,
    o,
    o_in,
    others,
    period,
    axis: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Row minus other coordinate, to the nearest image along a periodic axis."""
    x = tl.load(row + axis * rows + r, mask=r_in, other=0.0)
    y = tl.load(other + axis * others + o, mask=o_in, other=0.0)
    step = x[:, None] - y[None, :]
    if SPLIT:
        x = tl.load(row + (D + axis) * rows + r, mask=r_in, other=0.0)
        y = tl.load(other + (D + axis) * others + o, mask=o_in, other=0.0)
        step += x[:, None] - y[None, :]
    if period is not None:
        step -= tl.load(period + axis) * tl.floor(step * tl.load(period + D + axis) + 0.5)
    return step


@triton.jit
def _squared(row, r, r_in, rows, other, o, o_in, others, period, D: tl.constexpr, SPLIT: tl.constexpr):
    total = tl.zeros([r.shape[0], o.shape[0]], tl.float32)
    for axis in tl.static_range(D):
        step = _difference(row, r, r_in, rows, other, o, o_in, others, period, axis, D, SPLIT)
        total += step * step
    return total


@triton.jit
def _log_weights(squared, r, r_in, o, o_in, log_weights, reach, KEY_MAJOR: tl.constexpr):
    """log2 w of the pairs' keys, -inf for those that do not exist. A distance that is no number counts."""
    if KEY_MAJOR:
        keys, keys_in, queries, queries_in = r, r_in, o, o_in
    else:
        keys, keys_in, queries, queries_in = o, o_in, r, r_in
    weight = tl.load(log_weights + keys, mask=keys_in, other=-INFINITY)
    weight = weight[:, None] if KEY_MAJOR else weight[None, :]
    if reach is not None:
        limit = tl.load(reach + queries, mask=queries_in, other=0.0)
        limit = limit[None, :] if KEY_MAJOR else limit[:, None]
        weight = tl.where(squared > limit, -INFINITY, tl.where(limit == limit, weight, float("nan")))
    return weight


@triton.jit
def _exponents(squared, nearest, weight, rate):
    """log2(w e^{-rate (|x - y|^2 - nearest)}).

    Distances are subtracted before the rate multiplies them: -rate |x - y|^2 may be thousands, and its
    rounding, and that of a sum with log w, would be an error of the probability. Of what counts in a row the
    difference is small, and exact where it is smallest.
    """
    return tl.where(weight == -INFINITY, -INFINITY, weight - (squared - nearest) * rate)


@triton.jit
def _rate(rate, h):
    """Base 2; NaN if it is negative."""
    value = tl.load(rate + h)
    return tl.where(value >= 0.0, value, float("nan")) * 1.4426950408889634


@triton.jit
def _columns(j, columns, channels, batch_stride, channel_stride):
    """Offsets of the columns j: the channels of all batch entries stand side by side."""
    batch, channel = (j // channels).to(tl.int64), (j % channels).to(tl.int64)
    return batch * batch_stride + channel * channel_stride


@triton.jit
def weighted_sum_kernel(
    row_pos, other_pos, x, log_weights, reach, rate, stats, period, out, lse, new_stats,
    rows, others, columns, channels, heads, x_heads, out_heads,
    row_step, other_step, weights_step, reach_step, entry_step,
    x_batch, x_head, x_row, x_channel, out_batch,
    D: tl.constexpr, SPLIT: tl.constexpr, KEY_MAJOR: tl.constexpr, WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr, R: tl.constexpr, OTHER: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """rows x columns = P x: the output and its statistics, or with KEY_MAJOR the gradient of the values."""
    rows, others, columns = rows.to(tl.int64), others.to(tl.int64), columns.to(tl.int64)
    block = tl.program_id(0).to(tl.int64)
    column_blocks = tl.maximum(tl.cdiv(columns, C), 1)
    column, block = block % column_blocks * C, block // column_blocks
    row_tiles = tl.cdiv(rows, R)
    row, block = block % row_tiles * R, block // row_tiles
    out_head, g = block % out_heads, block // out_heads
    head, head_end = out_head, out_head + 1
    if KEY_MAJOR and out_heads == 1:  # values that the heads share
        head, head_end = g * 0, g * 0 + heads
    row_pos += g * row_step
    other_pos += g * other_step
    log_weights += g * weights_step
    if reach is not None:
        reach += g * reach_step
    r = row + tl.arange(0, R).to(tl.int64)
    r_in = r < rows
    j = column + tl.arange(0, C).to(tl.int64)
    j_in = j < columns
    x += g * entry_step * x_batch + _columns(j, columns, channels, x_batch, x_channel)[None, :]
    acc = tl.zeros([R, C], tl.float32)
    total = tl.zeros([R], tl.float32)
    nearest = tl.zeros([R], tl.float32)
    shift = tl.zeros([R], tl.float32)
    if not KEY_MAJOR:
        nearest += INFINITY
        top = tl.full([R], -INFINITY, tl.float32)
        speed = _rate(rate, head)
        for o0 in range(0, others, OTHER):
            o = o0 + tl.arange(0, OTHER).to(tl.int64)
            o_in = o < others
            squared = _squared(row_pos, r, r_in, rows, other_pos, o, o_in, others, period, D, SPLIT)
            weight = _log_weights(squared, r, r_in, o, o_in, log_weights, reach, KEY_MAJOR)
            apart = tl.where(weight == -INFINITY, INFINITY, squared)
            before, nearest = nearest, tl.minimum(nearest, tl.min(apart, 1))
            if WEIGHTED:  # of equal keys the nearest has the largest exponent, 0
                s = _exponents(squared, tl.where(nearest == INFINITY, 0.0, nearest)[:, None], weight, speed)
                top = tl.where(before == INFINITY, -INFINITY, top - (before - nearest) * speed)
                top = tl.maximum(top, tl.max(s, 1))
        nearest = tl.where(nearest == INFINITY, 0.0, nearest)
        if WEIGHTED:
            shift = tl.where(top == -INFINITY, 0.0, top)
    for h in range(head, head_end):
        speed = _rate(rate, h)
        x_of = x + (h if x_heads > 1 else h * 0) * x_head
        for o0 in range(0, others, OTHER):
            o = o0 + tl.arange(0, OTHER).to(tl.int64)
            o_in = o < others
            squared = _squared(row_pos, r, r_in, rows, other_pos, o, o_in, others, period, D, SPLIT)
            weight = _log_weights(squared, r, r_in, o, o_in, log_weights, reach, KEY_MAJOR)
            if KEY_MAJOR:
                at = stats + ((g * heads + h) * others + o) * 3
                near = tl.load(at, mask=o_in, other=0.0)[None, :]
                less = tl.load(at + 1, mask=o_in, other=0.0)[None, :]
                denominator = tl.load(at + 2, mask=o_in, other=0.0)
                scale = tl.where(denominator == 0.0, 0.0, 1.0 / denominator)
                p = tl.exp2(_exponents(squared, near, weight - less, speed)) * scale[None, :]
                live = o_in
            else:
                p = tl.exp2(_exponents(squared, nearest[:, None], weight - shift[:, None], speed))
                total += tl.sum(p, 1)
                live = tl.load(log_weights + o, mask=o_in, other=-INFINITY) != -INFINITY
            tile = tl.load(x_of + o[:, None] * x_row, mask=live[:, None] & j_in[None, :], other=0.0)
            acc = tl.dot(p.to(tile.dtype), tile, acc, input_precision=PRECISION)
    if not KEY_MAJOR:
        if column == 0:
            at = (g * heads + head) * rows + r
            tl.store(new_stats + 3 * at, nearest, mask=r_in)
            tl.store(new_stats + 3 * at + 1, shift, mask=r_in)
            tl.store(new_stats + 3 * at + 2, total, mask=r_in)
            logarithm = (shift + tl.log2(total)) * 0.6931471805599453 - tl.load(rate + head) * nearest
            tl.store(lse + at, tl.where(total == 0.0, -INFINITY, logarithm), mask=r_in)
        acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    width = tl.full([], 0, tl.int64) + channels
    at = g * entry_step * out_batch + _columns(j, columns, channels, out_batch, 1)[None, :]
    at += (out_head * rows + r)[:, None] * width
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=r_in[:, None] & j_in[None, :])


@triton.jit
def score_sums_kernel(
    row_pos, other_pos, grad_out, value, log_weights, reach, rate, stats, centre, period, sums,
    rows, others, columns, channels, heads, value_heads,
    row_step, other_step, weights_step, reach_step, entry_step,
    grad_batch, grad_head, grad_row, grad_channel, value_batch, value_head, value_row, value_channel,
    D: tl.constexpr, SPLIT: tl.constexpr, KEY_MAJOR: tl.constexpr, PRECISION: tl.constexpr,
    POSITIONS: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, OTHER: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Per row sum g, sum g d2, sum g (x - y) of g = p (grad_out . value + centre)."""
    rows, others, columns = rows.to(tl.int64), others.to(tl.int64), columns.to(tl.int64)
    block = tl.program_id(0).to(tl.int64)
    row_tiles = tl.cdiv(rows, R)
    row, gh = block % row_tiles * R, block // row_tiles
    head, g = gh % heads, gh // heads
    queries = others if KEY_MAJOR else rows
    row_pos += g * row_step
    other_pos += g * other_step
    log_weights += g * weights_step
    if reach is not None:
        reach += g * reach_step
    grad_out += g * entry_step * grad_batch + head * grad_head
    value += g * entry_step * value_batch + (head if value_heads > 1 else head * 0) * value_head
    r = row + tl.arange(0, R).to(tl.int64)
    r_in = r < rows
    speed = _rate(rate, head)
    slot = tl.arange(0, WIDTH)[None, :]
    result = tl.zeros([R, WIDTH], tl.float32)
    for o0 in range(0, others, OTHER):
        o = o0 + tl.arange(0, OTHER).to(tl.int64)
        o_in = o < others
        squared = _squared(row_pos, r, r_in, rows, other_pos, o, o_in, others, period, D, SPLIT)
        weight = _log_weights(squared, r, r_in, o, o_in, log_weights, reach, KEY_MAJOR)
        q, q_in, k, k_in = (o, o_in, r, r_in) if KEY_MAJOR else (r, r_in, o, o_in)
        at = stats + (gh * queries + q) * 3
        nearest = tl.load(at, mask=q_in, other=0.0)
        shift = tl.load(at + 1, mask=q_in, other=0.0)
        denominator = tl.load(at + 2, mask=q_in, other=0.0)
        scale = tl.where(denominator == 0.0, 0.0, 1.0 / denominator)
        middle = tl.load(centre + gh * queries + q, mask=q_in, other=0.0)
        k_live = tl.load(log_weights + k, mask=k_in, other=-INFINITY) != -INFINITY
        acc = tl.zeros([R, OTHER], tl.float32)
        for column in range(0, columns, C):
            j = column + tl.arange(0, C).to(tl.int64)
            j_in = j < columns
            grad_at = (
                grad_out
                + _columns(j, columns, channels, grad_batch, grad_channel)[None, :]
                + q[:, None] * grad_row
            )
            grad_tile = tl.load(grad_at, mask=q_in[:, None] & j_in[None, :], other=0.0)
            value_at = (
                value
                + _columns(j, columns, channels, value_batch, value_channel)[None, :]
                + k[:, None] * value_row
            )
            value_tile = tl.load(value_at, mask=k_live[:, None] & j_in[None, :], other=0.0)
            if KEY_MAJOR:
                acc = tl.dot(value_tile, tl.trans(grad_tile), acc, input_precision=PRECISION)
            else:
                acc = tl.dot(grad_tile, tl.trans(value_tile), acc, input_precision=PRECISION)
        if KEY_MAJOR:
            s = _exponents(squared, nearest[None, :], weight - shift[None, :], speed)
            gradient = tl.exp2(s) * scale[None, :] * (acc + middle[None, :])
        else:
            s = _exponents(squared, nearest[:, None], weight - shift[:, None], speed)
            gradient = tl.exp2(s) * scale[:, None] * (acc + middle[:, None])
        result += tl.where(slot == 0, tl.sum(gradient, 1)[:, None], 0.0)
        result += tl.where(slot == 1, tl.sum(gradient * squared, 1)[:, None], 0.0)
        if POSITIONS:
            for axis in tl.static_range(D):
                step = _difference(row_pos, r, r_in, rows, other_pos, o, o_in, others, period, axis, D, SPLIT)
                if KEY_MAJOR:
                    step = -step
                result += tl.where(slot == 2 + axis, tl.sum(gradient * step, 1)[:, None], 0.0)
    tl.store(sums + (gh * rows + r)[:, None] * WIDTH + slot, result, mask=r_in[:, None])
