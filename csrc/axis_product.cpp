// Products of a matrix along one axis of contiguous CPU fields: checks, allocation, tasks. The arithmetic is in
// axis_product_kernel.cpp; schemas are defined in continuum_ops/ops/_library.py.
#include "axis_product.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "cpu_isa.h"
#include "parallel.h"
#include "tensors.h"

namespace continuum_ops {

void apply_axis_product(const AxisProduct& p, const void* matrix, int64_t row, int64_t column, const void* x, void* out) {
  const AxisProductKernels& kernels = axis_product_kernels();
  const int64_t size = p.wide ? 8 : 4;
  Tensor packed = new_tensor({int64_t(kernels.packed_bytes(p)) / size}, p.wide ? ScalarType::Double : ScalarType::Float);
  void* ready = packed.mutable_data_ptr();
  kernels.pack(p, matrix, row, column, ready);
  // Neighbouring groups make a task: while one is computed the next is fetched.
  const int64_t group = kernels.group_columns(p), groups = (p.all_columns() + group - 1) / group;
  const int64_t run = std::clamp<int64_t>(groups / 16, 1, 8);
  run_tasks((groups + run - 1) / run, double(p.all_columns()) * p.m * p.n, kernels.apply_scratch(p), [&](int64_t t, void* scratch) {
    for (int64_t g = t * run; g < std::min(groups, (t + 1) * run); ++g) kernels.apply(p, ready, x, out, g * group, scratch);
  });
}

namespace {

// Parts that a contraction is cut into, whatever the number of threads; their sums are added in order.
constexpr int64_t PARTS = 16, PART_COLUMNS = 768, PART_ENTRIES = int64_t(1) << 22;

void check(const Tensor& t, ScalarType type, const char* name) {
  STD_TORCH_CHECK(t.dim() == 3 && t.scalar_type() == type && t.is_contiguous(), name, ": contiguous, of 3 dimensions and x's dtype");
}

// out (before, m, columns) = matrix (m, n), any strides, times x (before, n, columns)
void apply(const Tensor& matrix, const Tensor& x, Tensor out) {
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double, "x: float32 or float64");
  check(x, type, "x");
  check(out, type, "out");
  STD_TORCH_CHECK(matrix.dim() == 2 && matrix.scalar_type() == type, "matrix: (m, n) of x's dtype");
  const AxisProduct p{type == ScalarType::Double, x.size(0), matrix.size(0), x.size(1), x.size(2)};
  STD_TORCH_CHECK(matrix.size(1) == p.n && out.size(0) == p.before && out.size(1) == p.m && out.size(2) == p.columns,
                  "matrix (m, n), x (before, n, columns), out (before, m, columns)");
  if (p.all_columns() == 0 || p.m == 0) return;
  apply_axis_product(p, matrix.const_data_ptr(), matrix.stride(0), matrix.stride(1), x.const_data_ptr(), out.mutable_data_ptr());
}

template <class T> void add_parts(const T* parts, int64_t count, int64_t entries, T* sum) {
  for (int64_t i = 0; i < entries; ++i) sum[i] = parts[i];
  for (int64_t part = 1; part < count; ++part) {
    for (int64_t i = 0; i < entries; ++i) sum[i] += parts[part * entries + i];
  }
}

// (m, n) = sum over all columns of grad (before, m, columns) x (before, n, columns)^T
Tensor contract(const Tensor& grad, const Tensor& x) {
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double, "x: float32 or float64");
  check(x, type, "x");
  check(grad, type, "grad");
  const AxisProduct p{type == ScalarType::Double, x.size(0), grad.size(1), x.size(1), x.size(2)};
  STD_TORCH_CHECK(grad.size(0) == p.before && grad.size(2) == p.columns, "grad (before, m, columns), x (before, n, columns)");
  const int64_t columns = p.all_columns(), entries = p.m * p.n;
  Tensor sum = new_cleared(x, {p.m, p.n}, type);
  if (columns == 0 || entries == 0) return sum;
  int64_t parts = std::min((columns + PART_COLUMNS - 1) / PART_COLUMNS, PARTS);
  parts = std::max<int64_t>(1, std::min(parts, PART_ENTRIES / entries));
  const int64_t step = (columns + parts - 1) / parts;
  const AxisProductKernels& kernels = axis_product_kernels();
  Tensor partial = new_tensor({parts, entries}, type);
  char* at = static_cast<char*>(partial.mutable_data_ptr());
  const void *g = grad.const_data_ptr(), *from = x.const_data_ptr();
  run_tasks(parts, double(columns) * entries, kernels.contract_scratch(p), [&](int64_t t, void* scratch) {
    kernels.contract(p, g, from, std::min(t * step, columns), std::min((t + 1) * step, columns), at + t * entries * element_size(type), scratch);
  });
  void* to = sum.mutable_data_ptr();
  if (p.wide) add_parts(reinterpret_cast<const double*>(at), parts, entries, static_cast<double*>(to));
  else add_parts(reinterpret_cast<const float*>(at), parts, entries, static_cast<float*>(to));
  return sum;
}

}  // namespace
}  // namespace continuum_ops

STABLE_TORCH_LIBRARY_IMPL(continuum_ops, CPU, m) {
  m.impl("axis_product", TORCH_BOX(&continuum_ops::apply));
  m.impl("axis_contraction", TORCH_BOX(&continuum_ops::contract));
}
