// position_attention on CPU tensors: checks, allocation, and the split into tasks. The arithmetic is in
// position_attention_kernel.cpp; schemas are defined in continuum_ops/ops/_library.py.
#include "position_attention.h"

#include <optional>
#include <tuple>
#include <vector>

#include "cpu_isa.h"
#include "parallel.h"
#include "position_groups.h"
#include "tensors.h"

namespace continuum_ops {
namespace {

constexpr double LOG2E = 1.4426950408889634074;

DType value_dtype(const View& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::float32;
    case ScalarType::Double: return DType::float64;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Half: return DType::float16;
    default: throw std::invalid_argument("value must be float64, float32, bfloat16 or float16");
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

BatchedOperand batched(const View& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2), t.stride(3)}; }

PointRows point_rows(const View& t, int64_t sample) {
  const bool wide = t.scalar_type() == ScalarType::Double;
  const char* data = static_cast<const char*>(t.const_data_ptr());
  return {data + (t.size(0) > 1 ? sample * t.stride(0) : 0) * (wide ? 8 : 4), wide, t.size(1), t.size(2), t.stride(1), t.stride(2)};
}

template <class T> Row<T> row_of(const std::optional<View>& t, int64_t sample) {
  if (!t || t->size(1) == 0) return {};
  return {static_cast<const T*>(t->const_data_ptr()) + (t->size(0) > 1 ? sample * t->stride(0) : 0), t->stride(1)};
}

std::optional<View> view_of(const std::optional<Tensor>& t, int64_t one = -1) { return t ? std::optional(View(*t, one)) : std::nullopt; }

struct Arguments {
  View query_pos, key_pos, value, rate;
  std::optional<View> weights, radius;
  const std::vector<double>* period;
  const Tensor& like;
};

template <class T> class Problem {
 public:
  PositionProblem a{};
  int64_t batch, groups;
  ScalarType type = sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
  std::vector<GroupData<T>> data;
  const PositionAttentionKernels& kernels = position_attention_kernels();

  explicit Problem(const Arguments& x) {
    check(x);
    a.dtype = value_dtype(x.value);
    a.split = sizeof(T) == 4 && x.query_pos.scalar_type() == ScalarType::Double;
    batch = x.value.size(0), a.heads = x.rate.size(0), a.value_heads = x.value.size(1);
    a.n = x.query_pos.size(1), a.m = x.key_pos.size(1), a.d = x.query_pos.size(2), a.c = x.value.size(3);
    auto single = [](const View& t) { return t.size(0) == 1; };
    const bool shared = single(x.query_pos) && single(x.key_pos) && (!x.weights || single(*x.weights)) && (!x.radius || single(*x.radius));
    groups = shared ? 1 : batch;
    a.entries = shared ? batch : 1;
    a.value = batched(x.value);
    for (int64_t h = 0; h < a.heads; ++h) {
      const double r = static_cast<const T*>(x.rate.const_data_ptr())[h * x.rate.stride(0)];
      if (!(r >= 0 && r <= std::numeric_limits<double>::max())) refuse("rate must be >= 0 and finite", r, "head", h);
      rate_.push_back(r);
    }
    a.rate = rate_.data();
    if (x.period) {
      for (const double p : *x.period) {
        if (p < std::numeric_limits<double>::infinity()) a.period = x.period->data();
      }
    }
    build_groups(x);
  }

  double pairs() const {
    double sum = 0;
    for (const GroupData<T>& d : data) sum += double(a.n) * d.g.key.count;
    return sum * a.heads;
  }
  double work() const { return pairs() * (a.columns() + 16); }
  int64_t lane_blocks() const { return ceil_div(a.n, LANE_BLOCK); }
  int64_t row_elements() const { return kernels.padded_columns(a); }

 private:
  std::vector<double> rate_;

  void check(const Arguments& x) const {
    const ScalarType positions = x.query_pos.scalar_type();
    STD_TORCH_CHECK(x.query_pos.dim() == 3 && x.key_pos.dim() == 3 && x.value.dim() == 4 && x.rate.dim() == 1,
                    "query_pos: (P, N, d), key_pos: (P, M, d), value: (B, HV, M, C), rate: (H,)");
    const int64_t b = x.value.size(0), m = x.value.size(2);
    auto leads = [&](const View& t) { return t.size(0) == 1 || t.size(0) == b; };
    STD_TORCH_CHECK(leads(x.query_pos) && x.key_pos.size(0) == x.query_pos.size(0) && x.key_pos.size(2) == x.query_pos.size(2) &&
                    x.key_pos.size(1) == m, "query_pos: (P, N, d), key_pos: (P, M, d), P = 1 or B");
    STD_TORCH_CHECK(x.value.size(1) == 1 || x.value.size(1) == x.rate.size(0), "value: one head or as many as rate");
    STD_TORCH_CHECK(positions == x.key_pos.scalar_type() && (positions == ScalarType::Double || positions == type) &&
                    x.rate.scalar_type() == type, "positions: float64 or the accumulation dtype; rate: the accumulation dtype");
    STD_TORCH_CHECK(!x.weights || (x.weights->scalar_type() == type && x.weights->dim() == 2 && leads(*x.weights) &&
                                   x.weights->size(1) == m), "weights: (W, M) in the accumulation dtype, W = 1 or B");
    STD_TORCH_CHECK(!x.radius || (x.radius->scalar_type() == type && x.radius->dim() == 2 && leads(*x.radius) &&
                                  x.radius->size(1) == x.query_pos.size(1)), "radius: (R, N) in the accumulation dtype, R = 1 or B");
    STD_TORCH_CHECK(!x.period || int64_t(x.period->size()) == x.query_pos.size(2), "period: d numbers");
  }

  void build_groups(const Arguments& x) {
    const int64_t samples = std::min(x.query_pos.size(0), groups);
    std::vector<std::vector<int64_t>> query_order(samples), key_order(samples);
    run_tasks(2 * samples, double(samples) * (a.n + a.m) * 50, 0, [&](int64_t t, void*) {
      if (t % 2 == 0) query_order[t / 2] = visiting_order(point_rows(x.query_pos, t / 2));
      else key_order[t / 2] = visiting_order(point_rows(x.key_pos, t / 2));
    });
    data = std::vector<GroupData<T>>(groups);
    std::vector<std::string> wrong(groups);  // nothing may be thrown out of a task
    run_tasks(groups, double(groups) * (a.n + a.m) * 10, 0, [&](int64_t i, void*) {
      const int64_t sample = samples > 1 ? i : 0;
      data[i].g.first_entry = i;
      try {
        data[i].build(point_rows(x.query_pos, sample), query_order[sample], point_rows(x.key_pos, sample), key_order[sample],
                      row_of<T>(x.weights, i), row_of<T>(x.radius, i), a.split);
      } catch (const std::invalid_argument& error) {
        wrong[i] = error.what();
      }
    });
    for (const std::string& w : wrong) {
      if (!w.empty()) throw std::invalid_argument(w);
    }
  }
};

// Makes lse and stats where they are wanted.
template <class T> Tensor forward(const Arguments& x, std::optional<Tensor>* lse, std::optional<Tensor>* stats) {
  Problem<T> problem(x);
  const PositionProblem& a = problem.a;
  const PositionAttentionKernels& kernels = problem.kernels;
  Tensor out = new_tensor({problem.batch, a.heads, a.n, a.c}, x.value.scalar_type());
  if (lse) *lse = new_tensor({problem.groups, a.heads, a.n}, problem.type);
  if (stats) *stats = new_tensor({problem.groups, a.heads, a.n, 2}, problem.type);
  const PositionOutput o{out.mutable_data_ptr(), lse ? (*lse)->mutable_data_ptr() : nullptr,
                         stats ? (*stats)->mutable_data_ptr() : nullptr};
  const int64_t groups = problem.groups, padded = problem.row_elements(), panels = kernels.panels(a);

  // Values by panels: once for all heads that share them.
  const int64_t tiles = ceil_div(a.m, DEPTH_TILE), group_values = a.value_heads * a.m * padded;
  const Buffer<T> values(groups * group_values);
  const Buffer<uint8_t> special(groups * a.value_heads * tiles, 0), any(groups * tiles, 0);
  run_tasks(groups * a.value_heads * tiles, double(groups) * group_values, padded * sizeof(T), [&](int64_t t, void* scratch) {
    const int64_t tile = t % tiles, head = t / tiles % a.value_heads, i = t / tiles / a.value_heads;
    const PositionGroup& g = problem.data[i].g;
    const int64_t begin = tile * DEPTH_TILE, end = std::min(begin + DEPTH_TILE, g.key.count);
    if (begin >= end) return;
    special[t] = kernels.pack_panels(a, a.value, g.first_entry, head, g.key, begin, end,
                                     values.get() + i * group_values + head * g.key.count * padded, scratch);
  });
  for (int64_t t = 0; t < groups * a.value_heads * tiles; ++t) any[t / (a.value_heads * tiles) * tiles + t % tiles] |= special[t];
  size_t scratch_bytes = 0;
  const int64_t blocks = problem.lane_blocks(), threads = torch::stable::get_num_threads();
  // Wide chunks of columns amortise the probabilities, narrow ones give all threads something to do.
  const int64_t few = std::max<int64_t>(ceil_div(padded, 1024), 1);
  const int64_t wanted = threads == 1 ? few : std::max(few, ceil_div(4 * threads, std::max<int64_t>(groups * blocks, 1)));
  const int64_t chunk = std::max(std::min<int64_t>(panels, 4), ceil_div(panels, wanted));
  const int64_t chunks = panels == 0 ? 1 : ceil_div(panels, chunk);
  for (int64_t i = 0; i < groups; ++i) {
    PositionGroup& g = problem.data[i].g;
    g.value = values.get() + i * group_values;
    g.special_value = any.get() + i * tiles;
    scratch_bytes = std::max(scratch_bytes, kernels.forward_scratch(a, g, chunk));
  }
  run_tasks(groups * blocks * chunks, problem.work(), scratch_bytes, [&](int64_t t, void* scratch) {
    const int64_t part = t % chunks, block = t / chunks % blocks, i = t / chunks / blocks;
    kernels.forward(a, problem.data[i].g, o, i, block, part * chunk, std::min((part + 1) * chunk, panels), scratch);
  });
  return out;
}

template <class T> void add_into(T* to, const T* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

// The backward pass. A task owns the sums it writes; where several tasks share a sum, each writes a part of its own and the parts are
// added in a fixed order: the bits do not depend on which thread ran what.
template <class T> class BackwardRun {
 public:
  Problem<T> problem;
  const PositionProblem& a = problem.a;
  const PositionAttentionKernels& kernels = problem.kernels;
  const bool value, scores;

  BackwardRun(const Arguments& x, bool value, bool scores) : problem(x), value(value), scores(scores) {}

  // grad_value: (B, HV, M, C), cleared
  void run(const Tensor& grad_out, const T* grad_lse, const void* out, const T* stats, T* grad_value) {
    load_rows(grad_lse, stats);
    find_far_keys();
    pack(grad_out, out);
    split();
    const int64_t width = a.value_heads * a.m * a.c * a.entries, groups = problem.groups;
    value_parts_ = Buffer<T>(value && query_parts_ > 1 ? groups * (query_parts_ - 1) * width : 0, T(0));
    key_ = Buffer<T>(groups * query_parts_ * a.m * a.d, T(0));
    bias_ = Buffer<T>(groups * query_parts_ * a.m, T(0));
    query_ = Buffer<T>(groups * key_parts_ * a.n * a.d, T(0));
    rate_ = Buffer<double>(groups * key_parts_ * query_parts_ * a.heads, 0.0);
    const double work = problem.work() * (int(value) + int(scores)) + double(groups) * width;
    run_tasks(groups * key_parts_ * query_parts_, work, kernels.backward_scratch(a), [&](int64_t t, void* scratch) {
      const int64_t q = t % query_parts_, k = t / query_parts_ % key_parts_, i = t / query_parts_ / key_parts_;
      const PositionGroup& g = problem.data[i].g;
      const int64_t blocks = ceil_div(g.key.count, LANE_BLOCK), tiles = ceil_div(a.n, DEPTH_TILE);
      PositionGradients to{};
      to.value = value, to.scores = scores;
      to.block_begin = blocks * k / key_parts_, to.block_end = blocks * (k + 1) / key_parts_;
      to.tile_begin = tiles * q / query_parts_, to.tile_end = tiles * (q + 1) / query_parts_;
      to.grad_value = q == 0 ? grad_value + i * width : value_parts_.get() + (i * (query_parts_ - 1) + q - 1) * width;
      to.grad_key_pos = key_.get() + (i * query_parts_ + q) * a.m * a.d;
      to.grad_bias = bias_.get() + (i * query_parts_ + q) * a.m;
      to.grad_query_pos = query_.get() + (i * key_parts_ + k) * a.n * a.d;
      to.grad_rate = rate_.get() + t * a.heads;
      kernels.backward(a, g, to, scratch);
    });
    for (int64_t i = 0; value && i < groups; ++i) {
      for (int64_t q = 1; q < query_parts_; ++q) {
        add_into(grad_value + i * width, value_parts_.get() + (i * (query_parts_ - 1) + q - 1) * width, width);
      }
    }
  }

  // The sums of all parts, and of all groups where the batch shares the argument (to: one sample) or each group's own. `to` is cleared.
  void query_positions(T* to, bool shared) const {
    for (int64_t i = 0; i < problem.groups; ++i) {
      for (int64_t k = 0; k < key_parts_; ++k) {
        const T* from = query_.get() + (i * key_parts_ + k) * a.n * a.d;
        T* rows = to + (shared ? 0 : i) * a.n * a.d;
        for (int64_t j = 0; j < a.n; ++j) add_into(rows + problem.data[i].g.query.place[j] * a.d, from + j * a.d, a.d);
      }
    }
  }
  void key_positions(T* to, bool shared) const { sum_parts(key_.get(), a.m * a.d, to, shared); }
  void weights(T* to, bool shared, const std::optional<View>& w) const {
    sum_parts(bias_.get(), a.m, to, shared);
    for (int64_t i = 0; i < (shared ? 1 : problem.groups); ++i) {
      const Row<T> row = row_of<T>(w, i);
      for (int64_t k = 0; k < a.m; ++k) to[i * a.m + k] = row[k] == T(0) ? T(0) : to[i * a.m + k] / row[k];
    }
  }
  void rates(T* to) const {
    for (int64_t h = 0; h < a.heads; ++h) {
      double sum = 0;
      for (int64_t t = 0; t < problem.groups * key_parts_ * query_parts_; ++t) sum += rate_[t * a.heads + h];
      to[h] = T(sum);
    }
  }

 private:
  int64_t key_parts_ = 1, query_parts_ = 1;
  Buffer<T> nearest_, inverse_sum_, delta_, shift_, values_, gradients_, value_parts_, key_, bias_, query_;
  Buffer<double> far_, near_, rate_;
  Buffer<uint8_t> special_block_, special_tile_;

  void sum_parts(const T* from, int64_t width, T* to, bool shared) const {
    for (int64_t i = 0; i < problem.groups; ++i) {
      for (int64_t q = 0; q < query_parts_; ++q) add_into(to + (shared ? 0 : i) * width, from + (i * query_parts_ + q) * width, width);
    }
  }

  int64_t padded_rows() const { return ceil_div(a.n, LANE_BLOCK) * LANE_BLOCK; }
  int64_t tiles() const { return ceil_div(a.n, DEPTH_TILE); }

  void load_rows(const T* grad_lse, const T* stats) {
    const int64_t rows = padded_rows(), groups = problem.groups;
    nearest_ = Buffer<T>(groups * rows, T(0));
    inverse_sum_ = Buffer<T>(groups * a.heads * rows, T(0));
    delta_ = Buffer<T>(groups * a.heads * rows, T(0));
    shift_ = Buffer<T>(groups * a.heads * rows, T(0));
    for (int64_t i = 0; i < groups; ++i) {
      PositionGroup& g = problem.data[i].g;
      for (int64_t h = 0; h < a.heads; ++h) {
        for (int64_t j = 0; j < a.n; ++j) {
          const int64_t from = (i * a.heads + h) * a.n + g.query.place[j], to = (i * a.heads + h) * rows + j;
          const T sum = stats[2 * from + 1];
          if (sum == T(0)) continue;
          if (h == 0) nearest_[i * rows + j] = stats[2 * from];
          inverse_sum_[to] = 1 / sum;
          if (grad_lse) delta_[to] = -grad_lse[from];
        }
      }
      g.nearest = nearest_.get() + i * rows;
      g.inverse_sum = inverse_sum_.get() + i * a.heads * rows;
      g.delta = delta_.get() + i * a.heads * rows;
      g.shift = shift_.get() + i * a.heads * rows;
    }
  }

  // Could a tile be negligible? Only if the largest rate makes it so across the whole extent.
  bool may_skip(const PositionGroup& g) const {
    double most = 0, across = 0;
    for (int64_t h = 0; h < a.heads; ++h) most = std::max(most, a.rate[h]);
    for (int64_t t = 0; t < a.d; ++t) {
      double low = std::numeric_limits<double>::infinity(), high = -low;
      auto extend = [&](const double* box, int64_t count) {
        for (int64_t i = 0; i < count; ++i) low = std::min(low, box[2 * a.d * i + t]), high = std::max(high, box[2 * a.d * i + a.d + t]);
      };
      extend(g.query.tile_box, tiles());
      extend(g.key.tile_box, ceil_div(g.key.count, DEPTH_TILE));
      across += (high - low) * (high - low);
    }
    return g.key.count > 0 && !(most * LOG2E * across < 30);
  }

  void find_far_keys() {
    constexpr double INF = std::numeric_limits<double>::infinity();
    const int64_t rows = padded_rows(), blocks = problem.lane_blocks(), groups = problem.groups;
    far_ = Buffer<double>(groups * tiles(), INF), near_ = Buffer<double>(groups * tiles(), INF);
    std::vector<uint8_t> looked(groups);
    size_t scratch = 0;
    for (int64_t i = 0; i < groups; ++i) {
      PositionGroup& g = problem.data[i].g;
      looked[i] = may_skip(g) || g.min_bias < -60;
      scratch = std::max(scratch, kernels.forward_scratch(a, g, 0));
      g.tile_far = far_.get() + i * tiles(), g.tile_near = near_.get() + i * tiles();
    }
    const Buffer<T> apart(groups * rows, T(INF));
    run_tasks(groups * blocks, double(groups) * a.n * a.m, scratch, [&](int64_t t, void* memory) {
      const int64_t i = t / blocks, block = t % blocks;
      if (!looked[i]) return;
      T* to = apart.get() + i * rows + block * LANE_BLOCK;
      kernels.near_keys(a, problem.data[i].g, block, to, shift_.get() + i * a.heads * rows, memory);
    });
    for (int64_t i = 0; i < groups; ++i) {
      const PositionGroup& g = problem.data[i].g;
      const T* reach = static_cast<const T*>(g.reach);
      for (int64_t tile = 0; looked[i] && tile < tiles(); ++tile) {
        double far = 0, near = INF;
        for (int64_t j = tile * DEPTH_TILE; j < std::min((tile + 1) * DEPTH_TILE, a.n); ++j) {
          const double d2 = nearest_[i * rows + j], other = apart[i * rows + j];
          if (a.heads > 0 && inverse_sum_[i * a.heads * rows + j] == T(0)) continue;  // no key: nothing depends on this row
          far = d2 <= far ? far : d2;  // a NaN makes it infinite
          if (!(d2 == d2)) far = INF;
          if (reach && other > double(reach[j])) continue;
          far = std::max(far, other), near = std::min(near, other);
        }
        far_[i * tiles() + tile] = far, near_[i * tiles() + tile] = near;
      }
    }
  }

  void pack(const Tensor& grad_out, const void* out) {
    const int64_t groups = problem.groups, padded = problem.row_elements(), rows = a.n * padded, columns = a.columns();
    const BatchedOperand source = batched(View(grad_out));
    gradients_ = Buffer<T>(groups * a.heads * rows);
    special_tile_ = Buffer<uint8_t>(groups * tiles(), 0);
    std::vector<uint8_t> special(groups * a.heads * tiles());
    run_tasks(groups * a.heads * tiles(), double(groups) * a.heads * rows * 4, 2 * padded * sizeof(T), [&](int64_t t, void* scratch) {
      const int64_t tile = t % tiles(), head = t / tiles() % a.heads, i = t / tiles() / a.heads;
      const int64_t begin = tile * DEPTH_TILE, end = std::min(begin + DEPTH_TILE, a.n);
      T *to = gradients_.get() + (i * a.heads + head) * rows, *delta = delta_.get() + i * a.heads * padded_rows();
      special[t] = kernels.pack_gradient(a, source, out, problem.data[i].g, head, begin, end, to, delta, scratch);
    });
    for (int64_t t = 0; t < groups * a.heads * tiles(); ++t) special_tile_[t / (a.heads * tiles()) * tiles() + t % tiles()] |= special[t];

    const int64_t blocks = ceil_div(a.m, LANE_BLOCK), block_values = columns * LANE_BLOCK;
    const int64_t group_values = blocks * a.value_heads * block_values;
    values_ = Buffer<T>(scores ? groups * group_values : 0);
    special_block_ = Buffer<uint8_t>(groups * blocks, 0);
    for (int64_t i = 0; i < groups; ++i) {
      PositionGroup& g = problem.data[i].g;
      g.grad_out = gradients_.get() + i * a.heads * rows;
      g.value_transposed = values_.get() + (scores ? i * group_values : 0);
      g.special_tile = special_tile_.get() + i * tiles();
      g.special_block = special_block_.get() + i * blocks;
    }
    if (!scores) return;
    run_tasks(groups * blocks, double(groups) * group_values, padded * sizeof(T), [&](int64_t t, void* scratch) {
      const int64_t i = t / blocks, block = t % blocks;
      const PositionGroup& g = problem.data[i].g;
      if (block * LANE_BLOCK >= g.key.count) return;
      for (int64_t h = 0; h < a.value_heads; ++h) {
        T* to = values_.get() + i * group_values + (block * a.value_heads + h) * block_values;
        special_block_[t] |= kernels.pack_transposed(a, g, h, block, to, scratch);
      }
    });
  }

  void split() {
    const int64_t threads = torch::stable::get_num_threads(), groups = std::max<int64_t>(problem.groups, 1);
    if (threads == 1) return;
    key_parts_ = std::max<int64_t>(1, std::min(ceil_div(4 * threads, groups), ceil_div(a.m, LANE_BLOCK)));
    const int64_t missing = ceil_div(4 * threads, groups * key_parts_);
    query_parts_ = std::max<int64_t>(1, std::min(missing, tiles() / 8));
  }
};

template <class T>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                                            const Arguments& x, const Tensor& out, const Tensor& stats,
                                                            const std::vector<bool>& needs) {
  STD_TORCH_CHECK(out.is_contiguous() && stats.is_contiguous(), "out and stats: as the forward op returned them");
  STD_TORCH_CHECK(needs.size() == 5, "needs: one for each of query_pos, key_pos, value, rate, weights");
  const bool weights_grad = needs[4] && x.weights.has_value();
  const bool scores = needs[0] || needs[1] || needs[3] || weights_grad;
  BackwardRun<T> run(x, needs[2], scores);
  const ScalarType type = run.problem.type;
  const PositionProblem& a = run.problem.a;
  const int64_t groups = run.problem.groups;
  check_is(grad_out, x.value.scalar_type(), {run.problem.batch, a.heads, a.n, a.c}, "grad_out: of out's dtype and sizes");
  check_is(out, x.value.scalar_type(), {run.problem.batch, a.heads, a.n, a.c}, "out: as the forward op returned it");
  check_is(stats, type, {groups, a.heads, a.n, 2}, "stats: as the forward op returned it");
  if (grad_lse) check_is(*grad_lse, type, {groups, a.heads, a.n}, "grad_lse: of lse's dtype and sizes");
  auto cleared = [&](const View& like) { return new_cleared(x.like, like.own_sizes(), type); };
  auto data = [](Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); };
  auto single = [&](const View& t) { return t.size(0) == 1 && run.problem.groups != 0; };
  std::optional<Tensor> lse_rows;
  if (grad_lse) lse_rows = torch::stable::contiguous(*grad_lse);
  auto none = [&] { return new_tensor({0}, x.value.scalar_type()); };  // outputs must not share memory
  Tensor grad_value = needs[2] ? cleared(x.value) : none();
  if (needs[2] || scores) {
    run.run(grad_out, lse_rows ? static_cast<const T*>(lse_rows->const_data_ptr()) : nullptr, out.const_data_ptr(),
            static_cast<const T*>(stats.const_data_ptr()), needs[2] ? data(grad_value) : nullptr);
  }
  auto gradient = [&](bool need, const View& like, auto fill) {
    if (!need) return none();
    Tensor t = cleared(like);
    fill(data(t));
    return like.scalar_type() == type ? t : converted(t, like.scalar_type());
  };
  return {gradient(needs[0], x.query_pos, [&](T* to) { run.query_positions(to, single(x.query_pos)); }),
          gradient(needs[1], x.key_pos, [&](T* to) { run.key_positions(to, single(x.key_pos)); }),
          x.value.scalar_type() == type ? grad_value : converted(grad_value, x.value.scalar_type()),
          gradient(needs[3], x.rate, [&](T* to) { run.rates(to); }),
          weights_grad ? gradient(true, *x.weights, [&](T* to) { run.weights(to, single(*x.weights), x.weights); }) : none()};
}

