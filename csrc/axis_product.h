// Products of a matrix along one axis of a field: what the torch side hands to the kernels. Free of torch.
//
// A field (before, n, columns) is contiguous. Its columns are counted through all of `before`, so that short rows fill vectors too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace continuum_ops {

struct AxisProduct {
  bool wide;  // float64, else float32
  int64_t before, m, n, columns;
  int64_t all_columns() const { return before * columns; }
};

struct AxisProductKernels {
  int64_t (*group_columns)(const AxisProduct&);  // columns that one task of `apply` takes
  // The matrix, element (i, k) at i * row + k * column, in the order that `apply` reads.
  size_t (*packed_bytes)(const AxisProduct&);
  void (*pack)(const AxisProduct&, const void* matrix, int64_t row, int64_t column, void* packed);
  size_t (*apply_scratch)(const AxisProduct&);
  // out (before, m, columns) = matrix * x (before, n, columns), columns from `begin` on
  void (*apply)(const AxisProduct&, const void* packed, const void* x, void* out, int64_t begin, void* scratch);
  size_t (*contract_scratch)(const AxisProduct&);
  // sum (m, n) = grad (before, m, columns) x (before, n, columns)^T over the columns [begin, end)
  void (*contract)(const AxisProduct&, const void* grad, const void* x, int64_t begin, int64_t end, void* sum, void* scratch);
};

// out (before, m, columns) = matrix x, element (i, k) of the matrix at i * row + k * column, on all threads; nothing may be empty
void apply_axis_product(const AxisProduct&, const void* matrix, int64_t row, int64_t column, const void* x, void* out);

namespace avx512 { extern const AxisProductKernels axis_product; }
namespace avx2 { extern const AxisProductKernels axis_product; }
namespace generic { extern const AxisProductKernels axis_product; }

}  // namespace continuum_ops
