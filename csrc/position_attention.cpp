// position_attention on CPU tensors: pair by pair or through a grid, head by head. The arithmetic is in position_attention_kernel.cpp and
// position_transform_kernel.cpp; schemas are defined in continuum_ops/ops/_library.py.
#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>
#include <vector>

#include "position_backward_run.h"
#include "position_problem.h"
#include "position_transform_head.h"

namespace continuum_ops {

std::atomic<Grids>& use_of_grids() {
  static std::atomic<Grids> use{Grids::when_faster};
  return use;
}

namespace {
std::atomic<int64_t> through{0};
}
int64_t heads_through_grids() { return through; }

namespace {

// Pair by pair, what the groups of the problem do not skip.
template <class T> void attend_directly(Problem<T>& problem, const PositionOutput& o) {
  const PositionProblem& a = problem.a;
  const PositionAttentionKernels& kernels = problem.kernels;
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
    if (block * LANE_BLOCK >= problem.data[i].g.query.count) return;
    kernels.forward(a, problem.data[i].g, o, i, block, part * chunk, std::min((part + 1) * chunk, panels), scratch);
  });
}

// The heads that go through a grid (position_transform.h): each on its own, and what it refuses pair by pair.
using Rows = std::vector<std::vector<int64_t>>;  // of each group
using Heads = std::vector<std::vector<uint8_t>>;  // of each group and head: whether it is not computed

constexpr int64_t MOST_REFUSED = 8;  // a head of which more than this share of rows is refused is computed pair by pair

TransformPoints points_of(const Problem<float>& problem, const Arguments& x, int64_t i) {
  const int64_t sample = x.query_pos.size(0) > 1 ? i : 0;
  return {point_rows(x.query_pos, sample), point_rows(x.key_pos, sample), row_of<float>(x.weights, i)};
}

// Runs f(group, head, transform) for each head that a grid serves; f returns whether it did. The rows that it left out are then
// f_rows's: (head, rows). Returns what is done; empty if nothing is.
template <class F, class G> Heads through_grids(const Problem<float>& problem, const Arguments& x, F f, G f_rows) {
  const PositionProblem& a = problem.a;
  if (few_points(a.n, a.m)) return {};  // of every group
  Heads done(problem.groups, std::vector<uint8_t>(a.heads, 0));
  for (int64_t h = 0; h < a.heads; ++h) {
    Rows refused(problem.groups);
    bool any = false;
    for (int64_t i = 0; i < problem.groups; ++i) {
      const PositionGroup& g = problem.data[i].g;
      const TransformPlan plan = plan_transform(a, g, a.rate[h]);
      if (!plan.use) continue;
      HeadTransform transform(a, g, points_of(problem, x, i), h, plan);
      for (int64_t j = 0; j < a.n; ++j) {
        if (transform.refused()[j]) refused[i].push_back(j);
      }
      if (int64_t(refused[i].size()) * MOST_REFUSED > a.n || !f(i, h, transform)) {
        refused[i].clear();
        continue;
      }
      done[i][h] = 1, ++through;
      any = any || !refused[i].empty();
    }
    if (any) f_rows(h, refused);
  }
  return done;
}

bool all_of(const Heads& heads) {
  for (const auto& group : heads) {
    if (std::count(group.begin(), group.end(), 0) > 0) return false;
  }
  return !heads.empty();
}

bool any_of(const Heads& heads) {
  for (const auto& group : heads) {
    if (std::count(group.begin(), group.end(), 1) > 0) return true;
  }
  return false;
}

template <class T> void skip(Problem<T>& problem, const Heads& heads) {
  for (size_t i = 0; i < heads.size(); ++i) problem.data[i].g.skip = heads[i].data();
}

Heads all_but(const Problem<float>& problem, int64_t head) {
  std::vector<uint8_t> skipped(problem.a.heads, 1);
  skipped[head] = 0;
  return Heads(problem.groups, skipped);
}

