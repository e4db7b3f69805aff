// patch_attention on CUDA tensors: checks, allocation, stream. The kernels are in patch_attention*.cu, compiled without torch; this file
// is compiled without CUDA. Schemas are defined in continuum_ops/ops/_library.py.
#include "patch_attention_cuda.h"

#include "cuda_binding.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace continuum_ops {
namespace {

struct Problem {
  PatchProblem p{};
  ScalarType acc;
  int64_t axes;

  Problem(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& weights, const std::vector<int64_t>& patch_size, double scale,
          bool tf32) {
    p.dtype = dtype_of(query);
    acc = p.dtype == DType::float64 ? ScalarType::Double : ScalarType::Float;
    axes = query.dim() - 3;
    STD_TORCH_CHECK(axes >= 1 && axes <= 3 && key.dim() == query.dim() && value.dim() == query.dim(),
                    "query (B, *grid, H, D), key (B, *kgrid, H, D), value (B, *kgrid, H, Dv), grids of 1 to 3 axes");
    STD_TORCH_CHECK(key.scalar_type() == query.scalar_type() && value.scalar_type() == query.scalar_type(), "query, key, value: one dtype");
    STD_TORCH_CHECK(int64_t(patch_size.size()) == axes, "patch_size: one for each axis of the grid");
    p.tf32 = tf32, p.scale = scale;
    p.batch = query.size(0), p.heads = query.size(axes + 1), p.channels = query.size(axes + 2), p.value_channels = value.size(axes + 2);
    STD_TORCH_CHECK(key.size(0) == p.batch && value.size(0) == p.batch && key.size(axes + 1) == p.heads && value.size(axes + 1) == p.heads &&
                    key.size(axes + 2) == p.channels, "sizes of query, key and value do not fit");
    for (int i = 0; i < 3; ++i) {
      const int64_t axis = i - (3 - axes);
      p.patch[i] = p.query_counts[i] = p.key_counts[i] = 1;
      if (axis < 0) continue;
      const int64_t size = p.patch[i] = patch_size[axis];
      STD_TORCH_CHECK(size >= 1 && query.size(1 + axis) % size == 0 && key.size(1 + axis) % size == 0 && value.size(1 + axis) == key.size(1 + axis),
                      "patch_size must divide the grids of query and key; value has key's");
      p.query_counts[i] = query.size(1 + axis) / size, p.key_counts[i] = key.size(1 + axis) / size;
    }
    // Columns of a patch and numbers of patches are 32-bit, offsets are not.
    const int64_t most = int64_t(1) << 31;
    STD_TORCH_CHECK(p.points() < most && p.points() * std::max<int64_t>({p.channels, p.value_channels, 1}) < most,
                    "patch_attention: points of a patch times channels must be below 2^31");
    STD_TORCH_CHECK(p.query_patches() < most && p.key_patches() < most, "patch_attention: the patches of a grid must be fewer than 2^31");
    p.query = grid(query), p.key = grid(key), p.value = grid(value);
    p.weight_entries = 1;
    if (!weights) return;
    STD_TORCH_CHECK(weights->dim() == axes + 1 && weights->scalar_type() == acc, "weights (W, *grid) in the accumulation dtype");
    p.weight_entries = weights->size(0);
    STD_TORCH_CHECK(p.weight_entries == 1 || p.weight_entries == p.batch, "weights: one entry, or one for each of the batch");
    p.weights = weights->const_data_ptr();
    p.weight_strides[0] = p.weight_entries == 1 ? 0 : weights->stride(0);
    for (int64_t axis = 0; axis < axes; ++axis) {
      STD_TORCH_CHECK(weights->size(1 + axis) == query.size(1 + axis), "weights have the grid of query");
      p.weight_strides[4 - axes + axis] = weights->size(1 + axis) == 1 ? 0 : weights->stride(1 + axis);
    }
  }

  PatchGrid grid(const Tensor& t) const {
    PatchGrid found{t.const_data_ptr(), {}};
    auto stride = [&](int64_t i) { return t.size(i) == 1 ? 0 : t.stride(i); };
    found.strides[0] = stride(0);
    for (int64_t axis = 0; axis < axes; ++axis) found.strides[4 - axes + axis] = stride(1 + axis);
    found.strides[4] = stride(axes + 1);
    found.strides[5] = t.stride(axes + 2);  // 1 says that channels are contiguous
    return found;
  }
};

std::vector<int64_t> shape_of(const Tensor& t) {
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < t.dim(); ++i) shape.push_back(t.size(i));
  return shape;
}

