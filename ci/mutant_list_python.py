"""Mutants of the Triton kernels, run by Triton's interpreter, and of the Python.

file -> (name, text, replacement, tests); see mutants.py.
"""

VALUES = "test_continuum_attention_cuda.py -k '{}'"
PARTS = "test_continuum_attention_cuda_split.py -k '{}'"
POSITION = "test_position_attention_triton.py -k interpreted"

TRITON = {
    "kernels/_continuum_attention_forward.py": [
        (
            "triton forward: maximum of a tile ignored",
            "shift = tl.maximum(before, §tl.max(t, 1) - MARGIN§)",
            "tl.min(t, 1) - MARGIN",
            VALUES.format("maximum_arrives_late and not many"),
        ),
        (
            "triton forward: denominator not rescaled",
            "denominator = §denominator * rescale§ + tl.sum(p, 1)",
            "denominator",
            VALUES.format("maximum_arrives_late and not many"),
        ),
        (
            "triton forward: diagonal tile taken for full",
            "full = tl.minimum(M, first + §1§) // KEYS * KEYS",
            "QUERIES",
            VALUES.format("values and causal"),
        ),
        (
            "triton forward: size of the weights in lse",
            "log2_sum += §tl.load(lead_base(largest, largest_strides, z0, z1))§",
            "0.0",
            VALUES.format("values and weights and float32"),
        ),
        (
            "triton forward: dropped keys are not rescaled",
            "result = total * (tl.div_rn(1.0 + tl.zeros([QUERIES], tl.float32), divisor) * §dropout_scale§)",
            "1.0",
            VALUES.format("dropout_is"),
        ),
        (
            "triton forward: blocks of another size are done",
            "tl.cdiv(N, DONE) + first // §DONE§)",
            "QUERIES",
            PARTS.format("judged"),
        ),
        (
            "triton forward: scale of value not undone",
            "(tl.load(tops_base + BD + tl.arange(0, BDV))§ - TOP§)",
            "",
            PARTS.format("zeros"),
        ),
        (
            "triton forward: margin in the sum",
            "shift = before + §MARGIN§",
            "0.0",
            PARTS.format("small_gradients"),
        ),
    ],
    "kernels/_continuum_attention_split.py": [
        (
            "triton split: probabilities of 11 bits",
            "return hi, (x - §hi.to(tl.float32)§).to(tl.float16)",
            "x",
            PARTS.format("zeros"),
        ),
        (
            "triton split: keys of 11 bits",
            "lo = ((x - §hi§).to(tl.int32, bitcast=True)",
            "x",
            PARTS.format("zeros"),
        ),
        (
            "triton split: keys of weight 0 are read",
            "live = §load_bias(lead_base(bias, bias_strides, z0, z1), keys, M, True) != -INFINITY§",
            "keys < M",
            "test_continuum_attention_cuda_edge.py -k 'dead_keys_have and float32'",
        ),
        (
            "triton split: values that are not finite",
            "(tl.max(v_top, 0) < §128§)",
            "129",
            PARTS.format("not_finite and value"),
        ),
        (
            "triton split: scores of any size",
            "(largest <= 2.0**§14§)",
            "60",
            PARTS.format("additive_masks"),
        ),
        (
            "triton split: rows of value of any size",
            "LEAST = tl.constexpr(§-14§)",
            "-100",
            PARTS.format("small_rows"),
        ),
    ],
    "kernels/_continuum_attention_tiles.py": [
        (
            "triton tiles: diagonal left out",
            "(over_keys(keys, KEY_MAJOR) §<=§ over_queries(queries, KEY_MAJOR))",
            "<",
            VALUES.format("values and causal and float32"),
        ),
        (
            "triton tiles: no period",
            "d -= §period[axis]§ * tl.floor",
            "0.0",
            VALUES.format("distance and not direct"),
        ),
        (
            "triton tiles: rim of the radius",
            "keep = keep & (squared §<=§ over_queries(reach, KEY_MAJOR))",
            ">",
            VALUES.format("distance and not direct"),
        ),
        (
            "triton tiles: distances count the other way",
            "t §-=§ squared * rate",
            "+=",
            VALUES.format("distance and not direct"),
        ),
        (
            "triton tiles: words of the mask in another order",
            "tl.interleave(tl.interleave(§w0, w2§), tl.interleave(w1, w3))",
            "w2, w0",
            VALUES.format("dropout_is"),
        ),
    ],
    "kernels/_continuum_attention_backward.py": [
        (
            "triton backward: gradient of lse",
            "delta §-=§ tl.load(gl_at, mask=alive, other=0.0)",
            "+=",
            VALUES.format("values and weights and float32"),
        ),
        (
            "triton backward: delta missing",
            "ds = p * §(g_dot_v - over_queries(delta, KEY_MAJOR))§",
            "g_dot_v",
            VALUES.format("values and weights and float32"),
        ),
        (
            "triton backward: sign of the rate",
            "grad_rate §-=§ tl.sum(ds * squared, 1)",
            "+=",
            VALUES.format("distance and not direct"),
        ),
        (
            "triton backward: keys' gradient without scale",
            "tl.where(live[:, None], grad_k §* scale§, 0.0), D, BD)",
            "",
            VALUES.format("values and weights and float32"),
        ),
        (
            "triton backward: first queries of the diagonal",
            "begin = first // QUERIES §* QUERIES§\n        full",
            "* QUERIES + QUERIES",
            VALUES.format("values and causal and float32"),
        ),
    ],
    "kernels/_position_attention_kernels.py": [
        (
            "triton position: rate of the wrong sign",
            "weight §-§ (squared - nearest) * rate",
            "+",
            POSITION,
        ),
        (
            "triton position: relative to dead keys",
            "apart = §tl.where(weight == -INFINITY, INFINITY, squared)§",
            "squared",
            POSITION,
        ),
        (
            "triton position: shift not moved with the nearest key",
            "top - §(before - nearest) * speed§",
            "0.0",
            POSITION,
        ),
        (
            "triton position: distance left out of lse",
            "* 0.6931471805599453 §- tl.load(rate + head) * nearest§",
            "",
            POSITION,
        ),
        (
            "triton position: low parts of coordinates",
            "step += §x[:, None] - y[None, :]§\n",
            "0.0",
            POSITION,
        ),
        (
            "triton position: centre missing",
            "scale[:, None] * (acc §+ middle[:, None]§)",
            "",
            POSITION,
        ),
        (
            "triton position: shared values of one head",
            "head, head_end = g * 0, g * 0 + §heads§",
            "1",
            POSITION,
        ),
    ],
}