// Distance^2 of each query to its nearest key, (groups, n).
Buffer<float> nearest_keys(const Problem<float>& problem) {
  const PositionProblem& a = problem.a;
  const int64_t blocks = problem.lane_blocks();
  Buffer<float> nearest(problem.groups * a.n);
  const Buffer<float> shift(problem.groups * a.heads * blocks * LANE_BLOCK);
  size_t scratch_bytes = 0;
  for (const GroupData<float>& d : problem.data) scratch_bytes = std::max(scratch_bytes, problem.kernels.forward_scratch(a, d.g, 0));
  run_tasks(problem.groups * blocks, double(problem.groups) * a.n * a.m, scratch_bytes, [&](int64_t t, void* scratch) {
    const int64_t i = t / blocks, block = t % blocks;
    const PositionGroup& g = problem.data[i].g;
    alignas(64) float found[LANE_BLOCK], apart[LANE_BLOCK];
    problem.kernels.near_keys(a, g, block, found, apart, shift.get() + i * a.heads * blocks * LANE_BLOCK, scratch);
    for (int64_t j = block * LANE_BLOCK; j < std::min((block + 1) * LANE_BLOCK, g.query.count); ++j) {
      nearest[i * a.n + g.query.place[j]] = found[j - block * LANE_BLOCK];
    }
  });
  return nearest;
}

// Makes lse and stats where they are wanted.
template <class T>
Tensor forward(Problem<T>& problem, const Arguments& x, std::optional<Tensor>* lse, std::optional<Tensor>* stats) {
  const PositionProblem& a = problem.a;
  Tensor out = new_tensor({problem.batch, a.heads, a.n, a.c}, x.value.scalar_type());
  if (lse) *lse = new_tensor({problem.groups, a.heads, a.n}, problem.type);
  if (stats) *stats = new_tensor({problem.groups, a.heads, a.n, 2}, problem.type);
  const PositionOutput o{out.mutable_data_ptr(), lse ? (*lse)->mutable_data_ptr() : nullptr,
                         stats ? (*stats)->mutable_data_ptr() : nullptr};
  Heads done;
  if constexpr (sizeof(T) == 4) {
    Buffer<float> nearest;
    auto attend = [&](int64_t i, int64_t, const HeadTransform& transform) {
      if (stats && !nearest.get()) nearest = nearest_keys(problem);
      return transform.forward(o, i, stats ? nearest.get() + i * a.n : nullptr);
    };
    done = through_grids(problem, x, attend, [&](int64_t h, const Rows& rows) {
      Problem<float> refused(x, &rows);
      const Heads others = all_but(problem, h);
      skip(refused, others);
      attend_directly(refused, o);
    });
    if (all_of(done)) return out;
    skip(problem, done);
  }
  attend_directly(problem, o);
  for (GroupData<T>& d : problem.data) d.g.skip = nullptr, d.g.value = nullptr, d.g.special_value = nullptr;  // which end here
  return out;
}

// Where gradients are added, T; null where not wanted. An argument that the batch shares has one sum for all groups.
template <class T> struct Gradients {
  T *query, *key, *value, *rate, *log_weights;
  bool query_shared, key_shared, weights_shared;
};

template <class T> struct BackwardInputs {
  const Tensor& grad_out;
  const T* grad_lse;
  const void* out;
  const T* stats;
};

// Pair by pair. `apart`: to.value has sums already, which the kernels would write over.
template <class T> void add_directly(BackwardRun<T>& run, const BackwardInputs<T>& in, const Gradients<T>& to, bool apart) {
  const PositionProblem& a = run.a;
  const int64_t size = apart && to.value ? run.problem.batch * a.value_heads * a.m * a.c : 0;
  const Buffer<T> value(size, T(0));
  run.run(in.grad_out, in.grad_lse, in.out, in.stats, size > 0 ? value.get() : to.value);
  for (int64_t i = 0; i < size; ++i) to.value[i] += value[i];
  if (to.query) run.query_positions(to.query, to.query_shared);
  if (to.key) run.key_positions(to.key, to.key_shared);
  if (to.rate) run.rates(to.rate);
  if (to.log_weights) run.log_weights(to.log_weights, to.weights_shared);
}

