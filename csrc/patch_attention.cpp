// patch_attention on CPU tensors: checks, allocation, and the split into tasks. The arithmetic is in patch_attention_kernel.cpp;
// schemas are defined in continuum_ops/ops/_library.py.
#include "patch_attention.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu_isa.h"
#include "parallel.h"
#include "position_groups.h"  // Buffer
#include "tensors.h"

namespace continuum_ops {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

DType query_dtype(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::float32;
    case ScalarType::Double: return DType::float64;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Half: return DType::float16;
    default: throw std::invalid_argument("query must be float64, float32, bfloat16 or float16");
  }
}

// A tensor (B, *grid, H, C), or weights (W, *grid), by patches.
class Patched {
 public:
  PatchOperand operand;
  int64_t patches = 1, points = 1;

  Patched() = default;
  Patched(const Tensor& t, void* data, const std::vector<int64_t>& size, bool weights = false) {
    const auto sizes = t.sizes(), strides = t.strides();
    const int64_t axes = int64_t(size.size());
    for (int64_t i = 0; i < axes; ++i) patches *= sizes[1 + i] / size[i], points *= size[i];
    offsets_.resize(size_t(points + patches));
    int64_t *const point = offsets_.data(), *const patch = point + points;
    for (int64_t i = 0, point_count = 1, patch_count = 1; i < axes; ++i) {
      const int64_t stride = strides[1 + i];
      point_count = repeat_offsets(point, point_count, size[i], stride);
      if (patches > 0) patch_count = repeat_offsets(patch, patch_count, sizes[1 + i] / size[i], stride * size[i]);
    }
    operand.data = data;
    operand.batch = sizes[0] == 1 ? 0 : strides[0];
    if (!weights) operand.head = strides[1 + axes], operand.channel = strides[2 + axes], operand.channels = sizes[2 + axes];
    operand.patch = patch, operand.point = point;
  }
  Patched(const Tensor& t, const std::vector<int64_t>& size, bool weights = false)
      : Patched(t, const_cast<void*>(t.const_data_ptr()), size, weights) {}
  Patched(const Patched&) = delete;
  Patched& operator=(const Patched&) = delete;

 private:
  std::vector<int64_t> offsets_;  // of the points of a patch, then of the patches
};

struct Arguments {
  const Tensor &query, &key, &value;
  const std::optional<Tensor>& weights;
  const std::vector<int64_t>& patch_size;
  std::optional<double> scale;
};

void check(const Arguments& x) {
  const int64_t axes = int64_t(x.patch_size.size());
  const size_t dims = size_t(axes + 3);
  const auto query = x.query.sizes(), key = x.key.sizes(), value = x.value.sizes();
  STD_TORCH_CHECK(axes >= 1 && query.size() == dims && key.size() == dims && value.size() == dims,
                  "query, key, value: (B, *grid, H, channels) with an axis for each patch size");
  const ScalarType type = x.query.scalar_type(), acc = type == ScalarType::Double ? type : ScalarType::Float;
  STD_TORCH_CHECK(x.key.scalar_type() == type && x.value.scalar_type() == type, "query, key, value: one dtype");
  for (const auto& t : {key, value}) {
    STD_TORCH_CHECK(t[0] == query[0] && t[axes + 1] == query[axes + 1], "batch and heads: those of query");
  }
  STD_TORCH_CHECK(key[axes + 2] == query[axes + 2], "key: as many channels as query");
  for (int64_t i = 0; i < axes; ++i) {
    const int64_t size = x.patch_size[i];
    STD_TORCH_CHECK(size >= 1 && query[1 + i] % size == 0 && key[1 + i] % size == 0 && value[1 + i] == key[1 + i],
                    "patch_size: divides both grids");
  }
  if (!x.weights) return;
  STD_TORCH_CHECK(x.weights->dim() == axes + 1 && x.weights->scalar_type() == acc &&
                  (x.weights->size(0) == 1 || x.weights->size(0) == query[0]), "weights: (W, *grid) in the accumulation dtype, W = 1 or B");
  for (int64_t i = 0; i < axes; ++i) STD_TORCH_CHECK(x.weights->size(1 + i) == query[1 + i], "weights: query's grid");
}

