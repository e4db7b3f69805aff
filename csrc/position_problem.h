// A call of position_attention as the kernels see it: its arguments, checked, and the geometry of each group of the batch.
#pragma once

#include <optional>
#include <vector>

#include "cpu_isa.h"
#include "parallel.h"
#include "position_groups.h"
#include "tensors.h"

namespace continuum_ops {

inline DType value_dtype(const View& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::float32;
    case ScalarType::Double: return DType::float64;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Half: return DType::float16;
    default: throw std::invalid_argument("value must be float64, float32, bfloat16 or float16");
  }
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline BatchedOperand batched(const View& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2), t.stride(3)}; }

inline PointRows point_rows(const View& t, int64_t sample) {
  const bool wide = t.scalar_type() == ScalarType::Double;
  const char* data = static_cast<const char*>(t.const_data_ptr());
  return {data + (t.size(0) > 1 ? sample * t.stride(0) : 0) * (wide ? 8 : 4), wide, t.size(1), t.size(2), t.stride(1), t.stride(2)};
}

template <class T> Row<T> row_of(const std::optional<View>& t, int64_t sample) {
  if (!t || t->size(1) == 0) return {};
  return {static_cast<const T*>(t->const_data_ptr()) + (t->size(0) > 1 ? sample * t->stride(0) : 0), t->stride(1)};
}

inline std::optional<View> view_of(const std::optional<Tensor>& t) { return t ? std::optional(View(*t)) : std::nullopt; }

struct Arguments {
  View query_pos, key_pos, value, rate;
  std::optional<View> weights, radius;
  const std::vector<double>* period;
  const Tensor& like;
};

template <class T> class Problem {
 public:
  PositionProblem a{};
  int64_t batch, groups, rows = 0;  // rows: of the group with most queries
  ScalarType type = sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
  std::vector<GroupData<T>> data;
  const PositionAttentionKernels& kernels = position_attention_kernels();

  // only: of each group, the rows of the queries that take part; null: all.
  explicit Problem(const Arguments& x, const std::vector<std::vector<int64_t>>* only = nullptr) {
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
    build_groups(x, only);
    for (const GroupData<T>& d : data) rows = std::max(rows, d.g.query.count);
  }

  double pairs() const {
    double sum = 0;
    for (const GroupData<T>& d : data) sum += double(d.g.query.count) * d.g.key.count;
    return sum * a.heads;
  }
  double work() const { return pairs() * (a.columns() + 16); }
  int64_t lane_blocks() const { return ceil_div(rows, LANE_BLOCK); }
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

  void build_groups(const Arguments& x, const std::vector<std::vector<int64_t>>* only) {
    const int64_t samples = std::min(x.query_pos.size(0), groups);
    std::vector<std::vector<int64_t>> query_order(samples), key_order(samples);
    run_tasks(2 * samples, double(samples) * (a.n + a.m) * 50, 0, [&](int64_t t, void*) {
      if (t % 2 == 0 && !only) query_order[t / 2] = visiting_order(point_rows(x.query_pos, t / 2));
      if (t % 2 != 0) key_order[t / 2] = visiting_order(point_rows(x.key_pos, t / 2));
    });
    data = std::vector<GroupData<T>>(groups);
    std::vector<std::string> wrong(groups);  // nothing may be thrown out of a task
    run_tasks(groups, double(groups) * (a.n + a.m) * 10, 0, [&](int64_t i, void*) {
      const int64_t sample = samples > 1 ? i : 0;
      data[i].g.first_entry = i;
      try {
        data[i].build(point_rows(x.query_pos, sample), only ? (*only)[i] : query_order[sample], point_rows(x.key_pos, sample), key_order[sample],
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

}  // namespace continuum_ops