// One head of group i through a grid; false if something is not finite.
bool add_through_grid(const Problem<float>& problem, const BackwardInputs<float>& in, const Gradients<float>& to, int64_t i, int64_t head,
                      HeadTransform& transform) {
  const PositionProblem& a = problem.a;
  const View grad(in.grad_out);
  const int64_t size = element_size(grad.scalar_type());
  const char* from = static_cast<const char*>(grad.const_data_ptr()) +
                     (problem.data[i].g.first_entry * grad.stride(0) + head * grad.stride(1)) * size;
  const TransformField grad_out{a.dtype, const_cast<char*>(from), grad.stride(0), grad.stride(2), grad.stride(3), a.c};
  const bool scores = to.query || to.key || to.rate || to.log_weights;
  const float* grad_lse = in.grad_lse ? in.grad_lse + (i * a.heads + head) * a.n : nullptr;
  if (!transform.prepare(grad_out, in.out, grad_lse, scores)) return false;
  std::vector<double> bias = zeros_of<double>(to.log_weights ? a.m : 0), query = zeros_of<double>(to.query ? a.n * a.d : 0);
  std::vector<double> key = zeros_of<double>(to.key ? a.m * a.d : 0);
  double rate = 0;
  TransformGradients sums;
  if (to.value) sums.value = to.value + i * a.entries * a.value_heads * a.m * a.c;
  if (to.log_weights) sums.bias = bias.data();
  if (to.query) sums.query = query.data();
  if (to.key) sums.key = key.data();
  if (to.rate) sums.rate = &rate;
  transform.backward(grad_out, sums);
  auto add = [&](float* at, bool shared, const std::vector<double>& x) {
    at += shared ? 0 : i * int64_t(x.size());
    for (size_t k = 0; k < x.size(); ++k) at[k] += float(x[k]);
  };
  if (to.log_weights) add(to.log_weights, to.weights_shared, bias);
  if (to.query) add(to.query, to.query_shared, query);
  if (to.key) add(to.key, to.key_shared, key);
  if (to.rate) to.rate[head] += float(rate);
  return true;
}

template <class T>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_out, const std::optional<Tensor>& grad_lse,
                                                            const Arguments& x, std::optional<Tensor> given_out,
                                                            std::optional<Tensor> given_stats, const std::vector<bool>& needs) {
  STD_TORCH_CHECK(needs.size() == 5, "needs: one for each of query_pos, key_pos, value, rate, weights");
  const bool weights_grad = needs[4] && x.weights.has_value();
  const bool scores = needs[0] || needs[1] || needs[3] || weights_grad;
  BackwardRun<T> run(x, needs[2], scores);
  STD_TORCH_CHECK(given_out.has_value() == given_stats.has_value(), "out and stats: both or none");
  const Tensor out = given_out ? *given_out : forward(run.problem, x, nullptr, &given_stats), stats = *given_stats;
  STD_TORCH_CHECK(out.is_contiguous() && stats.is_contiguous(), "out and stats: as the forward op returned them");
  const ScalarType type = run.problem.type;
  const PositionProblem& a = run.problem.a;
  const int64_t groups = run.problem.groups;
  check_is(grad_out, x.value.scalar_type(), {run.problem.batch, a.heads, a.n, a.c}, "grad_out: of out's dtype and sizes");
  check_is(out, x.value.scalar_type(), {run.problem.batch, a.heads, a.n, a.c}, "out: as the forward op returned it");
  check_is(stats, type, {groups, a.heads, a.n, 2}, "stats: as the forward op returned it");
  if (grad_lse) check_is(*grad_lse, type, {groups, a.heads, a.n}, "grad_lse: of lse's dtype and sizes");
  auto data = [](std::optional<Tensor>& t) { return t ? static_cast<T*>(t->mutable_data_ptr()) : nullptr; };
  auto single = [&](const View& t) { return t.size(0) == 1 && groups != 0; };
  auto cleared = [&](bool need, const View& like) {
    return need ? std::optional(new_cleared(x.like, like.own_sizes(), type)) : std::nullopt;
  };
  std::optional<Tensor> query = cleared(needs[0], x.query_pos), key = cleared(needs[1], x.key_pos), value = cleared(needs[2], x.value);
  std::optional<Tensor> rate = cleared(needs[3], x.rate), weights = weights_grad ? cleared(true, *x.weights) : std::nullopt;
  const Gradients<T> to{data(query), data(key), data(value), data(rate), data(weights), single(x.query_pos), single(x.key_pos),
                        weights_grad && single(*x.weights)};
  if (needs[2] || scores) {
    std::optional<Tensor> lse_rows;
    if (grad_lse) lse_rows = torch::stable::contiguous(*grad_lse);
    const BackwardInputs<T> in{grad_out, lse_rows ? static_cast<const T*>(lse_rows->const_data_ptr()) : nullptr, out.const_data_ptr(),
                               static_cast<const T*>(stats.const_data_ptr())};
    Heads done;
    if constexpr (sizeof(T) == 4) {
      auto add = [&](int64_t i, int64_t h, HeadTransform& transform) { return add_through_grid(run.problem, in, to, i, h, transform); };
      done = through_grids(run.problem, x, add, [&](int64_t h, const Rows& rows) {
        BackwardRun<float> refused(x, needs[2], scores, &rows);
        const Heads others = all_but(run.problem, h);
        skip(refused.problem, others);
        add_directly(refused, in, to, true);
      });
      skip(run.problem, done);
    }
    if (!all_of(done)) add_directly(run, in, to, any_of(done));
  }
  if (weights_grad) {
    T* at = data(weights);
    for (int64_t i = 0; i < (to.weights_shared ? 1 : groups); ++i) {
      const Row<T> row = row_of<T>(x.weights, i);
      for (int64_t k = 0; k < a.m; ++k) at[i * a.m + k] = row[k] == T(0) ? T(0) : at[i * a.m + k] / row[k];
    }
  }
  auto result = [&](std::optional<Tensor>& t, ScalarType wanted) {
    if (!t) return new_tensor({0}, x.value.scalar_type());  // outputs must not share memory
    return wanted == type ? *t : converted(*t, wanted);
  };
  return {result(query, x.query_pos.scalar_type()), result(key, x.key_pos.scalar_type()), result(value, x.value.scalar_type()),
          result(rate, type), result(weights, type)};
}