// What forward and backward share: operands, sizes, and how the work is cut. No cut of a sum depends on the number of threads.
template <class T> class Problem {
 public:
  const Arguments& x;
  const DType dtype;
  const ScalarType acc = sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
  const int64_t batch, heads;
  const Patched query, key, value;
  const std::unique_ptr<Patched> weights;
  const int64_t rows, keys, points, padded;
  const double scale;
  bool hide = false;
  int64_t samples, block;  // that are worked on together: samples, and rows of scores of each
  const PatchAttentionKernels& kernels = patch_attention_kernels();

  explicit Problem(const Arguments& a)
      : x((check(a), a)), dtype(query_dtype(a.query)), batch(a.query.size(0)), heads(a.query.size(a.query.dim() - 2)),
        query(a.query, a.patch_size), key(a.key, a.patch_size), value(a.value, a.patch_size),
        weights(a.weights ? std::make_unique<Patched>(*a.weights, a.patch_size, true) : nullptr), rows(query.patches), keys(key.patches),
        points(query.points), padded(patch_attention_kernels().padded(dtype, key.patches)),
        scale(a.scale.value_or(1.0 / double(std::max<int64_t>(rows * points, 1)))) {
    if (weights) look_at_weights();
    limit_ = std::max<int64_t>(int64_t(1) << 22, batch * rows * points * heads * query.operand.channels / 4);
    const int64_t sample = std::max<int64_t>(heads * rows * padded, 1);
    samples = std::max<int64_t>(1, std::min(batch, limit_ / sample));
    block = sample <= limit_ ? rows : std::max<int64_t>(1, limit_ / (heads * padded));
    if (block > ROW_BLOCK && block < rows) block = block / ROW_BLOCK * ROW_BLOCK;
  }

  int64_t numel() const { return batch * heads * rows * keys; }
  bool kept() const { return numel() <= batch * rows * points * heads * query.operand.channels; }
  double work(int64_t sample_count, int64_t row_count, int64_t channels) const {
    return double(sample_count) * heads * row_count * keys * points * channels;
  }

  // Parts of the scores of samples [s, s + count) and rows [p, p_end): (part, sample, head, row, padded).
  struct Parts {
    Buffer<T> data;
    int64_t count = 0, stride = 0;
  };
  Parts scores(const PatchOperand& row, const PatchOperand& column, const Patched* w, int64_t s, int64_t s_end, int64_t p, int64_t p_end) const {
    PatchScores a{dtype, keys, padded, points, row, column, w ? w->operand : PatchOperand{}, w && hide};
    const int64_t samples_now = s_end - s, rows_now = p_end - p, step = kernels.chunk_points(row.channels), chunks = ceil_div(points, step);
    const int64_t row_blocks = ceil_div(rows_now, ROW_BLOCK), groups = std::min<int64_t>(heads, HEAD_GROUPS), head = rows_now * padded;
    const int64_t elements = std::max<int64_t>(samples_now * heads * head, 1);
    const int64_t wanted = ceil_div(TASKS, std::max<int64_t>(samples_now * row_blocks * groups, 1));
    const int64_t count = std::max<int64_t>(1, std::min({wanted, chunks, limit_ / elements}));
    Parts parts{Buffer<T>(count * elements), count, elements};
    run_tasks(samples_now * row_blocks * count * groups, work(samples_now, rows_now, row.channels), kernels.scores_scratch(dtype),
              [&](int64_t t, void* scratch) {
      const int64_t group = t % groups, rb = t / groups % row_blocks, part = t / groups / row_blocks % count, i = t / groups / row_blocks / count;
      const int64_t begin = rb * ROW_BLOCK, end = std::min(begin + ROW_BLOCK, rows_now);
      const int64_t first = chunks * part / count * step, last = std::min(chunks * (part + 1) / count * step, points);
      T* c = parts.data.get() + part * elements + i * heads * head + begin * padded;
      const PatchPart now{heads * group / groups, heads * (group + 1) / groups, p + begin, p + end, first, last, head};
      kernels.scores(a, s + i, now, c, scratch);
    });
    return parts;
  }

  // p (sample, head, row, keys), head_stride apart; lse of sample and head, query patches apart
  void softmax(const Parts& parts, int64_t s, int64_t s_end, int64_t p, int64_t p_end, T* to, int64_t head_stride, T* lse) const {
    const int64_t rows_now = p_end - p, all = (s_end - s) * heads;
    run_tasks(all, 20.0 * all * rows_now * padded, 0, [&](int64_t t, void*) {
      PatchRows a{};
      a.keys = keys, a.padded = padded, a.count = parts.count, a.part_stride = parts.stride, a.scale = scale;
      a.parts = parts.data.get() + t * rows_now * padded;
      a.p = to + t * head_stride;
      a.lse = lse ? lse + (s * heads + t) * rows + p : nullptr;
      kernels.softmax(dtype, a, 0, rows_now);
    });
  }

  // Rows [0, row_count) of a.matrix, which are the patches row_offset + row of a.to, for the samples [s, s_end).
  void mix(PatchMix a, int64_t s, int64_t s_end, int64_t row_offset, int64_t row_count) const {
    a.dtype = dtype, a.points = points, a.heads = heads, a.first = s;
    const int64_t chunks = ceil_div(points, kernels.chunk_points(a.from.channels)), blocks = ceil_div(row_count, ROW_BLOCK);
    // Longer runs read the matrix less often. No sum goes across points: results do not depend on their length.
    const int64_t enough = 8 * int64_t(torch::stable::get_num_threads());
    const int64_t run = std::max<int64_t>(1, std::min(MIX_RUN, (s_end - s) * blocks * chunks / enough));
    const int64_t step = run * kernels.chunk_points(a.from.channels), runs = ceil_div(points, step);
    const double size = a.wide ? sizeof(T) : double(element_size(x.query.scalar_type()));
    a.stream = !a.add && double(s_end - s) * heads * row_count * points * a.from.channels * size >= STREAM;
    run_tasks((s_end - s) * blocks * runs, double(s_end - s) * heads * row_count * a.depth * points * a.from.channels,
              kernels.mix_scratch(dtype), [&](int64_t t, void* scratch) {
      const int64_t at = t % runs * step, begin = t / runs % blocks * ROW_BLOCK, i = t / runs / blocks;
      kernels.mix(a, s + i, row_offset, begin, std::min(begin + ROW_BLOCK, row_count), at, std::min(at + step, points), scratch);
    });
  }

  template <class F> void for_blocks(F f) const {
    for (int64_t s = 0; s < batch; s += samples) {
      for (int64_t p = 0; p < rows; p += block) f(s, std::min(s + samples, batch), p, std::min(p + block, rows));
    }
  }

 private:
  static constexpr int64_t TASKS = 16, HEAD_GROUPS = 4;
  static constexpr double STREAM = 1 << 24;  // bytes of an output that is written past the caches
  int64_t limit_;

  void look_at_weights() {
    const PatchOperand& w = weights->operand;
    for (int64_t b = 0; b < x.weights->size(0); ++b) {
      for (int64_t p = 0; p < rows; ++p) {
        const T* from = static_cast<const T*>(w.data) + b * w.batch + w.patch[p];
        for (int64_t i = 0; i < points; ++i) {
          const T value = from[w.point[i]];
          if (!(value >= T(0) && value <= std::numeric_limits<T>::max())) {
            throw std::invalid_argument("patch_attention: weights must be >= 0 and finite, got " + std::to_string(value));
          }
          hide |= value == T(0);
        }
      }
    }
  }
};

