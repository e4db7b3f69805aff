// continuum_attention on CPU tensors: checks, allocation, and the split into tasks. The arithmetic is in
// continuum_attention_kernel.cpp; schemas are defined in continuum_ops/ops/_library.py.
#include "continuum_attention.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cfloat>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu_isa.h"
#include "parallel.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace continuum_ops {
namespace {

DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::float32;
    case ScalarType::Double: return DType::float64;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Half: return DType::float16;
    default: throw std::invalid_argument("query must be float64, float32, bfloat16 or float16");
  }
}

ScalarType accumulation_type(DType t) { return t == DType::float64 ? ScalarType::Double : ScalarType::Float; }

// Offsets of the leads of a tensor (*leads, ...) with `trailing` further dimensions.
std::vector<int64_t> lead_offsets(const Tensor& t, int64_t trailing) {
  std::vector<int64_t> offsets{0};
  for (int64_t dim = 0; dim < t.dim() - trailing; ++dim) {
    std::vector<int64_t> next;
    next.reserve(offsets.size() * t.size(dim));
    for (const int64_t o : offsets) {
      for (int64_t i = 0; i < t.size(dim); ++i) next.push_back(o + i * t.stride(dim));
    }
    offsets = std::move(next);
  }
  return offsets;
}

struct LeadOperand {
  std::vector<int64_t> offsets;
  Operand operand;

  explicit LeadOperand(const Tensor& t) : offsets(lead_offsets(t, 2)) {
    operand = {t.const_data_ptr(), offsets.data(), t.stride(t.dim() - 2), t.stride(t.dim() - 1)};
  }
};

std::vector<int64_t> sizes_of(const Tensor& t, int64_t dims) {
  std::vector<int64_t> s;
  for (int64_t i = 0; i < dims; ++i) s.push_back(t.size(i));
  return s;
}

// The keys that exist, lead by lead. Leads that share weights and key mask share index and bias.
class KeySets {
 public:
  std::vector<KeySet> sets;

  template <class T>
  void build(const Tensor* weights, const Tensor* key_mask, int64_t leads, int64_t m) {
    const std::vector<int64_t> w_offset = weights ? lead_offsets(*weights, 1) : std::vector<int64_t>(leads, 0);
    const std::vector<int64_t> mask_offset = key_mask ? lead_offsets(*key_mask, 2) : std::vector<int64_t>(leads, 0);
    sets.resize(leads);
    for (int64_t lead = 0; lead < leads; ++lead) {
      if (lead > 0 && w_offset[lead] == w_offset[lead - 1] && mask_offset[lead] == mask_offset[lead - 1]) {
        sets[lead] = sets[lead - 1];
        continue;
      }
      sets[lead].count = m;
      if (m == 0 || (!weights && !key_mask)) continue;
      const T* w = weights ? static_cast<const T*>(weights->const_data_ptr()) + w_offset[lead] : nullptr;
      const int64_t w_stride = weights ? weights->stride(weights->dim() - 1) : 0;
      const uint8_t* mask = key_mask ? static_cast<const uint8_t*>(key_mask->const_data_ptr()) + mask_offset[lead] : nullptr;
      const int64_t mask_stride = key_mask ? key_mask->stride(key_mask->dim() - 1) : 0;
      build_one<T>(sets[lead], w, w_stride, mask, mask_stride, m);
    }
  }

 private:
  std::vector<std::vector<int64_t>> indices_;
  std::vector<std::vector<float>> float_biases_;
  std::vector<std::vector<double>> double_biases_;

  template <class T>
  void build_one(KeySet& set, const T* w, int64_t w_stride, const uint8_t* mask, int64_t mask_stride, int64_t m) {
    auto alive = [&](int64_t k) { return (!w || w[k * w_stride] != T(0)) && (!mask || mask[k * mask_stride]); };
    T most = 0, least = std::numeric_limits<T>::infinity();
    int64_t count = 0;
    for (int64_t k = 0; k < m; ++k) {
      if (w && !(w[k * w_stride] >= T(0) && w[k * w_stride] <= std::numeric_limits<T>::max())) {
        throw std::invalid_argument("continuum_attention: weights must be >= 0 and finite, got " + std::to_string(w[k * w_stride]) +
                                    " for key " + std::to_string(k));
      }
      if (!alive(k)) continue;
      ++count;
      if (w) {
        most = std::max(most, w[k * w_stride]);
        least = std::min(least, w[k * w_stride]);
      }
    }
    set.count = count;
    if (count < m) {
      std::vector<int64_t>& index = indices_.emplace_back();
      index.reserve(count);
      for (int64_t k = 0; k < m; ++k) {
        if (alive(k)) index.push_back(k);
      }
      set.index = index.data();
    }
    if (!w || count == 0) return;
    set.log2_max_weight = std::log2(double(most));
    if (least == most) return;
    auto& biases = [this]() -> auto& {
      if constexpr (sizeof(T) == 4) return float_biases_; else return double_biases_;
    }();
    std::vector<T>& bias = biases.emplace_back(count);
    for (int64_t j = 0; j < count; ++j) {
      const double x = w[(set.index ? set.index[j] : j) * w_stride], ratio = x / double(most);
      bias[j] = T(ratio >= DBL_MIN ? std::log2(ratio) : std::log2(x) - set.log2_max_weight);
    }
    set.min_bias = std::log2(double(least)) - set.log2_max_weight;
    set.bias = bias.data();
  }
};