using Period = std::optional<std::vector<double>>;
using GradientTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Tensor forward_any(const Arguments& x, std::optional<Tensor>* lse, std::optional<Tensor>* stats) {
  auto run = [&](auto zero) {
    Problem<decltype(zero)> problem(x);
    return forward(problem, x, lse, stats);
  };
  return x.value.scalar_type() == ScalarType::Double ? run(double(0)) : run(float(0));
}

GradientTensors backward_any(const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Arguments& x,
                       const std::optional<Tensor>& out, const std::optional<Tensor>& stats, const std::vector<bool>& needs) {
  return x.value.scalar_type() == ScalarType::Double ? backward<double>(grad_out, grad_lse, x, out, stats, needs)
                                                     : backward<float>(grad_out, grad_lse, x, out, stats, needs);
}

Arguments arguments(const Tensor& query_pos, const Tensor& key_pos, const Tensor& value, const Tensor& rate,
                    const std::optional<Tensor>& weights, const std::optional<Tensor>& radius, const Period& period) {
  return {View(query_pos), View(key_pos),   View(value),                   View(rate),
          view_of(weights), view_of(radius), period ? &*period : nullptr, value};
}

// As users pass them: (N, d) and (M, d), or (B, N, d) and (B, M, d), then (B, M, C) or (B, H, M, C), (H,), (M,) or (B, M).
Arguments plain_arguments(const Tensor& query_pos, const Tensor& key_pos, const Tensor& value, const Tensor& rate,
                          const std::optional<Tensor>& weights) {
  auto batched = [&](const Tensor& t, int64_t dims) {
    STD_TORCH_CHECK(t.dim() < dims || t.size(0) == value.size(0), "positions and weights: for all samples, or as many as value has");
    return View(t, t.dim() < dims ? 0 : -1);
  };
  return {batched(query_pos, 3), batched(key_pos, 3), View(value, value.dim() == 3 ? 1 : -1), View(rate),
          weights ? std::optional(batched(*weights, 2)) : std::nullopt, std::nullopt, nullptr, value};
}

std::tuple<Tensor, Tensor, Tensor> forward_op(const Tensor& query_pos, const Tensor& key_pos, const Tensor& value, const Tensor& rate,
                                              std::optional<Tensor> weights, std::optional<Tensor> radius, Period period) {
  std::optional<Tensor> lse, stats;
  Tensor out = forward_any(arguments(query_pos, key_pos, value, rate, weights, radius, period), &lse, &stats);
  return {out, *lse, *stats};
}

GradientTensors backward_op(const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& query_pos, const Tensor& key_pos,
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

GradientTensors plain_backward(const Tensor& grad_out, const Tensor& query_pos, const Tensor& key_pos, const Tensor& value, const Tensor& rate,
                         std::optional<Tensor> weights, std::optional<Tensor> out, std::optional<Tensor> stats, std::vector<bool> needs) {
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