// Makes lse and probabilities where they are wanted.
template <class T> Tensor forward(const Arguments& x, std::optional<Tensor>* lse, std::optional<Tensor>* probabilities) {
  const Problem<T> a(x);
  std::vector<int64_t> shape = sizes_of(x.query);
  shape.back() = a.value.operand.channels;
  Tensor out = new_tensor(shape, x.query.scalar_type());
  if (lse) *lse = new_tensor({a.batch, a.heads, a.rows}, a.acc);
  if (probabilities) {
    shape = a.kept() ? std::vector<int64_t>{a.batch, a.heads, a.rows, a.keys} : std::vector<int64_t>{0};
    *probabilities = new_tensor(shape, a.acc);
  }
  const Patched to(out, out.mutable_data_ptr(), x.patch_size);
  T* to_lse = lse ? static_cast<T*>((*lse)->mutable_data_ptr()) : nullptr;
  T* kept = probabilities && a.kept() ? static_cast<T*>((*probabilities)->mutable_data_ptr()) : nullptr;
  a.for_blocks([&](int64_t s, int64_t s_end, int64_t p, int64_t p_end) {
    const int64_t rows = p_end - p;
    const auto parts = a.scores(a.query.operand, a.key.operand, a.weights.get(), s, s_end, p, p_end);
    const Buffer<T> own(kept ? 0 : (s_end - s) * a.heads * rows * a.keys);
    PatchMix m{};
    m.head_stride = (kept ? a.rows : rows) * a.keys;
    T* matrix = kept ? kept + s * a.heads * m.head_stride + p * a.keys : own.get();
    a.softmax(parts, s, s_end, p, p_end, matrix, m.head_stride, to_lse);
    m.depth = a.keys, m.matrix = matrix, m.from = a.value.operand, m.to = to.operand;
    a.mix(m, s, s_end, p, rows);
  });
  return out;
}