struct Problem {
  LeadOperand query, key, value;
  std::optional<LeadOperand> mask;
  KeySets keys;
  AttentionProblem a;

  Problem(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& weights, const std::optional<Tensor>& attn_mask,
          const std::optional<Tensor>& seed, double scale, double dropout_p, bool is_causal)
      : query(q), key(k), value(v) {
    STD_TORCH_CHECK(q.dim() >= 2 && k.dim() == q.dim() && v.dim() == q.dim(), "query, key, value: the same number of dimensions, at least 2");
    a.dtype = dtype_of(q);
    STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "query, key, value: one dtype");
    const int64_t dims = q.dim();
    a.n = q.size(dims - 2), a.d = q.size(dims - 1), a.m = k.size(dims - 2), a.dv = v.size(dims - 1);
    STD_TORCH_CHECK(k.size(dims - 1) == a.d && v.size(dims - 2) == a.m, "key: (*L, M, D), value: (*L, M, Dv)");
    STD_TORCH_CHECK(!weights || (weights->scalar_type() == accumulation_type(a.dtype) && weights->dim() == dims - 1 &&
                                 weights->size(dims - 2) == a.m), "weights: (*L, M) in the accumulation dtype");
    STD_TORCH_CHECK(!attn_mask || (attn_mask->scalar_type() == ScalarType::Bool && attn_mask->dim() == dims &&
                                   attn_mask->size(dims - 2) == a.n && attn_mask->size(dims - 1) == a.m), "attn_mask: bool (*L, N, M)");
    for (int64_t i = 0; i < dims - 2; ++i) {
      STD_TORCH_CHECK(k.size(i) == q.size(i) && v.size(i) == q.size(i) && (!weights || weights->size(i) == q.size(i)) &&
                      (!attn_mask || attn_mask->size(i) == q.size(i)), "leading dimensions must be equal (expand them)");
    }
    STD_TORCH_CHECK(dropout_p == 0 || (seed && seed->numel() == 1 && seed->scalar_type() == ScalarType::Long), "seed: one int64");
    a.leads = int64_t(query.offsets.size());
    a.query = query.operand, a.key = key.operand, a.value = value.operand;
    a.scale = scale, a.is_causal = is_causal, a.dropout_p = dropout_p;
    a.seed = dropout_p > 0 ? uint64_t(*static_cast<const int64_t*>(seed->const_data_ptr())) : 0;

    // A mask that is the same for every query removes keys; only one that differs needs a look per score.
    const bool masked = attn_mask && a.n > 0 && a.m > 0;  // an empty mask has no data to look at
    const bool key_mask = masked && (attn_mask->stride(dims - 2) == 0 || a.n == 1);
    if (masked && !key_mask) {
      mask.emplace(*attn_mask);
      a.mask = mask->operand;
    }
    const Tensor* w = weights ? &*weights : nullptr;
    const Tensor* removed = key_mask ? &*attn_mask : nullptr;
    if (a.dtype == DType::float64) keys.build<double>(w, removed, a.leads, a.m);
    else keys.build<float>(w, removed, a.leads, a.m);
    a.keys = keys.sets.data();

