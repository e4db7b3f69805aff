"""float32 products by pairs of float16 numbers, whose products sum in float32.

x = hi + lo keeps 23 bits, and x y = hi hi' + hi lo' + lo hi' leaves out only lo lo': the numbers of three
TF32 products, with nothing left to split in the tiles but probabilities. float16 has few exponents, so every
channel of key, row of query and column of value is first multiplied by the power of two that brings its
largest number into [2^14, 2^15): what is 2^-39 of that is lost. Where this could show (split_query,
split_kernel), or something is not finite, the block of queries is left to the kernel of TF32 products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._continuum_attention_tiles import INFINITY, lead_base, load_bias, load_rows

# Rows of the parts are a multiple of this, so that whole tiles are read without a mask.
PART_BLOCK = tl.constexpr(128)
TOP = tl.constexpr(14)
NO_ROW = tl.constexpr(-1000)
# A row of value counts as lost if its largest number is below 2^LEAST of its column's largest.
LEAST = tl.constexpr(-14)


@triton.jit
def exponent(x):
    """floor(log2 |x|) of float32 numbers; -127 for 0 and subnormal numbers, 128 where not finite."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit
def power_of_two(n):
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled(x, n):
    """x 2^n for n up to 254. In two steps, since 2^n need not be a float32 number."""
    n = tl.maximum(n, -252)
    half = n >> 1
    return x * power_of_two(half) * power_of_two(n - half)


@triton.jit
def split_as_tf32(x):
    """The parts that Triton's TF32 products have, hi to nearest and lo cut.

    So scores differ from those of the backward kernels by the order of their sums only: there, probabilities
    are divided by the sum that the forward kernel found.
    """
    hi = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    lo = ((x - hi).to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    return hi.to(tl.float16), lo.to(tl.float16)


@triton.jit
def split(x):
    hi = x.to(tl.float16)
    return hi, (x - hi.to(tl.float32)).to(tl.float16)


@triton.jit
def split_product(a, a_low, b, b_low):
    small = tl.dot(a_low, b, input_precision="ieee")
    small = tl.dot(a, b_low, small, input_precision="ieee")
    return tl.dot(a, b, small, input_precision="ieee")


@triton.jit
def part_rows(M):
    """The rows of a part, of which that of lo follows that of hi."""
    return tl.full([], 1, tl.int64) * tl.cdiv(M, PART_BLOCK) * PART_BLOCK


@triton.jit
def load_part(base, first, ROWS: tl.constexpr, PADDED: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * PADDED + tl.arange(0, PADDED)[None, :]
    return tl.load(base + (tl.full([], 0, tl.int64) + first) * PADDED + at)


@triton.jit
def store_parts(base, rows, low, values, PADDED: tl.constexpr):
    hi, lo = split_as_tf32(values)
    at = rows.to(tl.int64)[:, None] * PADDED + tl.arange(0, PADDED)[None, :]
    tl.store(base + at, hi)
    tl.store(base + low * PADDED + at, lo)


@triton.jit
def load_live(
    key, k_strides, value, v_strides, bias, bias_strides, z0, z1, keys, M,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    live = keys < M
    if bias is not None:
        live = load_bias(lead_base(bias, bias_strides, z0, z1), keys, M, True) != -INFINITY
    k = load_rows(lead_base(key, k_strides, z0, z1), keys, live, k_strides, D, BD)
    v = load_rows(lead_base(value, v_strides, z0, z1), keys, live, v_strides, DV, BDV)
    return k, v


@triton.jit
def exponents_kernel(
    key, k_strides, value, v_strides, bias, bias_strides, tops, chunks, Z1, M,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest exponents of each channel of key and column of value in a chunk of keys."""
    pid = tl.program_id(0)
    z, first = pid // chunks, (pid % chunks) * BLOCK
    k, v = load_live(
        key, k_strides, value, v_strides, bias, bias_strides, z // Z1, z % Z1, first + tl.arange(0, BLOCK), M,
        D, BD, DV, BDV,
    )  # fmt: skip
    at = tops + pid.to(tl.int64) * (BD + BDV)
    tl.store(at + tl.arange(0, BD), tl.max(exponent(k), 0))
    tl.store(at + BD + tl.arange(0, BDV), tl.max(exponent(v), 0))


@triton.jit
def split_kernel(
    key, k_strides, value, v_strides, bias, bias_strides, tops, k_parts, v_parts, least, chunks, Z1, M,
    D: tl.constexpr, BD: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both parts of a chunk of keys and values, scaled; zeros where there is no live key.

    least: the exponent, relative to those of the columns, of the smallest row of value that is not 0. The
    terms of every output row are as large, and its error, 2^-39 of the columns' largest numbers, is small.
    """
    pid = tl.program_id(0)
    z, first = pid // chunks, (pid % chunks) * BLOCK
    keys = first + tl.arange(0, BLOCK)
    k, v = load_live(
        key, k_strides, value, v_strides, bias, bias_strides, z // Z1, z % Z1, keys, M, D, BD, DV, BDV
    )
    at = tops + z.to(tl.int64) * (BD + BDV)
    k_top, v_top = tl.load(at + tl.arange(0, BD)), tl.load(at + BD + tl.arange(0, BDV))
    low = part_rows(M)
    lead = z.to(tl.int64) * 2 * low
    store_parts(k_parts + lead * BD, keys, low, scaled(k, TOP - k_top[None, :]), BD)
    store_parts(v_parts + lead * BDV, keys, low, scaled(v, TOP - v_top[None, :]), BDV)
    size = tl.max(tl.where(v == 0.0, NO_ROW, exponent(v) - v_top[None, :]), 1)
    tl.store(least + pid, tl.min(tl.where(size == NO_ROW, 0, size), 0))


@triton.jit
def split_query(q, tops, least, factor, BD: tl.constexpr, BDV: tl.constexpr):
    """Both parts of a block of queries, the factor of each row's products, and whether they will do.

    They will if everything is finite, no row of value too small, and what float16 loses of a score, 2^-9 in
    BD products that may be 2^30, is at most 2^-25 in log2 of a probability.
    """
    k_top, v_top = tl.load(tops + tl.arange(0, BD)), tl.load(tops + BD + tl.arange(0, BDV))
    top = tl.max(exponent(q) + k_top[None, :], 1)
    parts = scaled(q, k_top[None, :] - top[:, None] + TOP)
    row_factor = scaled(tl.zeros([q.shape[0]], tl.float32) + factor, top - 2 * TOP)
    finite = tl.max(tl.max(exponent(q), 1), 0) < 128
    finite = finite & (tl.max(k_top, 0) < 128) & (tl.max(v_top, 0) < 128)
    largest = tl.max(row_factor, 0) * (BD * 2.0**30)
    return parts, row_factor, finite & (largest <= 2.0**14) & (tl.load(least) >= LEAST)
