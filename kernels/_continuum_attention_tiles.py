"""What the forward and the backward kernel of continuum attention share: loading, scores and masks of a tile.

A tile is query-major (queries, keys) or, where the sums run over queries, key-major (keys, queries).
Index vectors become 64-bit before they meet a stride: strides and their products pass 2^31.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INFINITY = tl.constexpr(float("inf"))
# A radius r admits squared distances up to r^2 (1 + 8 eps): equidistant neighbours are in or out together.
REACH = tl.constexpr(1.0 + 8.0 * 2.0**-23)


@triton.jit
def lead_base(pointer, strides, z0, z1):
    return pointer + z0.to(tl.int64) * strides[0] + z1.to(tl.int64) * strides[1]


@triton.jit
def load_rows(base, rows, live, strides, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows (len(rows), PADDED) of a lead; 0, and never touched, where not live and past WIDTH."""
    columns = tl.arange(0, PADDED)
    at = base + (rows.to(tl.int64)[:, None] * strides[2] + columns.to(tl.int64)[None, :] * strides[3])
    if live is None:
        if WIDTH == PADDED:
            return tl.load(at)
        else:
            return tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        if WIDTH == PADDED:
            return tl.load(at, mask=live[:, None], other=0.0)
        else:
            return tl.load(at, mask=live[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows(base, rows, inside, values, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The first WIDTH columns of values to contiguous rows."""
    columns = tl.arange(0, PADDED)
    row_stride = tl.full([], WIDTH, tl.int64)
    at = base + (rows.to(tl.int64)[:, None] * row_stride + columns[None, :])
    tl.store(at, values.to(base.dtype.element_ty), mask=inside[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def load_bias(base, keys, M, EDGE: tl.constexpr):
    """log2 of the weights of contiguous keys; -inf past the last one."""
    if EDGE:
        return tl.load(base + keys, mask=keys < M, other=-INFINITY)
    else:
        return tl.load(base + keys)


@triton.jit
def over_queries(vector, KEY_MAJOR: tl.constexpr):
    if KEY_MAJOR:
        return vector[None, :]
    else:
        return vector[:, None]


@triton.jit
def over_keys(vector, KEY_MAJOR: tl.constexpr):
    if KEY_MAJOR:
        return vector[:, None]
    else:
        return vector[None, :]


@triton.jit
def load_axis(base, rows, live, strides, axis: tl.constexpr):
    at = base + rows.to(tl.int64) * strides[2] + axis * strides[3]
    return tl.load(at, mask=live, other=0.0)


@triton.jit
def difference(x, y, period, axis: tl.constexpr, NDIM: tl.constexpr, KEY_MAJOR: tl.constexpr):
    """x_i - y_k along an axis, to the nearest image. Never |x|^2 - 2 x y + |y|^2, which cancels far from 0.

    period: None, or the lengths of all axes and then their inverses, both 0 along an axis without period.
    """
    d = over_queries(x, KEY_MAJOR) - over_keys(y, KEY_MAJOR)
    if period is not None:
        d -= period[axis] * tl.floor(d * period[NDIM + axis] + 0.5)
    return d


@triton.jit
def squared_distance(
    x_base,
    x_strides,
    queries,
    inside,
    y_base,
    y_strides,
    keys,
    live,
    period,
    NDIM: tl.constexpr,
    KEY_MAJOR: tl.constexpr,
):
    if KEY_MAJOR:
        total = tl.zeros([keys.shape[0], queries.shape[0]], tl.float32)
    else:
        total = tl.zeros([queries.shape[0], keys.shape[0]], tl.float32)
    for axis in tl.static_range(NDIM):
        x = load_axis(x_base, queries, inside, x_strides, axis)
        y = load_axis(y_base, keys, live, y_strides, axis)
        d = difference(x, y, period, axis, NDIM, KEY_MAJOR)
        total += d * d
    return total


@triton.jit
def load_rate(pointer, strides, z0, z1):
    """rate log2 e of a lead; NaN if it is negative."""
    rate = tl.load(lead_base(pointer, strides, z0, z1))
    return tl.where(rate >= 0.0, rate, float("nan")) * LOG2_E


@triton.jit
def load_reach(base, strides, queries, inside):
    """The largest squared distance within radius; NaN where the radius is negative or NaN."""
    radius = tl.load(base + queries.to(tl.int64) * strides[2], mask=inside, other=0.0)
    return tl.where(radius >= 0.0, radius * radius * REACH, float("nan"))


@triton.jit
def log2_scores(product, factor, bias, rate, squared, NEGATIVE: tl.constexpr, KEY_MAJOR: tl.constexpr):
    """log2(w_k e^{s_ik}) up to a constant of the lead: one FMA, whose addend is the weight.

    Weights in the exponent cost the addition of the bias. Weights as factors of value and denominator would
    save it, but then the shift of a row must be its largest unweighted score,
    and keys of large weight are lost to
    underflow below a large score of tiny weight; and value would pass through registers on its way to the
    tensor cores in every tile.
    """
    if NEGATIVE:  # factor is |scale| log2 e, so that the largest product has the largest score
        product = -product
    if bias is None:  # noqa: SIM108
        t = product * factor
    else:
        t = tl.fma(product, factor, over_keys(bias, KEY_MAJOR))
    if rate is not None:
        t -= squared * rate
    return t


@triton.jit
def kept_pairs(
    queries,
    inside,
    keys,
    M,
    mask_base,
    mask_strides,
    squared,
    reach,
    CAUSAL: tl.constexpr,
    KEY_MAJOR: tl.constexpr,
):
    """Which pairs of an edge tile count: existing keys, the causal triangle, the mask and the radius."""
    keep = over_queries(inside, KEY_MAJOR) & over_keys(keys < M, KEY_MAJOR)
    if CAUSAL:
        keep = keep & (over_keys(keys, KEY_MAJOR) <= over_queries(queries, KEY_MAJOR))
    if mask_base is not None:
        rows, columns = queries.to(tl.int64) * mask_strides[2], keys.to(tl.int64) * mask_strides[3]
        at = mask_base + (over_queries(rows, KEY_MAJOR) + over_keys(columns, KEY_MAJOR))
        keep = keep & (tl.load(at, mask=keep, other=0) != 0)
    if reach is not None:
        keep = keep & (squared <= over_queries(reach, KEY_MAJOR))
    return keep


@triton.jit
def survivors(seed, lead, queries, first, threshold, KEYS: tl.constexpr, KEY_MAJOR: tl.constexpr):
    """The dropout mask of csrc/philox.h: key k of query i reads word k & 3 of counter (k >> 2, i, lead)."""
    shape: tl.constexpr = [queries.shape[0], KEYS // 4]
    zero = tl.zeros(shape, tl.uint32)
    quads = (first // 4 + tl.arange(0, KEYS // 4)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(
        zero + quads[None, :],
        zero + queries.to(tl.uint32)[:, None],
        zero + lead.to(tl.uint32),
        zero + (lead >> 32).to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
        n_rounds=7,
    )
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    keep = words.to(tl.int64) >= threshold
    if KEY_MAJOR:
        return tl.trans(keep)
    else:
        return keep