    const ContinuumAttentionKernels& kernels = continuum_attention_kernels();
    if (a.n >= 16) {
      run_tasks(a.leads, double(a.leads) * a.m * a.d, 0,
                [&](int64_t lead, void*) { keys.sets[lead].max_norm = kernels.max_norm(a, lead, keys.sets[lead]); });
    } else {
      for (KeySet& s : keys.sets) s.max_norm = std::numeric_limits<double>::infinity();
    }
  }

  double scores() const { return double(a.leads) * a.n * a.m; }
};

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> weights,
                                           std::optional<Tensor> attn_mask, std::optional<Tensor> query_pos,
                                           std::optional<Tensor> key_pos, std::optional<Tensor> rate, std::optional<Tensor> radius,
                                           std::optional<Tensor> seed, std::optional<std::vector<double>> period, double scale,
                                           double dropout_p, bool is_causal) {
  STD_TORCH_CHECK(!query_pos && !key_pos && !rate && !radius && !period, "positions are served by the chunked operator");
  const Problem problem(query, key, value, weights, attn_mask, seed, scale, dropout_p, is_causal);
  const AttentionProblem& a = problem.a;
  const ContinuumAttentionKernels& kernels = continuum_attention_kernels();
  std::vector<int64_t> shape = sizes_of(query, query.dim() - 1);
  const ScalarType acc = accumulation_type(a.dtype);
  Tensor lse = torch::stable::new_empty(query, shape, acc);
  shape.push_back(2);
  Tensor stats = torch::stable::new_empty(query, shape, acc);
  shape.back() = a.dv;
  Tensor out = torch::stable::new_empty(query, shape);
  const AttentionOutput o{out.mutable_data_ptr(), lse.mutable_data_ptr(), stats.mutable_data_ptr()};

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
  return {out, lse, stats};
}

// d / d w_k = (d / d log w_k) / w_k, and 0 where the key does not exist.
template <class T> void divide_by_weights(T* grad, const Tensor& weights, const AttentionProblem& a) {
  const std::vector<int64_t> offsets = lead_offsets(weights, 1);
  const int64_t stride = weights.stride(weights.dim() - 1);
  for (int64_t lead = 0; lead < a.leads; ++lead) {
    const T* w = static_cast<const T*>(weights.const_data_ptr()) + offsets[lead];
    for (int64_t k = 0; k < a.m; ++k) grad[lead * a.m + k] = w[k * stride] == T(0) ? T(0) : grad[lead * a.m + k] / w[k * stride];
  }
}

