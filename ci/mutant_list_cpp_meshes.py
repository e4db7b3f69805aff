"""Mutants of patch, position and Galerkin attention in C++, as in mutant_list_cpp.py."""

PATCH = "test_patch_attention.py -k '{}'"
PATCH_EDGE = "test_patch_attention_edge.py -k '{}'"
POSITION = "test_position_attention.py -k 'kernel and ({})'"
TRANSFORM = "test_position_transform.py -k '{}'"
GALERKIN = "test_galerkin_attention.py -k 'values or expanded or equal_weights'"
FOURIER = "test_fourier_patch_attention.py -k 'instruction_set or definition or gradients'"

MESHES = {
    "csrc/patch_attention_kernel.cpp": [
        (
            "patch: hidden points are read",
            "w = weights[weight_point[x]];\n      if (§w == T(0)§) {",
            "false",
            PATCH_EDGE.format("weight_zero"),
        ),
        (
            "patch: channels past the first piece",
            "from + o.point[x] + §at.c_begin * o.channel§;",
            "at.c_begin",
            PATCH_EDGE.format("stride"),
        ),
        (
            "patch: tiles of one height",
            "taller = tiles > 0 ? §rows % tiles§ : 0;",
            "0",
            PATCH.format("counts"),
        ),
        (
            "patch: sums of the last piece",
            "store(at, §add ? load(at) + acc[r][i] : acc[r][i]§);",
            "acc[r][i]",
            PATCH.format("feature or values or many"),
        ),
        (
            "patch: parts of the scores",
            "for (int64_t part = §1§; part < a.count; ++part) sum +=",
            "2",
            PATCH.format("values or many"),
        ),
        (
            "patch: lse without its maximum",
            "lse[row] = T(§double(largest)§ +",
            "0.0",
            PATCH.format("values"),
        ),
        (
            "patch: gradient of lse missing",
            "T(§(a.grad_lse ? double(static_cast<const T*>(a.grad_lse)[row]) : 0.0) - sum§);",
            "0.0 - sum",
            PATCH.format("values"),
        ),
        (
            "patch: gradient without scale",
            "const T value = §T(a.scale)§ * (p[j]",
            "T(1)",
            PATCH.format("values"),
        ),
        (
            "patch: keys' gradient of the wrong sign",
            "gt[j * a.transposed_stride] = §value§;",
            "-value",
            PATCH.format("values"),
        ),
    ],
    "csrc/patch_attention_scores.h": [
        (
            "patch: spaced rows of the first tile",
            "const T* rows = §now.rows + r * SPACING§;",
            "now.rows",
            PATCH.format("values or many or feature"),
        ),
        (
            "patch: scores of the last columns",
            "else tile_of<T, 1, int(SPACING)>(height, rows, panel, depth, add, §to + r * a.padded + j§,",
            "to + r * a.padded",
            PATCH.format("counts"),
        ),
        (
            "patch: the next piece packed over this one",
            "p.panels = §p.panels == panels[0] ? panels[1] : panels[0]§;\n    if ((p.block",
            "panels[0]",
            PATCH.format("feature or values or many"),
        ),
        (
            "patch: half of a panel of scores",
            "if (§now.columns - j > L§) tile_of<T, 2, int(SPACING)>",
            "now.columns - j > 2 * L",
            PATCH.format("values or many"),
        ),
        (
            "patch: NaN seen where the weight is 0",
            "if (§!w || w[a.weights.point[x]] != T(0)§) c[",
            "true",
            PATCH_EDGE.format("key_is_seen"),
        ),
    ],
    "csrc/patch_attention_mix.h": [
        (
            "patch: keys' gradient of the last block",
            "narrow(§T(widen(point[c])) + from[c] * w§, point + c);",
            "from[c] * w",
            PATCH.format("several"),
        ),
        (
            "patch: weight of the queries' gradient",
            "load_unaligned(from + c) * §factor§);",
            "broadcast(T(1))",
            PATCH.format("values or feature"),
        ),
        (
            "patch: weights' gradient of the wrong sign",
            "sum[x - at.x_begin] += §dot§;",
            "-dot",
            PATCH.format("values"),
        ),
        (
            "patch: mixture of the last columns",
            "r * MIX_SPACING, panel, depth, now.begin > 0, §to + j§, width, pace);\n        to +=",
            "to",
            PATCH.format("values or feature"),
        ),
        (
            "patch: spaced rows of the first keys",
            "row_begin * a.depth + §now.begin§;",
            "0",
            PATCH.format("many or several or feature") + " test_patch_attention_edge.py",
        ),
        (
            "patch: streamed points of the first channels",
            "stream(point + c, §load_unaligned(from)§);",
            "load_unaligned(from - c)",
            PATCH.format("larger"),
        ),
        (
            "patch: weights' gradient of the first points",
            "weights_sum + k * points + §done.x_begin - point_begin§);",
            "0",
            PATCH.format("values or larger"),
        ),
        (
            "patch: half of a panel of the mixture",
            "if (§columns - j > L§) tile_of<T, 2, int(MIX_SPACING)>",
            "columns - j > 2 * L",
            PATCH.format("values or feature"),
        ),
    ],
    "csrc/patch_attention.cpp": [
        (
            "patch: shared weights of the next sample",
            "operand.batch = §sizes[0] == 1 ? 0 : strides[0]§;",
            "strides[0]",
            PATCH.format("values or drawn"),
        ),
    ],
    "csrc/position_attention_forward.h": [
        (
            "position: no radius",
            "if constexpr (REACH) e = §x > end[v] ? Vec<T>{} : e§;",
            "e",
            POSITION.format("many or drawn or random"),
        ),
        (
            "position: log weights subtracted",
            "fma(apart, f, §broadcast(bias[j])§) - less[v]",
            "broadcast(-bias[j])",
            POSITION.format("softplus or odd or dimensions"),
        ),
        (
            "position: tiles skipped that count",
            "a.rate[h] * LOG2E * (s.box[t] - far) > §margin§ &&",
            "margin - 25",
            "test_position_attention_edge.py -k 'kernel and far_tile'",
        ),
        (
            "position: lse of the nearest key",
            "T(§log2_sum * 0.69314718055994530942 - a.rate[h] * double(s.nearest[i])§);",
            "log2_sum * 0.69314718055994530942",
            POSITION.format("odd or dimensions"),
        ),
        (
            "position: values of the first head",
            "(a.value_heads > 1 ? §h§ * g.key.count * padded : 0);",
            "0",
            POSITION.format("shares or odd"),
        ),
    ],
    "csrc/position_attention_tiles.h": [
        (
            "position: products at the wrong stride",
            "T* t = to + §(i + r) * C * L§ + c * L;",
            "i * C * L",
            POSITION.format("odd or channels"),
        ),
        (
            "position: boxes across the period",
            "__builtin_floor(§apart / length + 0.5§));",
            "apart / length",
            POSITION.format("many or dimensions or random") + " test_position_attention_edge.py",
        ),
        (
            "position: boxes nearer than they are",
            "right = q[t] - §p[a.d + t]§;",
            "p[t]",
            POSITION.format("many"),
        ),
        (
            "position: no period",
            "const Vec<T> near = §fma(images, broadcast(axis.minus_length), s)§;",
            "s",
            POSITION.format("dimensions or offset or far"),
        ),
        (
            "position: low parts of coordinates",
            "if constexpr (!PERIODIC) return SPLIT ? §s + (xl - yl)§ : s;",
            "s",
            POSITION.format("float64_positions or cancel or origin"),
        ),
        (
            "position: low parts of periodic coordinates",
            "broadcast(axis.minus_length_remainder), §lost + (xl - yl)§);",
            "lost",
            POSITION.format("float64_positions or origin"),
        ),
        (
            "position: stride of the channels ignored",
            "at[c] = widen(from[c * §o.column§]);",
            "1",
            "test_position_attention_edge.py -k 'kernel and strided'",
        ),
        (
            "position: largest exponent beyond the radius",
            "most = §(e > most) & (x <= end) ? e : most§;",
            "(e > most) ? e : most",
            "test_position_attention_edge.py -k kernel",
        ),
    ],
    "csrc/position_attention_backward.h": [
        (
            "position: product of the last columns",
            "store(t, §add ? load(t) + acc[r][c] : acc[r][c]§);",
            "acc[r][c]",
            POSITION.format("columns or channels"),
        ),
        (
            "position: delta missing",
            "Vec<T> ds = e * §(load(dot + at) - row)§;",
            "load(dot + at)",
            POSITION.format("odd"),
        ),
        (
            "position: gradient of the rate",
            "out.grad_rate[h] -= §of_rate§;",
            "-of_rate",
            POSITION.format("odd or rates"),
        ),
        (
            "position: moments of the last head",
            "store(moment + at, §first ? m : load(moment + at) + m§);",
            "m",
            POSITION.format("odd or shares"),
        ),
        ("position: keys move with the queries", "broadcast(T(§-2§))", "2", POSITION.format("odd")),
        (
            "position: factor 2 of the queries",
            "query[t * DT + j] = §2 * sum§;",
            "sum",
            POSITION.format("odd"),
        ),
        (
            "position: weights of the first block",
            "static_cast<const T*>(g.bias)[§k.first + i§]",
            "i",
            POSITION.format("many or softplus"),
        ),
        (
            "position: values' gradient of one head",
            "value_head = §a.value_heads > 1 ? h : 0§;",
            "int64_t(0)",
            POSITION.format("shares"),
        ),
        (
            "position: share of far tiles",
            "(box - §g.tile_far[tile]§);",
            "0.0",
            POSITION.format("many or near or uneven") + " test_position_attention_edge.py",
        ),
    ],
    "csrc/position_attention.cpp": [
        (
            "position: gradient of the logarithm",
            "row[k] == T(0) ? T(0) : §at[i * a.m + k] / row[k]§;",
            "at[i * a.m + k]",
            POSITION.format("odd or softplus"),
        ),
        (
            "position: refused rows forgotten",
            "§any = any || !refused[i].empty()§;",
            "any = false",
            TRANSFORM.format("refused"),
        ),
        (
            "position: refused rows of every head",
            "skipped[head] = §0§;",
            "1",
            TRANSFORM.format("refused"),
        ),
        (
            "position: gradients of refused rows written over",
            "to.value[i] += §value[i]§;",
            "0",
            TRANSFORM.format("refused"),
        ),
        (
            "position: gradient of lse of the first head",
            "in.grad_lse ? in.grad_lse + §(i * a.heads + head) * a.n§ : nullptr;",
            "i * a.heads * a.n",
            TRANSFORM.format("rates or arguments"),
        ),
    ],
    "csrc/position_backward_run.h": [
        (
            "position: gradient of lse of the wrong sign",
            "delta_[to] = §-grad_lse[from]§;",
            "grad_lse[from]",
            POSITION.format("odd"),
        ),
    ],
    "csrc/position_transform_plan.h": [
        (
            "through a grid: few points also where asked for",
            "return std::min(queries, keys) < §(use_of_grids() == Grids::when_possible ? 1 : FEW)§;",
            "FEW",
            TRANSFORM.format("budget or rates or chosen"),
        ),
        (
            "through a grid: nodes too far apart",
            "const double root = §std::sqrt(rate)§,",
            "0.5 * std::sqrt(rate)",
            TRANSFORM.format("budget or rates or chosen"),
        ),
        (
            "through a grid: kink of the period ignored",
            "if (§half < farthest§) plan.antipode",
            "false",
            TRANSFORM.format("antipode"),
        ),
        (
            "through a grid: weights beyond float32",
            "if (§g.min_bias < FARTHEST_BIAS§) return plan;",
            "false",
            TRANSFORM.format("graded"),
        ),
    ],
    "csrc/position_transform.cpp": [
        (
            "through a grid: rows that cancel kept",
            "size[i] <= §MOST_ERROR§ * total_[i]);",
            "1e30",
            TRANSFORM.format("refused or light"),
        ),
        (
            "through a grid: mass of the keys forgotten",
            "§key_.s.mass = key_.mass.get()§;",
            "key_.s.mass = nullptr",
            TRANSFORM.format("dimensions"),
        ),
        (
            "through a grid: matrix not transposed on the way back",
            "to_query ? keys : §1§, to_query ? 1 : keys, from, out);",
            "keys",
            TRANSFORM.format("dimensions or arguments"),
        ),
        (
            "through a grid: slope of the wrong sign",
            "push_back(§-2§ * rate_ * z * e);",
            "2",
            TRANSFORM.format("dimensions"),
        ),
        (
            "through a grid: lse without the weights' scale",
            "float(std::log(total_[i]) + §log_max_weight_§);",
            "0",
            TRANSFORM.format("dimensions"),
        ),
        (
            "through a grid: record relative to nothing",
            "total_[i] * §std::exp(rate_ * double(nearest[place]))§);",
            "1",
            TRANSFORM.format("record"),
        ),
        (
            "through a grid: delta of the rate",
            "§rate += dot_of(of_query.get(), result.get(), query_.s.all_nodes())§;",
            "rate += 0",
            TRANSFORM.format("dimensions"),
        ),
        (
            "through a grid: keys move with the queries",
            "key_.place[i] * d + t] -= §double(mass[i])§ * (key",
            "-double(mass[i])",
            TRANSFORM.format("dimensions"),
        ),
        (
            "through a grid: refused rows counted twice",
            "inverse[i] = §refused_[query_.place[i]]§ ? 0.0f",
            "false",
            TRANSFORM.format("refused"),
        ),
        (
            "through a grid: centre of the values forgotten",
            "centre_[begin + c] = float(§sum[c] / double(taken)§);",
            "1e4",
            TRANSFORM.format("dimensions or budget"),
        ),
    ],
    "csrc/position_transform_kernel.cpp": [
        (
            "through a grid: nodes of another cell",
            "const int64_t row = ((x * s.points[0] + a) * s.nodes(1) + §y * s.points[1]§ + b)",
            "0",
            TRANSFORM.format("dimensions or rates"),
        ),
        (
            "through a grid: tiles of points written over",
            "§to[l] += double(acc[r][v][l])§;",
            "to[l] = double(acc[r][v][l])",
            TRANSFORM.format("dimensions or rates"),
        ),
        (
            "through a grid: residual's constant dropped",
            "row[c] = float(§constant[c] + double(row[c]) * inverse§);",
            "double(row[c]) * inverse",
            TRANSFORM.format("dimensions"),
        ),
        (
            "through a grid: last nodes of a cell written over",
            "store(to, §add ? load(to) + acc[r][v] : acc[r][v]§);",
            "acc[r][v]",
            TRANSFORM.format("dimensions"),
        ),
        (
            "through a grid: stride of the channels ignored",
            "to[c + j] = widen(from[j * §f.column§]);",
            "1",
            TRANSFORM.format("strided"),
        ),
        (
            "through a grid: a number that is not finite goes unseen",
            "special |= §word == exponent ? ~0u : 0u§;",
            "0",
            TRANSFORM.format("finite"),
        ),
    ],
    "csrc/galerkin_attention_kernel.cpp": [
        ("galerkin: weight of the values dropped", "to[j] = row[j] * §f§;", "T(1)", GALERKIN),
        ("galerkin: strides ignored", "row[j * §from.column_stride§]", "1", GALERKIN),
        (
            "galerkin: rows past the last one",
            "to[r] = c + (§i + r < rows ? i + r : rows - 1§) * width + j;",
            "i + r < rows ? i + r : i",
            GALERKIN,
        ),
        (
            "galerkin: weights default to 1",
            "[k * x.weights_stride] : §T(1) / T(p.m)§;",
            "T(1)",
            GALERKIN,
        ),
    ],
    "csrc/patch_dft_kernel.cpp": [
        (
            "transform: sign of the sines",
            "product<T, 2>({{cos, im}, {§minus_sin§, re}}, rows, depth, rest, 2 * rest",
            "sin",
            FOURIER,
        ),
        (
            "transform: patches at the wrong stride",
            "origin += rest % p.patches[i] * p.points[i] * §stride[i]§;",
            "p.channels",
            FOURIER,
        ),
        (
            "transform: last row of a table",
            "tile<T, TERMS, 1, C>(from(r), depth, ldb, §out + r * ldo§, ldo);",
            "out",
            FOURIER,
        ),
    ],
}
