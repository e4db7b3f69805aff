"""The Triton kernels of Galerkin attention: k^T W v of keys and values normalised on the way, and back.

Rows of k and v are points; those of weight 0 are not read. Index vectors become 64-bit before they meet a
stride: strides and their products pass 2^31. Sums of programs meet in the launcher, in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))


# --- rows and their norms ------------------------------------------------------------------------


@triton.jit
def lead_base(pointer, strides, batch, head):
    return pointer + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def load_columns(base, strides, rows, live, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """float32 columns first .. first + BLOCK of rows; 0, and never touched, where not live and past WIDTH."""
    columns = first + tl.arange(0, BLOCK)
    at = base + (rows.to(tl.int64)[:, None] * strides[2] + columns.to(tl.int64)[None, :] * strides[3])
    return tl.load(at, mask=live[:, None] & (columns < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_rows(base, strides, rows, inside, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    at = base + (rows.to(tl.int64)[:, None] * strides[2] + columns.to(tl.int64)[None, :] * strides[3])
    tl.store(at, values.to(base.dtype.element_ty), mask=inside[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def load_affine(pointer, strides, head, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Scale or shift of a head's norm for the columns first .. first + BLOCK, 0 past WIDTH; None for None."""
    if pointer is None:
        return None
    else:
        columns = first + tl.arange(0, BLOCK)
        at = pointer + (head.to(tl.int64) * strides[0] + columns.to(tl.int64) * strides[1])
        return tl.load(at, mask=columns < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def load_weights(base, strides, rows, inside, factor):
    """(weights times factor, which rows exist); a weight that is none is NaN."""
    if base is None:
        return tl.where(inside, factor, 0.0), inside
    else:
        w = tl.load(base + rows.to(tl.int64) * strides[2], mask=inside, other=0.0).to(tl.float32)
        live = inside & (w != 0.0)
        return tl.where((w >= 0.0) & (w < INFINITY), w * factor, float("nan")), live


@triton.jit
def statistics(
    x, base, strides, rows, live, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    """Mean and 1 / sqrt(variance + eps) of whole rows; x is one of their PARTS blocks.

    The variance is a mean of squared differences, never E x^2 - (E x)^2, which cancels.
    """
    total = tl.zeros([rows.shape[0]], tl.float32)
    squares = tl.zeros([rows.shape[0]], tl.float32)
    for part in tl.static_range(PARTS):
        y = x
        if PARTS > 1:
            y = load_columns(base, strides, rows, live, part * BLOCK, WIDTH, BLOCK)
        total += tl.sum(y, 1)
    mean = total / WIDTH
    for part in tl.static_range(PARTS):
        y = x
        if PARTS > 1:
            y = load_columns(base, strides, rows, live, part * BLOCK, WIDTH, BLOCK)
        there = part * BLOCK + tl.arange(0, BLOCK) < WIDTH
        apart = tl.where(there[None, :], y - mean[:, None], 0.0)
        squares += tl.sum(apart * apart, 1)
    return mean, tl.rsqrt(squares / WIDTH + eps)


@triton.jit
def normalised(x, mean, slope, scale, shift, live):
    """scale (x - mean) slope + shift, and 0 where not live: there it would be the shift."""
    y = (x - mean[:, None]) * slope[:, None] * scale[None, :] + shift[None, :]
    return tl.where(live[:, None], y, 0.0)


# --- coordinates: at most three, so multiply-adds and no product of matrices padded to sixteen columns ------


@triton.jit
def load_axis(base, strides, rows, live, axis):
    at = base + rows.to(tl.int64) * strides[2] + axis * strides[3]
    return tl.load(at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def pair_products(base, strides, rows, live, w, P: tl.constexpr, PAIRS: tl.constexpr):
    """(rows, PAIRS): in column p P + q the product w x_p x_q."""
    column = tl.arange(0, PAIRS)
    inside = live[:, None] & (column < P * P)[None, :]
    at = base + rows.to(tl.int64)[:, None] * strides[2]
    x = tl.load(at + (column // P).to(tl.int64)[None, :] * strides[3], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(at + (column % P).to(tl.int64)[None, :] * strides[3], mask=inside, other=0.0).to(tl.float32)
    return x * y * w[:, None]


@triton.jit
def store_vector(pointer, vector, stride, SIZE: tl.constexpr, limit):
    at = tl.arange(0, SIZE)
    tl.store(pointer + at.to(tl.int64) * stride, vector, mask=at < limit)


# --- the sums ------------------------------------------------------------------------------------


@triton.jit
def block_pointers(base, first_row, first_column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of a block of a contiguous matrix with so many columns."""
    width = tl.full([], 0, tl.int64) + columns
    r, c = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    return base + (r.to(tl.int64)[:, None] * width + c[None, :])


@triton.jit
def inside_block(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return (tl.arange(0, ROWS) < rows)[:, None] & (tl.arange(0, COLUMNS) < columns)[None, :]


@triton.jit
def normed_block(
    base, strides, rows, live, first, scale, shift, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Columns first .. first + BLOCK of the normalised rows; scale None: of the rows."""
    x = load_columns(base, strides, rows, live, first, WIDTH, BLOCK)
    if scale is None:
        return x
    else:
        mean, slope = statistics(x, base, strides, rows, live, eps, WIDTH, BLOCK, PARTS)
        return normalised(x, mean, slope, scale, shift, live)


@triton.jit
def gram_kernel(
    key, k_strides, value, v_strides, pos, x_strides, weights, w_strides,
    key_scale, ks_strides, key_shift, kb_strides, value_scale, vs_strides, value_shift, vb_strides,
    sums, leads, heads, M, points, chunks, factor, eps,
    D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    PARTS: tl.constexpr, PARTS_V: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """factor [x, Ln k]^T W [x, Ln v] over a chunk of points, into a matrix of its own.

    A program owns a chunk and, where a row is wider than BD or BDV, a block of the matrix; the blocks of a
    chunk follow each other, so that what they share is in the cache.
    """
    blocks: tl.constexpr = PARTS * PARTS_V
    pid = tl.program_id(0)
    block, chunk, z = pid % blocks, pid // blocks % chunks, pid // blocks // chunks
    i, j = block // PARTS_V, block % PARTS_V
    batch, head = z // heads, z % heads
    k_base, v_base = lead_base(key, k_strides, batch, head), lead_base(value, v_strides, batch, head)
    k_scale = load_affine(key_scale, ks_strides, head, i * BD, D, BD)
    k_shift = load_affine(key_shift, kb_strides, head, i * BD, D, BD)
    v_scale = load_affine(value_scale, vs_strides, head, j * BDV, DV, BDV)
    v_shift = load_affine(value_shift, vb_strides, head, j * BDV, DV, BDV)
    w_base = None
    if weights is not None:
        w_base = lead_base(weights, w_strides, batch, head)

    acc = tl.zeros([BD, BDV], tl.float32)
    # Of each coordinate with k and with v: sums over the rows follow once, after the last tile.
    if P > 0:
        x_base = lead_base(pos, x_strides, batch, head)
        pairs = tl.zeros([TILE, 16], tl.float32)
        k0, v0 = tl.zeros([TILE, BD], tl.float32), tl.zeros([TILE, BDV], tl.float32)
    if P > 1:
        k1, v1 = tl.zeros([TILE, BD], tl.float32), tl.zeros([TILE, BDV], tl.float32)
    if P > 2:
        k2, v2 = tl.zeros([TILE, BD], tl.float32), tl.zeros([TILE, BDV], tl.float32)
    begin = chunk * points
    end = tl.minimum(begin + points, M)
    for start in range(begin, end, TILE):
        rows = start + tl.arange(0, TILE)
        w, live = load_weights(w_base, w_strides, rows, rows < end, factor)
        k = normed_block(k_base, k_strides, rows, live, i * BD, k_scale, k_shift, eps, D, BD, PARTS)
        v = normed_block(v_base, v_strides, rows, live, j * BDV, v_scale, v_shift, eps, DV, BDV, PARTS_V)
        k = k * w[:, None]
        acc = tl.dot(tl.trans(k), v, acc, input_precision=PRECISION)
        if P > 0:
            pairs += pair_products(x_base, x_strides, rows, live, w, P, 16)
            x = load_axis(x_base, x_strides, rows, live, 0)
            k0 += k * x[:, None]
            v0 += v * (x * w)[:, None]
        if P > 1:
            x = load_axis(x_base, x_strides, rows, live, 1)
            k1 += k * x[:, None]
            v1 += v * (x * w)[:, None]
        if P > 2:
            x = load_axis(x_base, x_strides, rows, live, 2)
            k2 += k * x[:, None]
            v2 += v * (x * w)[:, None]

    columns: tl.constexpr = P + DV
    out = sums + (chunk.to(tl.int64) * leads + z) * ((P + D) * columns)
    size, size_v = D - i * BD, DV - j * BDV
    at = block_pointers(out, P + i * BD, P + j * BDV, columns, BD, BDV)
    tl.store(at, acc, mask=inside_block(size, size_v, BD, BDV))
    below, beside = out + (P + i * BD).to(tl.int64) * columns, out + P + j * BDV
    if P > 0:
        if j == 0:
            store_vector(below, tl.sum(k0, 0), columns, BD, size)
            if P > 1:
                store_vector(below + 1, tl.sum(k1, 0), columns, BD, size)
            if P > 2:
                store_vector(below + 2, tl.sum(k2, 0), columns, BD, size)
        if i == 0:
            store_vector(beside, tl.sum(v0, 0), 1, BDV, size_v)
            if P > 1:
                store_vector(beside + columns, tl.sum(v1, 0), 1, BDV, size_v)
            if P > 2:
                store_vector(beside + 2 * columns, tl.sum(v2, 0), 1, BDV, size_v)
        if block == 0:
            c = tl.arange(0, 16)
            tl.store(out + (c // P * columns + c % P), tl.sum(pairs, 0), mask=c < P * P)


# --- the derivative ------------------------------------------------------------------------------


@triton.jit
def load_block(
    base, first_row, end_row, first_column, end_column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    at = block_pointers(base, first_row, first_column, columns, ROWS, COLUMNS)
    inside = inside_block(end_row - first_row, end_column - first_column, ROWS, COLUMNS)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def load_vector(pointer, stride, SIZE: tl.constexpr, limit):
    at = tl.arange(0, SIZE)
    return tl.load(pointer + at.to(tl.int64) * stride, mask=at < limit, other=0.0)


@triton.jit
def norm_gradient(g, x, mean, slope, scale, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(gradient of x, sums over the rows for the scale and for the shift), g being that of Ln x."""
    inside = live[:, None] & (tl.arange(0, BLOCK) < WIDTH)[None, :]
    unit = tl.where(inside, (x - mean[:, None]) * slope[:, None], 0.0)
    d = g * scale[None, :]
    along, level = tl.sum(d * unit, 1) / WIDTH, tl.sum(d, 1) / WIDTH
    grad = (d - level[:, None] - unit * along[:, None]) * slope[:, None]
    return grad, tl.sum(g * unit, 0), tl.sum(g, 0)


@triton.jit
def side(
    base, strides, mean, slope, scale, s_strides, shift, b_strides,
    other_base, other_strides, other_mean, other_slope, other_scale, os_strides, other_shift, ob_strides,
    grad, columns, x_base, x_strides, w, rows, live, inside, head, out, out_strides, scale_sum, shift_sum,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, OTHER: tl.constexpr, P: tl.constexpr, SLICE: tl.constexpr,
    IS_KEY: tl.constexpr, MOMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of the rows on one side of the product, from the other side's normalised rows.

    t = [x, Ln other] G^T (key) or [x, Ln other] G (value), in slices of the other side's channels, which are
    read again: they are in the cache. Returns the sums for the norm's parameters and, with MOMENTS, the sum
    over the channels of Ln row times t.
    """
    t = tl.zeros([rows.shape[0], BLOCK], tl.float32)
    for first in range(0, OTHER, SLICE):
        y = load_columns(other_base, other_strides, rows, live, first, OTHER, SLICE)
        if other_scale is not None:
            y_scale = load_affine(other_scale, os_strides, head, first, OTHER, SLICE)
            y_shift = load_affine(other_shift, ob_strides, head, first, OTHER, SLICE)
            y = normalised(y, other_mean, other_slope, y_scale, y_shift, live)
        if IS_KEY:
            block = tl.trans(load_block(grad, P, P + WIDTH, P + first, P + OTHER, columns, BLOCK, SLICE))
        else:
            block = load_block(grad, P + first, P + OTHER, P, P + WIDTH, columns, SLICE, BLOCK)
        t = tl.dot(y, block, t, input_precision=PRECISION)
    for axis in tl.static_range(P):
        if IS_KEY:
            along = load_vector(grad + P * columns + axis, columns, BLOCK, WIDTH)
        else:
            along = load_vector(grad + axis * columns + P, 1, BLOCK, WIDTH)
        t += load_axis(x_base, x_strides, rows, live, axis)[:, None] * along[None, :]

    row = load_columns(base, strides, rows, live, 0, WIDTH, BLOCK)
    moment = tl.zeros([rows.shape[0]], tl.float32)
    g = tl.where(live[:, None], t * w[:, None], 0.0)
    if scale is None:
        if MOMENTS:
            moment += tl.sum(row * t, 1)
        store_rows(out, out_strides, rows, inside, g, WIDTH, BLOCK)
    else:
        scales = load_affine(scale, s_strides, head, 0, WIDTH, BLOCK)
        if MOMENTS:
            shifts = load_affine(shift, b_strides, head, 0, WIDTH, BLOCK)
            moment += tl.sum(normalised(row, mean, slope, scales, shifts, live) * t, 1)
        grad_row, for_scale, for_shift = norm_gradient(g, row, mean, slope, scales, live, WIDTH, BLOCK)
        store_rows(out, out_strides, rows, inside, tl.where(live[:, None], grad_row, 0.0), WIDTH, BLOCK)
        scale_sum += for_scale
        shift_sum += for_shift
    return scale_sum, shift_sum, moment


@triton.jit
def gram_backward_kernel(
    key, k_strides, value, v_strides, pos, x_strides, weights, w_strides,
    key_scale, ks_strides, key_shift, kb_strides, value_scale, vs_strides, value_shift, vb_strides,
    grad, grad_key, gk_strides, grad_value, gv_strides, grad_pos, grad_weights, key_sums, value_sums,
    leads, heads, M, points, chunks, factor, eps,
    D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    SLICE: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk of points: of key and value, and where wanted of pos (per head) and weights.

    With a = [x, Ln k], b = [x, Ln v] of a point and G the gradient of the matrix: da = w G b, db = w G^T a,
    dw = a . G b. key_sums and value_sums (chunks, leads, 2, D): what the chunk adds to the gradients of a
    norm's scale and shift.
    """
    MOMENTS: tl.constexpr = grad_pos is not None or grad_weights is not None
    pid = tl.program_id(0)
    chunk, z = pid % chunks, pid // chunks
    batch, head = z // heads, z % heads
    k_base, v_base = lead_base(key, k_strides, batch, head), lead_base(value, v_strides, batch, head)
    gk_base = lead_base(grad_key, gk_strides, batch, head)
    gv_base = lead_base(grad_value, gv_strides, batch, head)
    w_base, x_base = None, None
    if weights is not None:
        w_base = lead_base(weights, w_strides, batch, head)
    if P > 0:
        x_base = lead_base(pos, x_strides, batch, head)
    columns: tl.constexpr = P + DV
    g_base = grad + z.to(tl.int64) * ((P + D) * columns)
    k_scale_sum, k_shift_sum = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    v_scale_sum, v_shift_sum = tl.zeros([BDV], tl.float32), tl.zeros([BDV], tl.float32)
    begin = chunk * points
    end = tl.minimum(begin + points, M)
    for start in range(begin, end, TILE):
        rows = start + tl.arange(0, TILE)
        inside = rows < end
        w, live = load_weights(w_base, w_strides, rows, inside, factor)
        k_mean, k_slope, v_mean, v_slope = None, None, None, None
        if key_scale is not None:
            k = load_columns(k_base, k_strides, rows, live, 0, D, BD)
            k_mean, k_slope = statistics(k, k_base, k_strides, rows, live, eps, D, BD, 1)
        if value_scale is not None:
            v = load_columns(v_base, v_strides, rows, live, 0, DV, BDV)
            v_mean, v_slope = statistics(v, v_base, v_strides, rows, live, eps, DV, BDV, 1)
        k_scale_sum, k_shift_sum, moment = side(
            k_base, k_strides, k_mean, k_slope, key_scale, ks_strides, key_shift, kb_strides,
            v_base, v_strides, v_mean, v_slope, value_scale, vs_strides, value_shift, vb_strides,
            g_base, columns, x_base, x_strides, w, rows, live, inside, head, gk_base, gk_strides,
            k_scale_sum, k_shift_sum, D, BD, DV, P, SLICE, True, MOMENTS, PRECISION,
        )  # fmt: skip
        v_scale_sum, v_shift_sum, _ = side(
            v_base, v_strides, v_mean, v_slope, value_scale, vs_strides, value_shift, vb_strides,
            k_base, k_strides, k_mean, k_slope, key_scale, ks_strides, key_shift, kb_strides,
            g_base, columns, x_base, x_strides, w, rows, live, inside, head, gv_base, gv_strides,
            v_scale_sum, v_shift_sum, DV, BDV, D, P, SLICE, False, False, PRECISION,
        )  # fmt: skip
        at = z.to(tl.int64) * M + rows
        if P > 0 and MOMENTS:
            k = normed_block(
                k_base, k_strides, rows, live, 0, load_affine(key_scale, ks_strides, head, 0, D, BD),
                load_affine(key_shift, kb_strides, head, 0, D, BD), eps, D, BD, 1,
            )  # fmt: skip
            v = normed_block(
                v_base, v_strides, rows, live, 0, load_affine(value_scale, vs_strides, head, 0, DV, BDV),
                load_affine(value_shift, vb_strides, head, 0, DV, BDV), eps, DV, BDV, 1,
            )  # fmt: skip
            for p in tl.static_range(P):
                of_a = tl.sum(v * load_vector(g_base + p * columns + P, 1, BDV, DV)[None, :], 1)
                of_b = tl.sum(k * load_vector(g_base + P * columns + p, columns, BD, D)[None, :], 1)
                for q in tl.static_range(P):
                    x = load_axis(x_base, x_strides, rows, live, q)
                    of_a += x * tl.load(g_base + p * columns + q)
                    of_b += x * tl.load(g_base + q * columns + p)
                moment += load_axis(x_base, x_strides, rows, live, p) * of_a
                if grad_pos is not None:
                    tl.store(grad_pos + (at * P + p), tl.where(live, (of_a + of_b) * w, 0.0), mask=inside)
        if grad_weights is not None:
            tl.store(grad_weights + at, tl.where(live, moment, 0.0), mask=inside)
    part = chunk.to(tl.int64) * leads + z
    if key_scale is not None:
        store_vector(key_sums + part * (2 * D), k_scale_sum, 1, BD, D)
        store_vector(key_sums + (part * (2 * D) + D), k_shift_sum, 1, BD, D)
    if value_scale is not None:
        store_vector(value_sums + part * (2 * DV), v_scale_sum, 1, BDV, DV)
        store_vector(value_sums + (part * (2 * DV) + DV), v_shift_sum, 1, BDV, DV)