// How the backward pass is cut into tasks. Each task owns the sums it writes; where two tasks share a sum, each writes a
// part of its own and the parts are added in a fixed order: the bits do not depend on which thread ran what.
template <class T> class BackwardRun {
 public:
  BackwardRun(const Problem& problem, const AttentionGradients& shared, T* grad_query, T* grad_key, T* grad_value, T* grad_bias)
      : a_(problem.a), kernels_(continuum_attention_kernels()), shared_(shared), grad_query_(grad_query), grad_key_(grad_key),
        grad_value_(grad_value), grad_bias_(grad_bias), work_(problem.scores() * (3 * a_.d + 2 * a_.dv)),
        scratch_(kernels_.scratch_bytes(a_, true)) {}

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
  T *grad_query_, *grad_key_, *grad_value_, *grad_bias_;
  const double work_;
  const size_t scratch_;

  AttentionGradients task(int64_t lead) const {
    AttentionGradients g = shared_;
    g.lead = lead;
    g.key_begin = 0, g.key_end = a_.keys[lead].count, g.query_begin = 0, g.query_end = a_.n;
    g.grad_query = grad_query_ + lead * a_.n * a_.d;
    g.grad_key = grad_key_ + lead * a_.m * a_.d;
    g.grad_value = grad_value_ + lead * a_.m * a_.dv;
    g.grad_bias = grad_bias_ ? grad_bias_ + lead * a_.m : nullptr;
    return g;
  }

  void by_lead() {
    run_tasks(a_.leads, work_, scratch_, [&](int64_t lead, void* scratch) { kernels_.backward(a_, task(lead), scratch); });
  }

  // Many keys: a task owns a range of keys; its part of grad_query lives for a strip of queries only.
  void by_keys(int64_t parts) {
    const int64_t strip = std::min<int64_t>(a_.n, 4096), block = kernels_.key_block;
    std::vector<T> partial(a_.leads * parts * strip * a_.d);
    for (int64_t begin = 0; begin < a_.n; begin += strip) {
      const int64_t end = std::min(a_.n, begin + strip);
      run_tasks(a_.leads * parts, work_, scratch_, [&](int64_t t, void* scratch) {
        const int64_t lead = t / parts, part = t % parts, blocks = (a_.keys[lead].count + block - 1) / block;
        AttentionGradients g = task(lead);
        g.key_begin = std::min(blocks * part / parts * block, a_.keys[lead].count);
        g.key_end = std::min(blocks * (part + 1) / parts * block, a_.keys[lead].count);
        g.query_begin = begin, g.query_end = end;
        g.grad_query = partial.data() + t * strip * a_.d;
        kernels_.backward(a_, g, scratch);
      });
      run_tasks(a_.leads, double(a_.leads) * parts * (end - begin) * a_.d, 0, [&](int64_t lead, void*) {
        add_parts(partial.data() + lead * parts * strip * a_.d, parts, strip * a_.d, (end - begin) * a_.d,
                  grad_query_ + (lead * a_.n + begin) * a_.d);
      });
    }
  }

  // Few keys: a task owns a range of queries and has its own sums over the keys.
  void by_queries(int64_t parts) {
    parts = std::max<int64_t>(1, std::min(parts, a_.n / 64));
    const int64_t width = a_.m * (a_.d + a_.dv + 1);
    std::vector<T> partial(a_.leads * parts * width);
    run_tasks(a_.leads * parts, work_, scratch_, [&](int64_t t, void* scratch) {
      const int64_t lead = t / parts, part = t % parts;
      AttentionGradients g = task(lead);
      T* own = partial.data() + t * width;
      g.query_begin = a_.n * part / parts, g.query_end = a_.n * (part + 1) / parts;
      g.grad_query = grad_query_ + (lead * a_.n + g.query_begin) * a_.d;
      g.grad_key = own, g.grad_value = own + a_.m * a_.d;
      if (g.grad_bias) g.grad_bias = own + a_.m * (a_.d + a_.dv);
      kernels_.backward(a_, g, scratch);
    });
    for (int64_t lead = 0; lead < a_.leads; ++lead) {
      const T* own = partial.data() + lead * parts * width;
      const AttentionGradients g = task(lead);
      add_parts(own, parts, width, a_.m * a_.d, static_cast<T*>(g.grad_key));
      add_parts(own + a_.m * a_.d, parts, width, a_.m * a_.dv, static_cast<T*>(g.grad_value));
      if (g.grad_bias) add_parts(own + a_.m * (a_.d + a_.dv), parts, width, a_.m, static_cast<T*>(g.grad_bias));
    }
  }

  static void add_parts(const T* part, int64_t parts, int64_t stride, int64_t count, T* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = part[i];
    for (int64_t p = 1; p < parts; ++p) {
      for (int64_t i = 0; i < count; ++i) to[i] += part[p * stride + i];
    }
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    std::optional<Tensor> weights, std::optional<Tensor> attn_mask, std::optional<Tensor> query_pos, std::optional<Tensor> key_pos,
    std::optional<Tensor> rate, std::optional<Tensor> radius, std::optional<Tensor> seed, const Tensor& out, const Tensor& stats,
    std::optional<std::vector<double>> period, double scale, double dropout_p, bool is_causal, bool weights_grad, bool positions_grad,
    bool rate_grad) {
  STD_TORCH_CHECK(!query_pos && !key_pos && !rate && !radius && !period, "positions are served by the chunked operator");
  const Problem problem(query, key, value, weights, attn_mask, seed, scale, dropout_p, is_causal);
  const AttentionProblem& a = problem.a;
  STD_TORCH_CHECK(out.is_contiguous() && stats.is_contiguous(), "out and stats: as the forward op returned them");
  const ScalarType acc = accumulation_type(a.dtype);
  auto zeros = [&](const Tensor& like) { return torch::stable::new_zeros(query, sizes_of(like, like.dim()), acc); };
  Tensor grad_query = torch::stable::new_empty(query, sizes_of(query, query.dim()), acc);
  Tensor grad_key = zeros(key), grad_value = zeros(value);
  weights_grad &= weights.has_value();
  Tensor grad_weights = weights_grad ? zeros(*weights) : torch::stable::new_empty(query, {0}, acc);
  std::optional<Tensor> grad_lse_rows;
  if (grad_lse) grad_lse_rows = torch::stable::contiguous(*grad_lse);

  const LeadOperand grad(grad_out);
  AttentionGradients g{};
  g.grad_out = grad.operand;
  g.grad_lse = grad_lse_rows ? grad_lse_rows->const_data_ptr() : nullptr;
  g.out = out.const_data_ptr();
  g.stats = stats.const_data_ptr();
  auto run = [&](auto zero) {
    using T = decltype(zero);
    auto data = [](Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); };
    BackwardRun<T>(problem, g, data(grad_query), data(grad_key), data(grad_value), weights_grad ? data(grad_weights) : nullptr).run();
    if (weights_grad) divide_by_weights(data(grad_weights), *weights, a);
  };
  if (a.dtype == DType::float64) run(double(0)); else run(float(0));
  if (query.scalar_type() != acc) {
    for (Tensor* t : {&grad_query, &grad_key, &grad_value}) *t = torch::stable::to(*t, query.scalar_type());
  }
  auto none = [&] { return torch::stable::new_empty(query, {0}, acc); };
  return {grad_query, grad_key, grad_value, grad_weights, none(), none(), none()};
}

}  // namespace
}  // namespace continuum_ops

STABLE_TORCH_LIBRARY_IMPL(continuum_ops, CPU, m) {
  m.impl("continuum_attention_forward", TORCH_BOX(&continuum_ops::forward));
  m.impl("continuum_attention_backward", TORCH_BOX(&continuum_ops::backward));
}
