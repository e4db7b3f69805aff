// continuum_attention on CPU tensors: allocation, and the split into tasks. The arithmetic is in
// continuum_attention_kernel.cpp; schemas are defined in continuum_ops/ops/_library.py.
#include "continuum_attention_problem.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <utility>

namespace continuum_ops {
namespace {

// Makes lse and stats where they are wanted.
Tensor attend(const Problem& problem, ScalarType type, std::optional<Tensor>* lse, std::optional<Tensor>* stats) {
  const AttentionProblem& a = problem.a;
  const ContinuumAttentionKernels& kernels = continuum_attention_kernels();
  const ScalarType acc = accumulation_type(a.dtype);
  if (lse) {
    std::vector<int64_t> rows = problem.shape;
    rows.push_back(a.n);
    *lse = new_tensor(rows, acc);
  }
  if (stats) *stats = new_tensor(with_rows(problem.shape, a.n, 2), acc);
  Tensor out = new_tensor(with_rows(problem.shape, a.n, a.dv), type);
  const AttentionOutput o{out.mutable_data_ptr(), lse ? (*lse)->mutable_data_ptr() : nullptr,
                          stats ? (*stats)->mutable_data_ptr() : nullptr};

  const int64_t block = a.dtype == DType::float64 ? kernels.query_block_double : kernels.query_block_float;
  const int64_t blocks = (a.n + block - 1) / block;
  // Long strips read the keys less often; short ones keep all threads busy where there is little to do.
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t strip = std::max<int64_t>(1, std::min(kernels.strip, a.leads * blocks / (8 * threads)));
  const int64_t strips = (blocks + strip - 1) / strip;
  run_tasks(a.leads * strips, problem.scores() * (a.d + a.dv), kernels.scratch_bytes(a, false), [&](int64_t t, void* scratch) {
    const int64_t begin = t % strips * strip;
    kernels.forward(a, o, t / strips, begin, std::min(begin + strip, blocks), scratch);
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> weights,
                                           std::optional<Tensor> attn_mask, std::optional<Tensor> query_pos,
                                           std::optional<Tensor> key_pos, std::optional<Tensor> rate, std::optional<Tensor> radius,
                                           std::optional<Tensor> seed, std::optional<std::vector<double>> period, double scale,
                                           double dropout_p, bool is_causal) {
  const Problem problem(equal_leads(query, key, value, weights), query, key, value, weights, attn_mask,
                        {query_pos, key_pos, rate, radius, period}, seed, scale, dropout_p, is_causal);
  std::optional<Tensor> lse, stats;
  Tensor out = attend(problem, query.scalar_type(), &lse, &stats);
  return {out, *lse, *stats};
}

// The problem of arguments as users pass them: leading dimensions that broadcast, no scale for 1 / sqrt(d), no other terms.
Problem plain_problem(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor>& weights,
                      std::optional<double> scale, bool is_causal) {
  const std::vector<int64_t> leads = common_leads(query, key, value);
  const int64_t m = key.size(key.dim() - 2), d = query.size(query.dim() - 1);
  if (weights && (weights->dim() == 0 || weights->size(weights->dim() - 1) != m)) {
    std::vector<int64_t> sizes = sizes_of(*weights, std::max<int64_t>(weights->dim() - 1, 0));
    sizes.push_back(m);
    weights = expanded(*weights, sizes);
  }
  const double factor = scale ? *scale : d > 0 ? 1 / std::sqrt(double(d)) : 1;
  return Problem(leads, query, key, value, weights, std::nullopt, {}, std::nullopt, factor, 0, is_causal);
}

Tensor plain(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> weights, std::optional<double> scale,
             bool is_causal) {
  return attend(plain_problem(query, key, value, weights, scale, is_causal), query.scalar_type(), nullptr, nullptr);
}

std::tuple<Tensor, Tensor> plain_forward(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> weights,
                                         std::optional<double> scale, bool is_causal) {
  std::optional<Tensor> stats;
  Tensor out = attend(plain_problem(query, key, value, weights, scale, is_causal), query.scalar_type(), nullptr, &stats);
  return {out, *stats};
}

// d / d w_k = (d / d log w_k) / w_k, and 0 where the key does not exist.
template <class T> void divide_by_weights(T* grad, const Tensor& weights, const Problem& problem) {
  const AttentionProblem& a = problem.a;
  const std::vector<int64_t> offsets = lead_offsets(weights, 1, problem.shape);
  const int64_t stride = weights.stride(weights.dim() - 1);
  for (int64_t lead = 0; lead < a.leads; ++lead) {
    const T* w = static_cast<const T*>(weights.const_data_ptr()) + offsets[lead];
    for (int64_t k = 0; k < a.m; ++k) grad[lead * a.m + k] = w[k * stride] == T(0) ? T(0) : grad[lead * a.m + k] / w[k * stride];
  }
}

// Sums over the leads that share a piece of `to`: piece i of `part` belongs to to[offsets[i]...]. In double, and in order.
template <class T, class S> void sum_leads(const T* part, int64_t count, const std::vector<int64_t>& offsets, S* to) {
  std::vector<std::pair<int64_t, int64_t>> order;  // (offset, lead)
  for (size_t lead = 0; lead < offsets.size(); ++lead) order.emplace_back(offsets[lead], int64_t(lead));
  std::sort(order.begin(), order.end());
  constexpr int64_t BLOCK = 512;
  double total[BLOCK];
  for (size_t i = 0, j = 0; i < order.size(); i = j) {
    while (j < order.size() && order[j].first == order[i].first) ++j;
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
      const int64_t size = std::min(BLOCK, count - begin);
      std::fill(total, total + size, 0.0);
      for (size_t l = i; l < j; ++l) {
        for (int64_t x = 0; x < size; ++x) total[x] += part[order[l].second * count + begin + x];
      }
      for (int64_t x = 0; x < size; ++x) to[order[i].first + begin + x] = S(total[x]);
    }
  }
}

// Where the gradients of all leads go, one lead after the other; null if not wanted.
template <class T> struct Destinations {
  T *query, *key, *value, *bias, *query_pos, *key_pos;
  double* rate;
};

// How the backward pass is cut into tasks. Each task owns the sums it writes; where two tasks share a sum, each writes a
// part of its own and the parts are added in a fixed order: the bits do not depend on which thread ran what.
template <class T> class BackwardRun {
 public:
  BackwardRun(const Problem& problem, const AttentionGradients& shared, const Destinations<T>& to)
      : a_(problem.a), kernels_(continuum_attention_kernels()), shared_(shared), to_(to), dims_(to.query_pos ? a_.distance.dims : 0),
        work_(problem.scores() * (3 * a_.d + 2 * a_.dv)), scratch_(kernels_.scratch_bytes(a_, true)) {}

  void run() {
    const int64_t threads = torch::stable::get_num_threads();
    if (threads == 1 || a_.leads >= 8 * threads || a_.leads % threads == 0 || work_ < 1e6) return by_lead();
    const int64_t parts = (4 * threads + a_.leads - 1) / std::max<int64_t>(a_.leads, 1);
    if (a_.m >= parts * kernels_.key_block) return by_keys(parts);
    by_queries(parts);
  }

 private:
  const AttentionProblem& a_;
  const ContinuumAttentionKernels& kernels_;
  const AttentionGradients shared_;
  const Destinations<T> to_;
  const int64_t dims_;  // of the positions, if their gradients are wanted
  const double work_;
  const size_t scratch_;

  AttentionGradients task(int64_t lead) const {
    AttentionGradients g = shared_;
    g.lead = lead;
    g.key_begin = 0, g.key_end = a_.keys[lead].count, g.query_begin = 0, g.query_end = a_.n;
    g.grad_query = to_.query + lead * a_.n * a_.d;
    g.grad_key = to_.key + lead * a_.m * a_.d;
    g.grad_value = to_.value + lead * a_.m * a_.dv;
    g.grad_bias = to_.bias ? to_.bias + lead * a_.m : nullptr;
    g.grad_query_pos = to_.query_pos ? to_.query_pos + lead * a_.n * dims_ : nullptr;
    g.grad_key_pos = to_.key_pos ? to_.key_pos + lead * a_.m * dims_ : nullptr;
    g.grad_rate = to_.rate ? to_.rate + lead : nullptr;
    return g;
  }

  void by_lead() {
    run_tasks(a_.leads, work_, scratch_, [&](int64_t lead, void* scratch) { kernels_.backward(a_, task(lead), scratch); });
  }

  // Many keys: a task owns a range of keys; its part of grad_query lives for a strip of queries only.
  void by_keys(int64_t parts) {
    const int64_t strip = std::min<int64_t>(a_.n, 4096), block = kernels_.key_block;
    auto partial = zeros_of<T>(a_.leads * parts * strip * a_.d), partial_pos = zeros_of<T>(a_.leads * parts * strip * dims_);
    std::vector<double> rates(a_.leads * parts);
    for (int64_t begin = 0; begin < a_.n; begin += strip) {
      const int64_t end = std::min(a_.n, begin + strip);
      run_tasks(a_.leads * parts, work_, scratch_, [&](int64_t t, void* scratch) {
        const int64_t lead = t / parts, part = t % parts, blocks = (a_.keys[lead].count + block - 1) / block;
        AttentionGradients g = task(lead);
        g.key_begin = std::min(blocks * part / parts * block, a_.keys[lead].count);
        g.key_end = std::min(blocks * (part + 1) / parts * block, a_.keys[lead].count);
        g.query_begin = begin, g.query_end = end;
        g.grad_query = partial.data() + t * strip * a_.d;
        if (g.grad_query_pos) g.grad_query_pos = partial_pos.data() + t * strip * dims_;
        if (g.grad_rate) g.grad_rate = rates.data() + t;
        kernels_.backward(a_, g, scratch);
      });
      run_tasks(a_.leads, double(a_.leads) * parts * (end - begin) * a_.d, 0, [&](int64_t lead, void*) {
        add_parts(partial.data() + lead * parts * strip * a_.d, parts, strip * a_.d, (end - begin) * a_.d,
                  to_.query + (lead * a_.n + begin) * a_.d);
        if (dims_ > 0) {
          add_parts(partial_pos.data() + lead * parts * strip * dims_, parts, strip * dims_, (end - begin) * dims_,
                    to_.query_pos + (lead * a_.n + begin) * dims_);
        }
      });
    }
    add_rates(rates, parts);
  }

  // Few keys: a task owns a range of queries and has its own sums over the keys.
  void by_queries(int64_t parts) {
    parts = std::max<int64_t>(1, std::min(parts, a_.n / 64));
    const int64_t to_value = a_.m * a_.d, to_bias = to_value + a_.m * a_.dv, to_pos = to_bias + a_.m, width = to_pos + a_.m * dims_;
    auto partial = zeros_of<T>(a_.leads * parts * width);
    std::vector<double> rates(a_.leads * parts);
    run_tasks(a_.leads * parts, work_, scratch_, [&](int64_t t, void* scratch) {
      const int64_t lead = t / parts, part = t % parts;
      AttentionGradients g = task(lead);
      T* own = partial.data() + t * width;
      g.query_begin = a_.n * part / parts, g.query_end = a_.n * (part + 1) / parts;
      g.grad_query = to_.query + (lead * a_.n + g.query_begin) * a_.d;
      g.grad_key = own, g.grad_value = own + to_value;
      if (g.grad_bias) g.grad_bias = own + to_bias;
      if (g.grad_query_pos) {
        g.grad_query_pos = to_.query_pos + (lead * a_.n + g.query_begin) * dims_;
        g.grad_key_pos = own + to_pos;
      }
      if (g.grad_rate) g.grad_rate = rates.data() + t;
      kernels_.backward(a_, g, scratch);
    });
    for (int64_t lead = 0; lead < a_.leads; ++lead) {
      const T* own = partial.data() + lead * parts * width;
      const AttentionGradients g = task(lead);
      add_parts(own, parts, width, a_.m * a_.d, static_cast<T*>(g.grad_key));
      add_parts(own + to_value, parts, width, a_.m * a_.dv, static_cast<T*>(g.grad_value));
      if (g.grad_bias) add_parts(own + to_bias, parts, width, a_.m, static_cast<T*>(g.grad_bias));
      if (g.grad_key_pos) add_parts(own + to_pos, parts, width, a_.m * dims_, static_cast<T*>(g.grad_key_pos));
    }
    add_rates(rates, parts);
  }

  void add_rates(const std::vector<double>& rates, int64_t parts) {
    if (!to_.rate) return;
    for (size_t t = 0; t < rates.size(); ++t) to_.rate[int64_t(t) / parts] += rates[t];
  }

  static void add_parts(const T* part, int64_t parts, int64_t stride, int64_t count, T* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = part[i];
    for (int64_t p = 1; p < parts; ++p) {
      for (int64_t i = 0; i < count; ++i) to[i] += part[p * stride + i];
    }
  }
};

AttentionGradients incoming(const LeadOperand& grad_out, const void* grad_lse, const Tensor& out, const Tensor& stats) {
  STD_TORCH_CHECK(out.is_contiguous() && stats.is_contiguous(), "out and stats: as the forward op returned them");
  AttentionGradients g{};
  g.grad_out = grad_out.operand, g.grad_lse = grad_lse;
  g.out = out.const_data_ptr(), g.stats = stats.const_data_ptr();
  return g;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    std::optional<Tensor> weights, std::optional<Tensor> attn_mask, std::optional<Tensor> query_pos, std::optional<Tensor> key_pos,
    std::optional<Tensor> rate, std::optional<Tensor> radius, std::optional<Tensor> seed, const Tensor& out, const Tensor& stats,
    std::optional<std::vector<double>> period, double scale, double dropout_p, bool is_causal, bool weights_grad, bool positions_grad,
    bool rate_grad) {
  const Problem problem(equal_leads(query, key, value, weights), query, key, value, weights, attn_mask,
                        {query_pos, key_pos, rate, radius, period}, seed, scale, dropout_p, is_causal);
  const AttentionProblem& a = problem.a;
  const ScalarType acc = accumulation_type(a.dtype);
  std::vector<int64_t> sizes = sizes_of(query, query.dim() - 1);
  if (grad_lse) check_is(*grad_lse, acc, sizes, "grad_lse: of lse's dtype and sizes");
  sizes.push_back(2);
  check_is(stats, acc, sizes, "stats: as the forward op returned it");
  sizes.back() = a.dv;
  check_is(out, query.scalar_type(), sizes, "out: as the forward op returned it");
  check_is(grad_out, query.scalar_type(), sizes, "grad_out: of out's dtype and sizes");
  auto zeros = [&](const Tensor& like) { return new_cleared(query, sizes_of(like, like.dim()), acc); };
  Tensor grad_query = new_tensor(sizes_of(query, query.dim()), acc);
  Tensor grad_key = zeros(key), grad_value = zeros(value);
  weights_grad &= weights.has_value();
  Tensor grad_weights = weights_grad ? zeros(*weights) : new_tensor({0}, acc);
  std::optional<Tensor> grad_lse_rows;
  if (grad_lse) grad_lse_rows = torch::stable::contiguous(*grad_lse);
  // Positions and rate are shared by leads: each lead has its own sums, which are then added.
  const bool term_grad = rate.has_value();
  auto none = [&] { return new_tensor({0}, acc); };
  positions_grad &= query_pos.has_value(), rate_grad &= term_grad;
  Tensor grad_query_pos = positions_grad ? zeros(*query_pos) : none(), grad_key_pos = positions_grad ? zeros(*key_pos) : none();
  Tensor grad_rate = rate_grad ? zeros(*rate) : none();

  const LeadOperand grad(grad_out, problem.shape);
  const AttentionGradients g = incoming(grad, grad_lse_rows ? grad_lse_rows->const_data_ptr() : nullptr, out, stats);
  auto run = [&](auto zero) {
    using T = decltype(zero);
    auto data = [](Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); };
    const bool positions = positions_grad && term_grad;
    auto query_places = zeros_of<T>(positions ? a.leads * a.n * a.distance.dims : 0);
    auto key_places = zeros_of<T>(positions ? a.leads * a.m * a.distance.dims : 0);
    std::vector<double> rates(rate_grad ? a.leads : 0);
    BackwardRun<T>(problem, g,
                   {data(grad_query), data(grad_key), data(grad_value), weights_grad ? data(grad_weights) : nullptr,
                    positions ? query_places.data() : nullptr, positions ? key_places.data() : nullptr, rate_grad ? rates.data() : nullptr})
        .run();
    if (weights_grad) divide_by_weights(data(grad_weights), *weights, problem);
    if (positions) {
      sum_leads(query_places.data(), a.n * a.distance.dims, lead_offsets(grad_query_pos, 2, problem.shape), data(grad_query_pos));
      sum_leads(key_places.data(), a.m * a.distance.dims, lead_offsets(grad_key_pos, 2, problem.shape), data(grad_key_pos));
    }
    if (rate_grad) sum_leads(rates.data(), 1, lead_offsets(grad_rate, 0, problem.shape), data(grad_rate));
  };
  if (a.dtype == DType::float64) run(double(0)); else run(float(0));
  if (query.scalar_type() != acc) {
    for (Tensor* t : {&grad_query, &grad_key, &grad_value}) *t = converted(*t, query.scalar_type());
  }
  return {grad_query, grad_key, grad_value, grad_weights, grad_query_pos, grad_key_pos, grad_rate};
}

// The gradients have all leading dimensions, those too along which an argument was broadcast.
std::tuple<Tensor, Tensor, Tensor, Tensor> plain_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                                          const Tensor& value, std::optional<Tensor> weights,
                                                          std::optional<Tensor> given_out, std::optional<Tensor> stats,
                                                          std::optional<double> scale, bool is_causal, bool weights_grad) {
  const Problem problem = plain_problem(query, key, value, weights, scale, is_causal);
  const AttentionProblem& a = problem.a;
  const ScalarType acc = accumulation_type(a.dtype);
  weights_grad &= weights.has_value();
  check_is(grad_out, query.scalar_type(), with_rows(problem.shape, a.n, a.dv), "grad_out: of out's dtype and sizes");
  STD_TORCH_CHECK(given_out.has_value() == stats.has_value(), "out and stats: both or none");
  const Tensor out = given_out ? *given_out : attend(problem, query.scalar_type(), nullptr, &stats);
  check_is(out, query.scalar_type(), with_rows(problem.shape, a.n, a.dv), "out: as the forward op returned it");
  check_is(*stats, acc, with_rows(problem.shape, a.n, 2), "stats: as the forward op returned it");
  std::vector<int64_t> keys = problem.shape;
  keys.push_back(a.m);
  Tensor grad_query = new_tensor(with_rows(problem.shape, a.n, a.d), acc);
  Tensor grad_key = new_cleared(query, with_rows(problem.shape, a.m, a.d), acc);
  Tensor grad_value = new_cleared(query, with_rows(problem.shape, a.m, a.dv), acc);
  Tensor grad_weights = weights_grad ? new_cleared(query, keys, acc) : new_tensor({0}, acc);
  const LeadOperand grad(grad_out, problem.shape);
  const AttentionGradients g = incoming(grad, nullptr, out, *stats);
  auto run = [&](auto zero) {
    using T = decltype(zero);
    auto data = [](Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); };
    T* to_weights = weights_grad ? data(grad_weights) : nullptr;
    BackwardRun<T>(problem, g, {data(grad_query), data(grad_key), data(grad_value), to_weights, nullptr, nullptr, nullptr}).run();
    if (weights_grad) divide_by_weights(to_weights, *weights, problem);
  };
  if (a.dtype == DType::float64) run(double(0)); else run(float(0));
  if (query.scalar_type() != acc) {
    for (Tensor* t : {&grad_query, &grad_key, &grad_value}) *t = converted(*t, query.scalar_type());
  }
  return {grad_query, grad_key, grad_value, grad_weights};
}

}  // namespace
}  // namespace continuum_ops

STABLE_TORCH_LIBRARY_IMPL(continuum_ops, CPU, m) {
  m.impl("continuum_attention_forward", TORCH_BOX(&continuum_ops::forward));
  m.impl("continuum_attention_plain", TORCH_BOX(&continuum_ops::plain));
  m.impl("continuum_attention_plain_forward", TORCH_BOX(&continuum_ops::plain_forward));
  m.impl("continuum_attention_plain_backward", TORCH_BOX(&continuum_ops::plain_backward));
  m.impl("continuum_attention_backward", TORCH_BOX(&continuum_ops::backward));
}