QUADRATURE = "test_quadrature.py -k '{}'"
MESH = "test_mesh.py"
CONTINUUM = "test_continuum_attention.py test_continuum_attention_distance.py -k 'chunked and ({})'"
PATCH = "test_patch_attention.py -k '{}'"
POSITION_CHUNKED = "test_position_attention.py -k 'chunked and ({})'"
GRID = "test_position_attention_grid.py"
FUNC = "test_torch_func.py -k '{}'"

PYTHON = {
    "continuum_ops/quadrature.py": [
        (
            "trapezoid: not halved",
            'half = torch.diff(_nodes(x, "x", 2)) §/ 2§',
            "",
            QUADRATURE.format("trapezoid"),
        ),
        ("simpson: power of the sum", "(a + b) ** §3§ / (6 * a * b)", "2", QUADRATURE.format("simpson")),
        ("simpson: last interval", "b * (2 * b + §3 * a§) / (a + b)", "a", QUADRATURE.format("simpson")),
        ("periodic: gap of the wrong side", "torch.roll(gap, §1§)", "-1", QUADRATURE.format("periodic")),
        ("clenshaw: inner weights", "w[1:-1] *= §2§", "1", QUADRATURE.format("clenshaw")),
        (
            "simplices: volume of d-simplices",
            ".abs() / §math.factorial(d)§",
            "d",
            QUADRATURE.format("simplices"),
        ),
        ("monte carlo: one point too many", "volume / §n§, dtype", "(n + 1)", QUADRATURE.format("monte")),
        (
            "interval: half its length",
            "torch.from_numpy((b - a) / §2§ * w)",
            "1",
            QUADRATURE.format("legendre or clenshaw"),
        ),
    ],
    "continuum_ops/_voronoi.py": [
        (
            "voronoi: coincident points count fully",
            "(cell / §np.bincount(owner)§)[owner]",
            "1",
            QUADRATURE.format("voronoi and not many"),
        ),
        (
            "voronoi: height of the pyramids",
            "axis=1) / (2 * §d§)",
            "2",
            QUADRATURE.format("voronoi and not many"),
        ),
    ],
    "continuum_ops/mesh.py": [
        ("grid: centres of cells", '(0.5 if name == §"cell"§ else 0.0)', '"periodic"', MESH),
        ("grid: width of the last cell", "2 * x[-1:] - §middle[-1:]§]", "middle[:1]", MESH),
        ("grid: weights transposed", "lambda w, axis: §(w[:, None] * axis)§", "(axis[:, None] * w)", MESH),
        ("grid: period of an even axis", "return §n§ * step", "(n - 1)", MESH),
    ],
    "continuum_ops/ops/_continuum_attention_chunked.py": [
        (
            "chunked: distances count the other way",
            "scores = scores §-§ x.rate[..., None, None]",
            "+",
            CONTINUUM.format("odd"),
        ),
        (
            "chunked: diagonal left out",
            "scores.masked_fill(column §>§ row[:, None]",
            ">=",
            CONTINUUM.format("causal"),
        ),
        (
            "chunked: every block begins at the first query",
            "row = torch.arange(§start, start + scores.shape[-2]§,",
            "0, scores.shape[-2]",
            CONTINUUM.format("causal") + " test_continuum_attention_edge.py",
        ),
        (
            "chunked: gradient of lse",
            "grad_row = grad_row §-§ torch.where(shift == -math.inf",
            "+",
            CONTINUUM.format("odd"),
        ),
        (
            "chunked: gradient of the logarithm",
            "grads[3] = grad_scores.sum(-2) §/ x.weights§",
            "",
            CONTINUUM.format("odd"),
        ),
        (
            "chunked: keys move with the queries",
            "grad_key_pos.append(§-§moment.sum(-2))",
            "",
            CONTINUUM.format("odd"),
        ),
        (
            "chunked: no period",
            "difference = difference §- x.period[axis] * torch.round(difference / x.period[axis])§",
            "",
            CONTINUUM.format("turns or within"),
        ),
        (
            "chunked: gradient of the rate",
            "grads[7] = §-§(grad_scores",
            "",
            CONTINUUM.format("odd"),
        ),
        (
            "chunked: probabilities that dropout keeps",
            "* (1.0 / (1.0 §-§ x.dropout_p)",
            "+",
            "test_philox.py -k 'chunked or paths'",
        ),
    ],
    "continuum_ops/ops/_philox.py": [
        ("philox: rounds", "rounds=§7§)", "6", "test_philox.py"),
    ],
    "continuum_ops/ops/_patch_attention_chunked.py": [
        (
            "patch chunked: gradient of lse",
            "grad_s = grad_s §+§ p * grad_lse[..., None]",
            "-",
            PATCH.format("values or derivatives"),
        ),
        (
            "patch chunked: delta missing",
            "grad_s = p * (grad_p §- (p * grad_p).sum(-1, keepdim=True)§)",
            "",
            PATCH.format("values or derivatives"),
        ),
        (
            "patch chunked: NaN where the weight is 0",
            "return scores.masked_fill(seen §>§ 0, math.nan)",
            ">=",
            "test_patch_attention_edge.py -k 'weight_zero or key_is_seen'",
        ),
    ],
    "continuum_ops/ops/_position_attention_chunked.py": [
        (
            "position chunked: size of the weights in lse",
            "lse = lse + _log_ratios(x.weights)[§1§]",
            "0",
            POSITION_CHUNKED.format("odd or dimensions or softplus"),
        ),
        (
            "position chunked: heads that share values",
            "mixed if value_heads > 1 else mixed.§sum(-3, keepdim=True)§",
            "mean(-3, keepdim=True)",
            POSITION_CHUNKED.format("shares or odd"),
        ),
        (
            "position chunked: factor 2 of positions",
            "moment = §2.0§ * grad_d2",
            "1.0",
            POSITION_CHUNKED.format("odd"),
        ),
        (
            "position chunked: no radius",
            "scores.masked_fill(d2 > §reach§, -math.inf)",
            "math.inf",
            POSITION_CHUNKED.format("many or random or gradcheck"),
        ),
    ],
    "continuum_ops/ops/_position_attention_grid.py": [
        (
            "grid attention: no period",
            "difference = difference §- period * (difference / period).round()§",
            "",
            GRID,
        ),
        (
            "grid attention: size of the weights in lse",
            "lse = logits.logsumexp(-1) §+ scale.log()§",
            "",
            GRID,
        ),
    ],
    "continuum_ops/ops/_grid_product.py": [
        (
            "grid product: matrix transposed in its gradient",
            "return §rows[0] @ rows[1].mT§",
            "(rows[1] @ rows[0].mT)",
            GRID,
        ),
        (
            "grid product: values of the first head",
            "self.value[start:stop, §head if self.value.shape[1] > 1 else 0§]",
            "0",
            GRID,
        ),
    ],
    "continuum_ops/ops/_position_attention_window.py": [
        (
            "window: gradient of the rate",
            "grad_rate = §-§(grad_scores * d2)",
            "",
            GRID,
        ),
        (
            "window: gradient of lse",
            "row = row §-§ grad_lse[..., None]",
            "+",
            GRID,
        ),
        ("window: keys move with the queries", "*(§-§m.sum(0) for m in moments)", "", GRID),
    ],
    "continuum_ops/ops/_functorch.py": [
        (
            "torch.func: gradient of lse dropped",
            "pull((grad_out, §torch.zeros_like(outputs[1]) if grad_lse is None else grad_lse§))",
            "torch.zeros_like(outputs[1])",
            FUNC.format("order or nested or hessian or finite"),
        ),
        (
            "torch.func: radius of 0 refused",
            "if finite else values §>=§ 0",
            ">",
            FUNC.format("values_are_checked or forward_mode or vmap"),
        ),
        (
            "torch.func: batch as the last dimension",
            "else tensor.movedim(dim, §0§)",
            "-1",
            FUNC.format("vmap"),
        ),
    ],
    "continuum_ops/ops/quantile_radius.py": [
        (
            "quantile: between other neighbours",
            "torch.lerp(below, above, position §- low§)",
            "- low + 0.5",
            "test_quantile_radius.py -k 'values or closed'",
        ),
    ],
    "continuum_ops/models/pit_layer.py": [
        (
            "pit: rates missing from self-attention",
            "key_pos=points, rate=§self.position.rate§, period",
            "None",
            "test_pit.py -k every_attention",
        ),
        (
            "pit: weights of the mesh ignored",
            'if weights §==§ "mesh":',
            "!=",
            "test_pit.py -k every_attention",
        ),
    ],
    "continuum_ops/models/tno_layer.py": [
        (
            "tno: no residual of the network",
            "return self.norm2(§self.residual2(v) +§ self._ff_block(v))",
            "",
            "test_tno.py -k formula",
        ),
    ],
    "continuum_ops/models/galerkin_transformer.py": [
        (
            "galerkin transformer: weights not normalised",
            "weights = weights / §torch.where(total == 0, 1.0, total)§",
            "1.0",
            "test_galerkin_transformer.py -k weights",
        ),
    ],
    "continuum_ops/models/smoothing.py": [
        (
            "smoothing: inverse symbol",
            "(1 + self.eps * eigenvalue) ** §-§self.alpha",
            "",
            "test_smoothing.py -k eigenfunctions",
        ),
        (
            "smoothing: even extension",
            "torch.cat([zero, inner, zero, §-inner.flip(axis)§], dim=axis)",
            "inner.flip(axis)",
            "test_smoothing.py -k eigenfunctions",
        ),
    ],
    "continuum_ops/nn/spectral_conv.py": [
        (
            "spectral: negative modes of the positive ones",
            "(slice(n - down, n), slice(§m - down, m§))",
            "0, down",
            "test_spectral_conv.py -k 'modes or resolution'",
        ),
    ],
    "continuum_ops/training/losses.py": [
        (
            "h1: weights of the slopes",
            "both = torch.cat([f * root, §gamma**0.5§ * slopes], dim=2)",
            "gamma",
            "test_losses.py -k h1",
        ),
        (
            "h1: slopes of the wrong side",
            "left, right = §after§ / (before * (before + after))",
            "before",
            "test_losses.py -k differences",
        ),
    ],
    "continuum_ops/training/normalizers.py": [
        (
            "normalizer: left end of a cell",
            "weight = weight * (fraction if §end§ else 1 - fraction)",
            "not end",
            "test_normalizers.py -k interpolation",
        ),
    ],
}