Tensor scratch_for(const PatchProblem& p, const PatchGradients* gradients, const Tensor& like) {
  return torch::stable::new_empty(like, {int64_t(patch_attention_scratch_bytes(p, gradients))}, ScalarType::Byte);
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> weights,
                                           std::vector<int64_t> patch_size, double scale, bool tf32) {
  const Problem problem(query, key, value, weights, patch_size, scale, tf32);
  const PatchProblem& p = problem.p;
  const Device device(query);
  std::vector<int64_t> shape = shape_of(query), kept{0};
  shape.back() = p.value_channels;
  if (p.keeps()) kept = {p.batch, p.heads, p.query_patches(), p.key_patches()};
  Tensor out = torch::stable::new_empty(query, shape);
  Tensor lse = torch::stable::new_empty(query, {p.batch, p.heads, p.query_patches()}, problem.acc);
  Tensor probabilities = torch::stable::new_empty(query, kept, problem.acc);
  if (p.groups() * p.query_patches() == 0) return {out, lse, probabilities};
  Tensor scratch = scratch_for(p, nullptr, query);
  check_success("patch_attention", patch_attention_forward_cuda(p, {out.mutable_data_ptr(), lse.mutable_data_ptr(), p.keeps() ? probabilities.mutable_data_ptr() : nullptr},
                                                                scratch.mutable_data_ptr(), device.stream()));
  return {out, lse, probabilities};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
                                                    std::optional<Tensor> weights, const Tensor& lse, const Tensor& probabilities, std::vector<int64_t> patch_size,
                                                    double scale, std::vector<bool> needs, bool tf32) {
  const Problem problem(query, key, value, weights, patch_size, scale, tf32);
  const PatchProblem& p = problem.p;
  const Device device(query);
  STD_TORCH_CHECK(needs.size() == 4, "needs: one for each of query, key, value, weights");
  std::vector<int64_t> shape = shape_of(query);
  shape.back() = p.value_channels;
  STD_TORCH_CHECK(shape_of(grad_out) == shape && grad_out.scalar_type() == query.scalar_type(), "grad_out: as out");
  const std::vector<int64_t> rows{p.batch, p.heads, p.query_patches()}, all{p.batch, p.heads, p.query_patches(), p.key_patches()};
  STD_TORCH_CHECK(!grad_lse || (shape_of(*grad_lse) == rows && grad_lse->scalar_type() == problem.acc), "grad_lse: as lse");
  const bool kept = probabilities.dim() == 4;
  STD_TORCH_CHECK(probabilities.scalar_type() == problem.acc && probabilities.is_contiguous() && kept == p.keeps() && (!kept || shape_of(probabilities) == all),
                  "probabilities: as the forward op returned them");
  const bool live = p.groups() * p.query_patches() * p.key_patches() > 0;
  auto result = [&](const Tensor* like, bool needed, ScalarType dtype) {
    const std::vector<int64_t> size = like && needed ? shape_of(*like) : std::vector<int64_t>{0};
    return live ? torch::stable::new_empty(query, size, dtype) : torch::stable::new_zeros(query, size, dtype);
  };
  const bool weights_needed = weights && needs[3];
  Tensor grad_query = result(&query, needs[0], query.scalar_type()), grad_key = result(&key, needs[1], query.scalar_type());
  Tensor grad_value = result(&value, needs[2], query.scalar_type());
  Tensor grad_weights = result(weights ? &*weights : nullptr, weights_needed, weights_needed ? problem.acc : query.scalar_type());
  PatchGradients g{};
  g.grad_out = problem.grid(grad_out);
  if (grad_lse) {
    g.grad_lse = grad_lse->const_data_ptr();
    copy_strides(*grad_lse, g.grad_lse_strides);
  }
  if (kept) g.probabilities = probabilities.const_data_ptr();
  if (needs[0]) g.grad_query = grad_query.mutable_data_ptr();
  if (needs[1]) g.grad_key = grad_key.mutable_data_ptr();
  if (needs[2]) g.grad_value = grad_value.mutable_data_ptr();
  if (weights_needed) g.grad_weights = grad_weights.mutable_data_ptr();
  if (live) {
    Tensor scratch = scratch_for(p, &g, query);
    check_success("patch_attention", patch_attention_backward_cuda(p, g, scratch.mutable_data_ptr(), device.stream()));
  }
  return {grad_query, grad_key, grad_value, grad_weights};
}

}  // namespace
}  // namespace continuum_ops

STABLE_TORCH_LIBRARY_IMPL(continuum_ops, CO_DEVICE, m) {
  m.impl("patch_attention_cuda_forward", TORCH_BOX(&continuum_ops::forward));
  m.impl("patch_attention_cuda_backward", TORCH_BOX(&continuum_ops::backward));
}