template <class T>
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Arguments& x,
                                                    const std::optional<Tensor>& probabilities, const std::vector<bool>& needs) {
  const Problem<T> a(x);
  const bool given = probabilities && a.kept();  // else computed again
  STD_TORCH_CHECK(needs.size() == 4, "needs: one for each of query, key, value, weights");
  std::vector<int64_t> sizes = sizes_of(x.query);
  sizes.back() = a.value.operand.channels;
  check_is(grad_out, x.query.scalar_type(), sizes, "grad_out: of out's dtype and sizes");
  if (grad_lse) check_is(*grad_lse, a.acc, {a.batch, a.heads, a.rows}, "grad_lse: of lse's dtype and sizes");
  STD_TORCH_CHECK(!probabilities || (probabilities->is_contiguous() && probabilities->scalar_type() == a.acc &&
                  probabilities->numel() == (given ? a.numel() : 0)), "probabilities: as the forward op returned them");
  const bool weights_grad = needs[3] && a.weights, scores = needs[0] || needs[1] || weights_grad;
  std::optional<Tensor> lse_rows;
  if (grad_lse) lse_rows = torch::stable::contiguous(*grad_lse);
  const T* lse = lse_rows ? static_cast<const T*>(lse_rows->const_data_ptr()) : nullptr;
  const Patched grad(grad_out, x.patch_size);
  const bool several = a.block < a.rows, nothing = a.rows == 0 || a.keys == 0;
  auto none = [&] { return new_tensor({0}, x.query.scalar_type()); };  // outputs must not share memory
  // Sums over several blocks of queries are collected in the accumulation type.
  auto make = [&](bool need, const Tensor& like, ScalarType type) {
    if (!need) return none();
    return nothing ? torch::stable::new_zeros(x.query, sizes_of(like), type) : new_tensor(sizes_of(like), type);
  };
  const ScalarType type = x.query.scalar_type(), sums = several ? a.acc : type;
  Tensor grad_query = make(needs[0] || weights_grad, x.query, type);
  Tensor grad_key = make(needs[1], x.key, sums), grad_value = make(needs[2], x.value, sums);
  std::vector<int64_t> weights_shape = weights_grad ? sizes_of(*x.weights) : std::vector<int64_t>{0};
  if (weights_grad) weights_shape[0] = a.batch;
  Tensor grad_weights = weights_grad ? torch::stable::new_zeros(x.query, weights_shape, a.acc) : none();
  auto target = [&](Tensor& t) { return std::make_unique<Patched>(t, t.mutable_data_ptr(), x.patch_size); };
  const auto to_query = needs[0] || weights_grad ? target(grad_query) : nullptr;
  const auto to_key = needs[1] ? target(grad_key) : nullptr, to_value = needs[2] ? target(grad_value) : nullptr;
  const auto to_weights = weights_grad ? std::make_unique<Patched>(grad_weights, grad_weights.mutable_data_ptr(), x.patch_size, true) : nullptr;

  if (!nothing && (scores || needs[2])) a.for_blocks([&](int64_t s, int64_t s_end, int64_t p, int64_t p_end) {
    const int64_t rows = p_end - p, samples = s_end - s, matrix = rows * a.keys, all = samples * a.heads;
    const Buffer<T> own(given ? 0 : all * matrix), grad_s(all * matrix), grad_t(all * matrix), p_t(all * matrix);
    const int64_t p_stride = (given ? a.rows : rows) * a.keys;
    T* probability = own.get();
    if (given) {
      probability = static_cast<T*>(const_cast<void*>(probabilities->const_data_ptr())) + s * a.heads * p_stride + p * a.keys;
    } else {
      const auto parts = a.scores(a.query.operand, a.key.operand, a.weights.get(), s, s_end, p, p_end);
      a.softmax(parts, s, s_end, p, p_end, probability, p_stride, nullptr);
    }
    {
      const auto parts = a.scores(grad.operand, a.value.operand, nullptr, s, s_end, p, p_end);
      run_tasks(all, 20.0 * all * matrix, 0, [&](int64_t t, void*) {
        PatchRows r{};
        r.keys = a.keys, r.padded = a.padded, r.count = parts.count, r.part_stride = parts.stride, r.scale = a.scale;
        r.parts = parts.data.get() + t * rows * a.padded;
        r.p = probability + t * p_stride;
        r.grad_lse = lse ? lse + (s * a.heads + t) * a.rows + p : nullptr;
        r.grad = grad_s.get() + t * matrix, r.grad_transposed = grad_t.get() + t * matrix, r.p_transposed = p_t.get() + t * matrix;
        r.transposed_stride = rows;
        a.kernels.softmax_backward(a.dtype, r, 0, rows);
      });
    }
    PatchMix m{};
    m.head_stride = matrix;
    auto rows_of_block = [&](PatchOperand o) {
      o.patch += p;
      return o;
    };
    if (to_query) {
      PatchMix q = m;
      q.depth = a.keys, q.matrix = grad_s.get(), q.from = a.key.operand, q.to = to_query->operand, q.hide = a.hide;
      if (a.weights) q.to_weights = a.weights->operand;
      if (to_weights) q.query = a.query.operand, q.weights_gradient = to_weights->operand;
      a.mix(q, s, s_end, p, rows);
    }
    m.depth = rows, m.wide = several, m.add = p > 0;
    if (to_key) {
      PatchMix k = m;
      k.matrix = grad_t.get(), k.from = rows_of_block(a.query.operand), k.to = to_key->operand;
      if (a.weights) k.from_weights = rows_of_block(a.weights->operand);
      a.mix(k, s, s_end, 0, a.keys);
    }
    if (to_value) {
      PatchMix v = m;
      v.matrix = p_t.get(), v.from = rows_of_block(grad.operand), v.to = to_value->operand;
      a.mix(v, s, s_end, 0, a.keys);
    }
  });
  if (sums != type) {
    if (needs[1]) grad_key = converted(grad_key, type);
    if (needs[2]) grad_value = converted(grad_value, type);
  }
  if (!needs[0] && weights_grad) grad_query = none();
  if (weights_grad && x.weights->size(0) != a.batch) {
    Tensor sum = torch::stable::new_zeros(x.query, sizes_of(*x.weights), a.acc);
    T* to = static_cast<T*>(sum.mutable_data_ptr());
    const T* from = static_cast<const T*>(grad_weights.const_data_ptr());
    const int64_t count = sum.numel();
    for (int64_t b = 0; b < a.batch; ++b) {
      for (int64_t i = 0; i < count; ++i) to[i] += from[b * count + i];
    }
    grad_weights = sum;
  }
  return {grad_query, grad_key, grad_value, grad_weights};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Tensor forward_any(const Arguments& x, std::optional<Tensor>* lse, std::optional<Tensor>* probabilities) {
  return x.query.scalar_type() == ScalarType::Double ? forward<double>(x, lse, probabilities) : forward<float>(x, lse, probabilities);
}

Gradients backward_any(const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Arguments& x,
                       const std::optional<Tensor>& probabilities, const std::vector<bool>& needs) {
  return x.query.scalar_type() == ScalarType::Double ? backward<double>(grad_out, grad_lse, x, probabilities, needs)
                                                     : backward<float>(grad_out, grad_lse, x, probabilities, needs);
}

std::tuple<Tensor, Tensor, Tensor> forward_op(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> weights,
                                              std::vector<int64_t> patch_size, std::optional<double> scale) {
  std::optional<Tensor> lse, probabilities;
  Tensor out = forward_any({query, key, value, weights, patch_size, scale}, &lse, &probabilities);
  return {out, *lse, *probabilities};
}

Gradients backward_op(const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
                      std::optional<Tensor> weights, const Tensor& /*lse*/, const Tensor& probabilities, std::vector<int64_t> patch_size,
                      std::optional<double> scale, std::vector<bool> needs) {
  return backward_any(grad_out, grad_lse, {query, key, value, weights, patch_size, scale}, probabilities, needs);
}

// As users pass them: weights may lack the batch and axes of the grid, size is that of all axes but those that have one of their own,
// and with weights no scale is 1.
struct Plain {
  std::optional<Tensor> weights;
  std::vector<int64_t> patch_size;
  Arguments x;

  Plain(const Tensor& query, const Tensor& key, const Tensor& value, int64_t size, std::optional<Tensor> w, std::optional<double> scale,
        int64_t second, int64_t third)
      : weights(std::move(w)), x{query, key, value, weights, patch_size, scale || !weights ? scale : 1.0} {
    const int64_t axes = query.dim() - 3;
    STD_TORCH_CHECK(axes >= 1 && axes <= 3, "query: a grid of 1 to 3 axes");
    patch_size.assign(size_t(axes), size);
    if (axes > 1 && second > 0) patch_size[1] = second;
    if (axes > 2 && third > 0) patch_size[2] = third;
    if (!weights) return;
    const int64_t dims = weights->dim();
    STD_TORCH_CHECK(dims == axes || dims == axes + 1, "weights: (*grid) or (B, *grid)");
    std::vector<int64_t> sizes{dims == axes ? 1 : weights->size(0)};
    for (int64_t i = 1; i <= axes; ++i) sizes.push_back(query.size(i));
    weights = expanded(*weights, sizes);
  }
};

Tensor plain(const Tensor& query, const Tensor& key, const Tensor& value, int64_t size, std::optional<Tensor> weights,
             std::optional<double> scale, int64_t second, int64_t third) {
  return forward_any(Plain(query, key, value, size, weights, scale, second, third).x, nullptr, nullptr);
}

std::tuple<Tensor, Tensor> plain_forward(const Tensor& query, const Tensor& key, const Tensor& value, int64_t size,
                                         std::optional<Tensor> weights, std::optional<double> scale, int64_t second, int64_t third) {
  std::optional<Tensor> probabilities;
  Tensor out = forward_any(Plain(query, key, value, size, weights, scale, second, third).x, nullptr, &probabilities);
  return {out, *probabilities};
}

// The gradient of weights has the batch, of one if it was missing, and the grid.
Gradients plain_backward(const Tensor& grad_out, std::optional<Tensor> probabilities, std::vector<bool> needs, const Tensor& query,
                         const Tensor& key, const Tensor& value, int64_t size, std::optional<Tensor> weights, std::optional<double> scale,
                         int64_t second, int64_t third) {
  return backward_any(grad_out, std::nullopt, Plain(query, key, value, size, weights, scale, second, third).x, probabilities, needs);
}

}  // namespace
}  // namespace continuum_ops

STABLE_TORCH_LIBRARY_IMPL(continuum_ops, CPU, m) {
  m.impl("patch_attention_forward", TORCH_BOX(&continuum_ops::forward_op));
  m.impl("patch_attention_backward", TORCH_BOX(&continuum_ops::backward_op));
  m.impl("patch_attention_plain", TORCH_BOX(&continuum_ops::plain));
  m.impl("patch_attention_plain_forward", TORCH_BOX(&continuum_ops::plain_forward));
  m.impl("patch_attention_plain_backward", TORCH_BOX(&continuum_ops::plain_backward));
}