using Period = std::optional<std::vector<double>>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Tensor forward_any(const Arguments& x, std::optional<Tensor>* lse, std::optional<Tensor>* stats) {
  return x.value.scalar_type() == ScalarType::Double ? forward<double>(x, lse, stats) : forward<float>(x, lse, stats);
}

Gradients backward_any(const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Arguments& x, const Tensor& out,
                       const Tensor& stats, const std::vector<bool>& needs) {
  return x.value.scalar_type() == ScalarType::Double ? backward<double>(grad_out, grad_lse, x, out, stats, needs)
                                                     : backward<float>(grad_out, grad_lse, x, out, stats, needs);
}

Arguments arguments(const Tensor& query_pos, const Tensor& key_pos, const Tensor& value, const Tensor& rate,
                    const std::optional<Tensor>& weights, const std::optional<Tensor>& radius, const Period& period) {
  return {View(query_pos), View(key_pos),   View(value),                   View(rate),
          view_of(weights), view_of(radius), period ? &*period : nullptr, value};
}

// As users pass them where the batch shares the points: (N, d), (M, d), (B, M, C) or (B, H, M, C), (H,), (M,).
Arguments plain_arguments(const Tensor& query_pos, const Tensor& key_pos, const Tensor& value, const Tensor& rate,
                          const std::optional<Tensor>& weights) {
  return {View(query_pos, 0),  View(key_pos, 0), View(value, value.dim() == 3 ? 1 : -1), View(rate),
          view_of(weights, 0), std::nullopt,     nullptr,                                value};
}

