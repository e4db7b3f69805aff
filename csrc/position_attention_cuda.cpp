// position_attention on CUDA tensors: checks, allocation, stream. The kernels are in position_attention.cu, compiled without torch; this
// file is compiled without CUDA. Schemas are defined in continuum_ops/ops/_library.py.
#include "position_attention_cuda.h"

#include "cuda_binding.h"

#include <optional>
#include <tuple>
#include <vector>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace continuum_ops {
namespace {

struct Problem {
  PositionProblem p{};
  ScalarType acc;

  Problem(const Tensor& query_pos, const Tensor& key_pos, const Tensor& value, const Tensor& rate, const std::optional<Tensor>& weights,
          const std::optional<Tensor>& radius, const std::optional<std::vector<double>>& period, bool tf32) {
    p.dtype = dtype_of(value);
    acc = p.dtype == DType::float64 ? ScalarType::Double : ScalarType::Float;
    STD_TORCH_CHECK(query_pos.dim() == 3 && key_pos.dim() == 3 && value.dim() == 4 && rate.dim() == 1 && (!weights || weights->dim() == 2) &&
                    (!radius || radius->dim() == 2), "query_pos (P, N, d), key_pos (P, M, d), value (B, HV, M, C), rate (H,), weights (W, M), radius (R, N)");
    p.tf32 = tf32;
    p.batch = value.size(0), p.heads = rate.size(0), p.value_heads = value.size(1);
    p.n = query_pos.size(1), p.m = key_pos.size(1), p.d = query_pos.size(2), p.channels = value.size(3);
    p.query_entries = query_pos.size(0), p.key_entries = key_pos.size(0);
    p.weight_entries = weights ? weights->size(0) : 1, p.radius_entries = radius ? radius->size(0) : 1;
    for (const int64_t entries : {p.query_entries, p.key_entries, p.weight_entries, p.radius_entries}) {
      STD_TORCH_CHECK(entries == 1 || entries == p.batch, "positions, weights, radius: one entry, or one for each of value's batch");
    }
    STD_TORCH_CHECK((p.value_heads == 1 || p.value_heads == p.heads) && value.size(2) == p.m && key_pos.size(2) == p.d &&
                    (!weights || weights->size(1) == p.m) && (!radius || radius->size(1) == p.n), "sizes of value, positions, weights, radius do not fit");
    STD_TORCH_CHECK(rate.scalar_type() == acc && (!weights || weights->scalar_type() == acc) && (!radius || radius->scalar_type() == acc),
                    "rate, weights, radius: in the accumulation dtype");
    STD_TORCH_CHECK(query_pos.scalar_type() == key_pos.scalar_type() && (query_pos.scalar_type() == acc || query_pos.scalar_type() == ScalarType::Double),
                    "positions: both in the accumulation dtype or float64");
    STD_TORCH_CHECK(!period || int64_t(period->size()) == p.d, "period: d numbers");
    STD_TORCH_CHECK(p.columns() < (int64_t(1) << 32), "position_attention: batch * channels must be below 2^32 where the batch shares its positions");
    p.wide_positions = query_pos.scalar_type() != acc;
    p.query_pos = query_pos.const_data_ptr(), p.key_pos = key_pos.const_data_ptr(), p.value = value.const_data_ptr(), p.rate = rate.const_data_ptr();
    copy_strides(query_pos, p.query_pos_strides);
    copy_strides(key_pos, p.key_pos_strides);
    copy_strides(value, p.value_strides);
    p.value_strides[3] = value.stride(3);  // 1 says that channels are contiguous
    p.rate_stride = rate.stride(0);
    if (weights) {
      p.weights = weights->const_data_ptr();
      copy_strides(*weights, p.weights_strides);
    }
    if (radius) {
      p.radius = radius->const_data_ptr();
      copy_strides(*radius, p.radius_strides);
    }
    p.period = period ? period->data() : nullptr;
  }
};

Tensor scratch_for(const Problem& problem, const PositionGradients* gradients, const Tensor& like) {
  return torch::stable::new_empty(like, {int64_t(position_attention_scratch_bytes(problem.p, gradients))}, ScalarType::Byte);
}

using Period = std::optional<std::vector<double>>;

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& query_pos, const Tensor& key_pos, const Tensor& value, const Tensor& rate,
                                           std::optional<Tensor> weights, std::optional<Tensor> radius, Period period, bool tf32) {
  const Problem problem(query_pos, key_pos, value, rate, weights, radius, period, tf32);
  const PositionProblem& p = problem.p;
  const Device device(value);
  Tensor out = torch::stable::new_empty(value, {p.batch, p.heads, p.n, p.channels});
  Tensor lse = torch::stable::new_empty(value, {p.geometries(), p.heads, p.n}, problem.acc);
  Tensor stats = torch::stable::new_empty(value, {p.geometries(), p.heads, p.n, 3}, problem.acc);
  if (p.geometries() == 0) return {out, lse, stats};  // meshes of a batch of none
  Tensor scratch = scratch_for(problem, nullptr, value);
  check_success("position_attention", position_attention_forward_cuda(p, {out.mutable_data_ptr(), lse.mutable_data_ptr(), stats.mutable_data_ptr()},
                                                scratch.mutable_data_ptr(), device.stream()));
  return {out, lse, stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& query_pos,
                                                            const Tensor& key_pos, const Tensor& value, const Tensor& rate,
                                                            std::optional<Tensor> weights, const Tensor& out, const Tensor& lse, const Tensor& stats,
                                                            std::optional<Tensor> radius, Period period, std::vector<bool> needs, bool tf32) {
  const Problem problem(query_pos, key_pos, value, rate, weights, radius, period, tf32);
  const PositionProblem& p = problem.p;
  const Device device(value);
  STD_TORCH_CHECK(needs.size() == 5, "needs: one for each of query_pos, key_pos, value, rate, weights");
  STD_TORCH_CHECK(out.is_contiguous() && lse.is_contiguous() && stats.is_contiguous(), "out, lse and stats: as the forward op returned them");
  STD_TORCH_CHECK(grad_out.dim() == 4 && grad_out.size(0) == p.batch && grad_out.size(1) == p.heads && grad_out.size(2) == p.n &&
                  grad_out.size(3) == p.channels && grad_out.scalar_type() == value.scalar_type(), "grad_out: as out");
  STD_TORCH_CHECK(!grad_lse || (grad_lse->dim() == 3 && grad_lse->size(0) == p.geometries() && grad_lse->size(1) == p.heads &&
                                grad_lse->size(2) == p.n && grad_lse->scalar_type() == problem.acc), "grad_lse: as lse");
  auto result = [&](const Tensor* like, bool needed, ScalarType dtype) {
    std::vector<int64_t> shape{0};
    if (like && needed) {
      shape.clear();
      for (int64_t i = 0; i < like->dim(); ++i) shape.push_back(like->size(i));
    }
    return p.geometries() == 0 ? torch::stable::new_zeros(value, shape, dtype) : torch::stable::new_empty(value, shape, dtype);
  };
  const bool weights_needed = weights && needs[4];
  Tensor grad_query_pos = result(&query_pos, needs[0], problem.acc), grad_key_pos = result(&key_pos, needs[1], problem.acc);
  Tensor grad_value = result(&value, needs[2], value.scalar_type()), grad_rate = result(&rate, needs[3], problem.acc);
  Tensor grad_weights = result(weights ? &*weights : nullptr, weights_needed, problem.acc);
  PositionGradients g{};
  g.grad_out = grad_out.const_data_ptr();
  copy_strides(grad_out, g.grad_out_strides);
  g.grad_out_strides[3] = grad_out.stride(3);
  if (grad_lse) {
    g.grad_lse = grad_lse->const_data_ptr();
    copy_strides(*grad_lse, g.grad_lse_strides);
  }
  g.forward = {const_cast<void*>(out.const_data_ptr()), const_cast<void*>(lse.const_data_ptr()), const_cast<void*>(stats.const_data_ptr())};
  if (needs[0]) g.grad_query_pos = grad_query_pos.mutable_data_ptr();
  if (needs[1]) g.grad_key_pos = grad_key_pos.mutable_data_ptr();
  if (needs[2]) g.grad_value = grad_value.mutable_data_ptr();
  if (needs[3]) g.grad_rate = grad_rate.mutable_data_ptr();
  if (weights_needed) g.grad_weights = grad_weights.mutable_data_ptr();
  if (p.geometries() > 0) {
    Tensor scratch = scratch_for(problem, &g, value);
    check_success("position_attention", position_attention_backward_cuda(p, g, scratch.mutable_data_ptr(), device.stream()));
  }
  if (p.wide_positions) {
    if (needs[0]) grad_query_pos = torch::stable::to(grad_query_pos, ScalarType::Double);
    if (needs[1]) grad_key_pos = torch::stable::to(grad_key_pos, ScalarType::Double);
  }
  return {grad_query_pos, grad_key_pos, grad_value, grad_rate, grad_weights};
}

}  // namespace
}  // namespace continuum_ops

STABLE_TORCH_LIBRARY_IMPL(continuum_ops, CO_DEVICE, m) {
  m.impl("position_attention_cuda_forward", TORCH_BOX(&continuum_ops::forward));
  m.impl("position_attention_cuda_backward", TORCH_BOX(&continuum_ops::backward));
}
