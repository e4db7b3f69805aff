// galerkin_attention of small problems on CPU tensors: checks, allocation, one task per lead. The arithmetic is in
// galerkin_attention_kernel.cpp; larger problems are products of torch's own, where BLAS is the faster.
#include "galerkin_attention.h"

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "cpu_isa.h"
#include "parallel.h"
#include "tensors.h"

namespace continuum_ops {
namespace {

struct Problem {
  GalerkinProblem p;
  ScalarType type;
  std::vector<int64_t> shape, query, key, value, weights;  // shape of the leads; offsets
  const Tensor &q, &k, &v;
  std::optional<Tensor> w;  // expanded to (*L, M)

  Problem(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& given)
      : type(q.scalar_type()), q(q), k(k), v(v) {
    const int64_t dims = q.dim();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double, "query: float32 or float64");
    STD_TORCH_CHECK(dims >= 2 && k.dim() == dims && v.dim() == dims && k.scalar_type() == type && v.scalar_type() == type,
                    "query, key, value: one dtype, as many dimensions, at least 2");
    p = {type == ScalarType::Double, q.size(dims - 2), k.size(dims - 2), q.size(dims - 1), v.size(dims - 1)};
    STD_TORCH_CHECK(k.size(dims - 1) == p.d && v.size(dims - 2) == p.m, "key: (*L, M, D), value: (*L, M, Dv)");
    shape = sizes_of(q, dims - 2);
    // Not broadcast: the gradients are those of each lead.
    STD_TORCH_CHECK(sizes_of(k, dims - 2) == shape && sizes_of(v, dims - 2) == shape,
                    "leading dimensions of query, key and value must be equal (expand them)");
    query = lead_offsets(q, 2, shape), key = lead_offsets(k, 2, shape), value = lead_offsets(v, 2, shape);
    if (!given) return;
    STD_TORCH_CHECK(given->scalar_type() == type, "weights: query's dtype");
    std::vector<int64_t> rows = shape;
    rows.push_back(p.m);
    w = expanded(*given, rows);
    weights = lead_offsets(*w, 1, shape);
    p.wide ? check_weights<double>() : check_weights<float>();
  }

  int64_t leads() const { return int64_t(query.size()); }
  double work() const { return double(leads()) * double(p.n + p.m) * double(p.d) * double(p.dv); }

  GalerkinLead lead(int64_t i) const {
    GalerkinLead x;
    x.query = matrix(q, query[i]), x.key = matrix(k, key[i]), x.value = matrix(v, value[i]);
    if (w) x.weights = at(w->const_data_ptr(), weights[i]), x.weights_stride = w->stride(w->dim() - 1);
    return x;
  }

  GalerkinMatrix matrix(const Tensor& t, int64_t offset) const {
    return {at(t.const_data_ptr(), offset), t.stride(t.dim() - 2), t.stride(t.dim() - 1)};
  }
  template <class P> P* at(P* data, int64_t offset) const {
    using Byte = std::conditional_t<std::is_const_v<P>, const char, char>;
    return static_cast<P*>(static_cast<Byte*>(data) + offset * (p.wide ? 8 : 4));
  }

 private:
  template <class T> void check_weights() const {
    const int64_t stride = w->stride(w->dim() - 1);
    for (size_t i = 0; i < weights.size(); ++i) {
      if (i > 0 && weights[i] == weights[i - 1]) continue;
      const T* row = static_cast<const T*>(w->const_data_ptr()) + weights[i];
      for (int64_t j = 0; j < p.m; ++j) {
        if (row[j * stride] >= T(0) && row[j * stride] <= std::numeric_limits<T>::max()) continue;
        throw std::invalid_argument("weights must be >= 0 and finite, got " + std::to_string(row[j * stride]));
      }
    }
  }
};

Tensor forward(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> weights) {
  const Problem problem(query, key, value, weights);
  const GalerkinProblem& p = problem.p;
  const GalerkinAttentionKernels& kernels = galerkin_attention_kernels();
  std::vector<int64_t> sizes = problem.shape;
  sizes.push_back(p.n), sizes.push_back(p.dv);
  Tensor out = new_tensor(sizes, problem.type);
  void* const to = out.mutable_data_ptr();
  run_tasks(problem.leads(), problem.work(), kernels.scratch_bytes(p), [&](int64_t i, void* scratch) {
    GalerkinLead x = problem.lead(i);
    x.out = problem.at(to, i * p.n * p.dv);
    kernels.forward(p, x, scratch);
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
                                                    std::optional<Tensor> weights, bool weights_grad) {
  const Problem problem(query, key, value, weights);
  const GalerkinProblem& p = problem.p;
  const GalerkinAttentionKernels& kernels = galerkin_attention_kernels();
  std::vector<int64_t> sizes = problem.shape;
  sizes.push_back(p.n), sizes.push_back(p.dv);
  check_is(grad_out, problem.type, sizes, "grad_out: (*L, N, Dv), query's dtype");
  const std::vector<int64_t> offsets = lead_offsets(grad_out, 2, problem.shape);
  weights_grad &= weights.has_value();
  auto like = [&](const Tensor& t) { return new_tensor(sizes_of(t, t.dim()), problem.type); };
  Tensor grads[4] = {like(query), like(key), like(value), weights_grad ? like(*problem.w) : new_tensor({0}, problem.type)};
  void* to[4];
  for (int i = 0; i < 4; ++i) to[i] = grads[i].mutable_data_ptr();
  run_tasks(problem.leads(), 3 * problem.work(), kernels.scratch_bytes(p), [&](int64_t i, void* scratch) {
    GalerkinLead x = problem.lead(i);
    x.grad_out = problem.matrix(grad_out, offsets[i]);
    x.grad_query = problem.at(to[0], i * p.n * p.d), x.grad_key = problem.at(to[1], i * p.m * p.d);
    x.grad_value = problem.at(to[2], i * p.m * p.dv);
    if (weights_grad) x.grad_weights = problem.at(to[3], i * p.m);
    kernels.backward(p, x, scratch);
  });
  return {grads[0], grads[1], grads[2], grads[3]};
}

}  // namespace
}  // namespace continuum_ops

STABLE_TORCH_LIBRARY_IMPL(continuum_ops, CPU, m) {
  m.impl("galerkin_attention_small", TORCH_BOX(&continuum_ops::forward));
  m.impl("galerkin_attention_small_backward", TORCH_BOX(&continuum_ops::backward));
}
