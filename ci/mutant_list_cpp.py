"""Mutants of continuum attention in C++ and of what all operators share: see mutants.py.

What stands between the marks is an expression, or a statement where it ends in a semicolon, since all
mutants are compiled at once, each behind its number.
"""

CONTINUUM = "test_continuum_attention.py -k 'kernel and {}'"
EDGE = "test_continuum_attention_edge.py -k 'kernel and {}'"
DISTANCE = "test_continuum_attention_distance.py -k 'kernel and {}'"
THREADS = "test_continuum_attention_threads.py -k '{}'"
DROPOUT = "test_philox.py -k 'kernel or paths'"
PATCH = "test_patch_attention.py -k '{}'"
GRADIENTS = CONTINUUM.format("(odd or feature or drawn)")
AXIS = "test_axis_product.py"

SHARED = {
    "csrc/simd.h": [
        (
            "transposition: end of a strip",
            "to[x * LDT + l] = from[l * spacing + §x§];",
            "0",
            PATCH.format("feature or values"),
        ),
    ],
    "csrc/axis_product_kernel.cpp": [
        ("axis: last rows of a long sum", "to[i] = §add ? to[i] + from[i] : from[i]§;", "from[i]", AXIS),
        (
            "axis: whole tiles of a long sum",
            "§k > 0 ? load_unaligned(to + v * L) + acc[r][v] : acc[r][v]§);",
            "acc[r][v]",
            AXIS,
        ),
        (
            "axis: contraction of the last columns",
            "§j > begin ? load(to) + acc[r][v] : acc[r][v]§);",
            "acc[r][v]",
            AXIS,
        ),
        (
            "axis: matrix at the wrong stride",
            "matrix[(i + r) * row + k * §column§] : T(0);",
            "1",
            AXIS,
        ),
    ],
    "csrc/axis_product.cpp": [
        (
            "axis: parts of a contraction",
            "for (int64_t part = §1§; part < count; ++part) {",
            "2",
            AXIS,
        ),
    ],
    "csrc/continuum_attention_tiles.h": [
        (
            "causal: diagonal left out",
            "bool keep = !causal || §k <= i0 + i§;",
            "k < i0 + i",
            CONTINUUM.format("causal"),
        ),
        (
            "causal: block skipped by its first query",
            "if (causal && §key_place(keys, first) > i0 + nq - 1§)",
            "key_place(keys, first) > i0",
            EDGE.format("causal"),
        ),
        (
            "causal: last key of a block taken for seen",
            "a.is_causal && §key_place(keys, first + count - 1) > i0§;",
            "key_place(keys, first + count - 1) > i0 + 1",
            CONTINUUM.format("causal") + " test_continuum_attention_edge.py test_philox.py",
        ),
        (
            "mask: stride of the keys ignored",
            "k * §a.mask.column_stride§] != 0;",
            "1",
            CONTINUUM.format("masks") + " test_continuum_attention_edge.py",
        ),
        ("dropout: factor of the kept", "T(1 / (§1 - a.dropout_p§))", "1 + a.dropout_p", DROPOUT),
        ("dropout: query within its block", "a.query_places[i0 + i] : §i0 + i§;", "i", DROPOUT),
        ("dropout: words in another order", "words.w[§k & 3§]", "(k & 3) ^ 1", DROPOUT),
        (
            "keys: gathered as if none were dead",
            "const S* row = base + §key_place(keys, first + j)§ * o.row_stride;",
            "first + j",
            EDGE.format("dead"),
        ),
        (
            "keys: stride of the columns ignored",
            "if (!keys.index && (§o.column_stride == 1§ || width <= 1))",
            "true",
            EDGE.format("columns"),
        ),
        (
            "bounded: norms a tenth",
            "return §__builtin_sqrt(double(most))§;",
            "0.1 * __builtin_sqrt(double(most))",
            EDGE.format("exponents"),
        ),
        (
            "bounded: whatever the weights",
            "if (keys.count <= FEW_KEYS || §!(keys.min_bias >= min_bias)§) return false;",
            "false",
            EDGE.format("(subnormal or graded or tiny)"),
        ),
        ("scores: log weights subtracted", "acc[r][c] += §bias§;", "(-bias)", CONTINUUM.format("odd")),
        (
            "scores: weights of the first row of a tile",
            "broadcast(b.bias[§smaller<int64_t>(j + r, b.count - 1)§]);",
            "j",
            CONTINUUM.format("odd"),
        ),
        (
            "distance: nearer keys count less",
            "const Vec<T> factor = broadcast(§-rate§);",
            "rate",
            DISTANCE.format("odd"),
        ),
        (
            "mix: channels at the wrong stride",
            "mix_tile<T, 4, C, QB>(a + r, lda, b, depth, §to + r * QB§);",
            "to + r",
            CONTINUUM.format("feature"),
        ),
        ("mix: last two channels", "if (§r + 2 <= width§) {", "r + 2 < width", CONTINUUM.format("feature")),
        (
            "mix: narrow tile of the first queries",
            "mix_columns<T, 1>(a, lda, width, §b + q§, depth, to + q);",
            "b",
            CONTINUUM.format("odd"),
        ),
        (
            "long products: last piece only",
            "total[r][c] = §x == 0 ? acc[r][c] : total[r][c] + acc[r][c]§;",
            "acc[r][c]",
            CONTINUUM.format("feature") + " test_continuum_attention_edge.py",
        ),
    ],
    "csrc/continuum_attention_forward.h": [
        (
            "sums: rows at the wrong stride",
            "for (int64_t r = 0; r < rows; ++r) f(§r * QB§, active);",
            "r * active",
            CONTINUUM.format("odd"),
        ),
        ("shift: sums not rescaled", "§rescale(st.sum);§", "", EDGE.format("maximum")),
        (
            "shift: totals not rescaled",
            "§rescale(st.out_total + c * QB);§",
            "",
            EDGE.format("maximum"),
        ),
        (
            "shift: probabilities of the block not rescaled",
            "for (int64_t j = 0; j < §rows_done§; ++j)",
            "0",
            EDGE.format("maximum"),
        ),
        (
            "shift: raised by the first vector only",
            "need = §either(need, greater(top[c], load(shifts + q + c * L) + tolerance))§;",
            "need",
            EDGE.format("one_query"),
        ),
        (
            "forward: narrow tile of the first queries",
            "forward_columns<T, 1, BOUNDED, MASKED, DISTANCE>(b, query, d, §q§, mask",
            "0",
            CONTINUUM.format("odd"),
        ),
        (
            "forward: row past the block counts",
            "if (§r >= live§) break;",
            "r > live",
            CONTINUUM.format("odd"),
        ),
        (
            "lse: size of the weights left out",
            "double(shift) + §keys.log2_max_weight§ +",
            "0.0",
            CONTINUUM.format("(odd or constant)"),
        ),
    ],
    "csrc/continuum_attention_backward.h": [
        (
            "backward: gradient of lse subtracted",
            "p * §((acc[r][c] - dl) + gl)§);",
            "((acc[r][c] - dl) - gl)",
            GRADIENTS,
        ),
        (
            "backward: delta missing under dropout",
            "p * §((f * acc[r][c] - dl) + gl)§);",
            "(f * acc[r][c] + gl)",
            DROPOUT,
        ),
        ("backward: values' gradient without dropout", "store(p_out + at, §p * f§);", "p", DROPOUT),
        (
            "backward: dropped pair of an infinite value",
            "store(ds_out + at, §keep ? load(ds_out + at) : Vec<T>{}§);",
            "load(ds_out + at)",
            EDGE.format("hidden_pair"),
        ),
        (
            "backward: narrow tile of the first queries",
            "backward_columns<T, 1, BOUNDED, MASKED, DROPOUT, DISTANCE>"
            "(b, query, d, grad, dv, shift, delta, grad_lse, §q§, mask",
            "0",
            GRADIENTS,
        ),
        (
            "outer: last channel of a row",
            "for (int64_t l = 0; l < §left§; ++l) row",
            "left - 1",
            GRADIENTS,
        ),
        (
            "backward: keys' gradient without scale",
            "c * a.query.column_stride]) * §T(a.scale)§;",
            "T(1)",
            GRADIENTS,
        ),
        (
            "backward: queries' gradient without scale",
            "x.grad_query[c * QB + i] * §T(a.scale)§;",
            "T(1)",
            GRADIENTS,
        ),
        (
            "backward: rows without a key",
            "if (§sum == T(0)§) continue;  // nothing",
            "false",
            EDGE.format("(nothing or empty)"),
        ),
        (
            "backward: weights see every other vector",
            "for (int64_t i = §L§; i < active; i += L) s +=",
            "2 * L",
            GRADIENTS,
        ),
        (
            "backward: gradient of lse not divided",
            "x.grad_lse[i] = §grad_lse[i] / sum§;",
            "grad_lse[i]",
            GRADIENTS,
        ),
    ],
    "csrc/continuum_attention_distance.h": [
        (
            "distance: no period",
            "if (§axis.length == T(0)§) return z;",
            "true",
            DISTANCE.format("(turns or within)"),
        ),
        ("distance: rim of the radius", "§r * r * slack§;", "r * r", DISTANCE.format("neighbours")),
        (
            "distance: factor 2 of the keys",
            "-= §2 * rate * sum_of_lanes<T>(key_sum)§;",
            "rate * sum_of_lanes<T>(key_sum)",
            DISTANCE.format("odd"),
        ),
    ],
    "csrc/continuum_attention.cpp": [
        (
            "weights: gradient of the logarithm",
            "w[k * stride] == T(0) ? T(0) : §grad[lead * a.m + k] / w[k * stride]§;",
            "grad[lead * a.m + k]",
            GRADIENTS,
        ),
        (
            "threads: a part of the sums left out",
            "for (int64_t p = §1§; p < parts; ++p) {",
            "2",
            THREADS.format("split"),
        ),
        (
            "threads: rates of the last lead only",
            "for (size_t l = §i§; l < j; ++l)",
            "j - 1",
            DISTANCE.format("leading") + " test_continuum_attention_distance.py",
        ),
    ],
    "csrc/continuum_attention_problem.h": [
        (
            "weights: of other keys where some are dead",
            "w[(set.index ? §set.index[j]§ : j) * w_stride]",
            "j",
            EDGE.format("dead"),
        ),
    ],
}