std::tuple<Tensor, Tensor, Tensor> forward_op(const Tensor& query_pos, const Tensor& key_pos, const Tensor& value, const Tensor& rate,
                                              std::optional<Tensor> weights, std::optional<Tensor> radius, Period period) {
  std::optional<Tensor> lse, stats;
  Tensor out = forward_any(arguments(query_pos, key_pos, value, rate, weights, radius, period), &lse, &stats);
  return {out, *lse, *stats};
}

Gradients backward_op(const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& query_pos, const Tensor& key_pos,
                      const Tensor& value, const Tensor& rate, std::optional<Tensor> weights, const Tensor& out, const Tensor& /*lse*/,
                      const Tensor& stats, std::optional<Tensor> radius, Period period, std::vector<bool> needs) {
  return backward_any(grad_out, grad_lse, arguments(query_pos, key_pos, value, rate, weights, radius, period), out, stats, needs);
}

Tensor plain(const Tensor& query_pos, const Tensor& key_pos, const Tensor& value, const Tensor& rate, std::optional<Tensor> weights) {
  return forward_any(plain_arguments(query_pos, key_pos, value, rate, weights), nullptr, nullptr);
}

std::tuple<Tensor, Tensor> plain_forward(const Tensor& query_pos, const Tensor& key_pos, const Tensor& value, const Tensor& rate,
                                         std::optional<Tensor> weights) {
  std::optional<Tensor> stats;
  Tensor out = forward_any(plain_arguments(query_pos, key_pos, value, rate, weights), nullptr, &stats);
  return {out, *stats};
}

Gradients plain_backward(const Tensor& grad_out, const Tensor& query_pos, const Tensor& key_pos, const Tensor& value, const Tensor& rate,
                         std::optional<Tensor> weights, const Tensor& out, const Tensor& stats, std::vector<bool> needs) {
  return backward_any(grad_out, std::nullopt, plain_arguments(query_pos, key_pos, value, rate, weights), out, stats, needs);
}

}  // namespace
}  // namespace continuum_ops

STABLE_TORCH_LIBRARY_IMPL(continuum_ops, CPU, m) {
  m.impl("position_attention_forward", TORCH_BOX(&continuum_ops::forward_op));
  m.impl("position_attention_backward", TORCH_BOX(&continuum_ops::backward_op));
  m.impl("position_attention_plain", TORCH_BOX(&continuum_ops::plain));
  m.impl("position_attention_plain_forward", TORCH_BOX(&continuum_ops::plain_forward));
  m.impl("position_attention_plain_backward", TORCH_BOX(&continuum_ops::plain_backward));
}
