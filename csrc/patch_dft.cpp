// The truncated Fourier transform of the patches of a grid on CPU tensors: checks, allocation, and the split into tasks. The
// arithmetic is in patch_dft_kernel.cpp; schemas are defined in continuum_ops/ops/_library.py.
#include "patch_dft.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <vector>

#include "cpu_isa.h"
#include "parallel.h"
#include "tensors.h"

namespace continuum_ops {
namespace {

using Sizes = std::vector<int64_t>;

PatchTransform transform_of(const Tensor& x, const Tensor& tables, const Sizes& patches, const Sizes& points, const Sizes& rows) {
  const size_t d = patches.size();
  STD_TORCH_CHECK(1 <= d && d <= 3 && points.size() == d && rows.size() == d, "patches, points, rows: one for each of 1 to 3 axes");
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double, "float32 or float64");
  STD_TORCH_CHECK(tables.scalar_type() == type && tables.dim() == 1 && tables.is_contiguous(), "tables: one contiguous row of x's dtype");
  STD_TORCH_CHECK(x.is_contiguous(), "the input must be contiguous");
  PatchTransform p{type == ScalarType::Double, int(d), 0, x.size(x.dim() - 1), {}, {}, {}, tables.const_data_ptr()};
  int64_t entries = 0;
  for (size_t i = 0; i < d; ++i) {
    STD_TORCH_CHECK(patches[i] >= 1 && points[i] >= 1 && rows[i] >= 1, "patches, points, rows: at least 1");
    p.patches[i] = patches[i], p.points[i] = points[i], p.rows[i] = rows[i];
    entries += (i + 1 < d ? 3 : 2) * points[i] * rows[i];
  }
  STD_TORCH_CHECK(tables.size(0) == entries, "tables: 3 (points, rows) of each axis, 2 of the last one");
  return p;
}

Tensor analyze(const Tensor& u, const Tensor& tables, Sizes patches, Sizes points, Sizes rows) {
  PatchTransform p = transform_of(u, tables, patches, points, rows);
  STD_TORCH_CHECK(u.dim() == p.d + 2, "u: (B, *grid, C)");
  for (int i = 0; i < p.d; ++i) STD_TORCH_CHECK(u.size(i + 1) == p.patches[i] * p.points[i], "u: a grid of patches * points");
  p.batch = u.size(0);
  Tensor modes = new_tensor({p.modes(), 2, p.batch, p.patch_count(), p.channels}, u.scalar_type());
  const int64_t tasks = p.batch * p.patch_count();
  const PatchTransformKernels& kernels = patch_dft_kernels();
  const void* from = u.const_data_ptr();
  void* to = modes.mutable_data_ptr();
  if (p.channels > 0) {
    run_tasks(tasks, tasks * p.work(), kernels.scratch(p),
              [&](int64_t t, void* scratch) { kernels.analyze(p, from, to, t, scratch); });
  }
  return modes;
}

Tensor synthesize(const Tensor& modes, const Tensor& tables, Sizes patches, Sizes points, Sizes rows) {
  PatchTransform p = transform_of(modes, tables, patches, points, rows);
  STD_TORCH_CHECK(modes.dim() == 5 && modes.size(0) == p.modes() && modes.size(1) == 2 && modes.size(3) == p.patch_count(),
                  "modes: (modes, 2, B, patches, C)");
  p.batch = modes.size(2);
  std::vector<int64_t> shape{p.batch};
  for (int i = 0; i < p.d; ++i) shape.push_back(p.patches[i] * p.points[i]);
  shape.push_back(p.channels);
  Tensor grid = new_tensor(shape, modes.scalar_type());
  const int64_t tasks = p.batch * p.patch_count();
  const PatchTransformKernels& kernels = patch_dft_kernels();
  const void* from = modes.const_data_ptr();
  void* to = grid.mutable_data_ptr();
  if (p.channels > 0) {
    run_tasks(tasks, tasks * p.work(), kernels.scratch(p),
              [&](int64_t t, void* scratch) { kernels.synthesize(p, from, to, t, scratch); });
  }
  return grid;
}

}  // namespace
}  // namespace continuum_ops

STABLE_TORCH_LIBRARY_IMPL(continuum_ops, CPU, m) {
  m.impl("patch_dft", TORCH_BOX(&continuum_ops::analyze));
  m.impl("patch_dft_inverse", TORCH_BOX(&continuum_ops::synthesize));
}
