// Position attention through a grid: what the driver (position_transform.cpp) hands to the kernels. Free of torch.
//
// A Gaussian of a pair of points is interpolated from Gaussians of pairs of nodes. Each side, queries or keys, has a tensor grid of
// cells over its bounding box with Chebyshev nodes in every cell; a point sees the nodes of its cell only. Three steps:
//   spread   U[node, column] = sum over the keys of the cell of basis[key, node] x[key, column]
//   between the grids, axis by axis, a small matrix of Gaussians of node distances (axis_product)
//   gather   y[query, column] = sum over the nodes of the cell of basis[query, node] U[node, column]
// Grids are float64, (nodes of axis 0, nodes of axis 1, ..., columns); the sums over points and over the nodes of a cell are float32.
#pragma once

#include "continuum_attention.h"  // DType

namespace continuum_ops {

constexpr int64_t TRANSFORM_COLUMNS = 64;  // that are worked on together
constexpr int64_t TRANSFORM_ROWS = 96;     // points that a task of `gather` takes at most
constexpr int MAX_TRANSFORM_AXES = 3;

struct TransformSide {
  int64_t count = 0, d = 0;
  int64_t cells[MAX_TRANSFORM_AXES] = {1, 1, 1}, points[MAX_TRANSFORM_AXES] = {1, 1, 1};  // cells, and nodes of a cell, along each axis
  const int64_t* place = nullptr;  // rows of the points in the tensors, cell after cell
  const int64_t* begin = nullptr;  // the first point of each cell, and the number of points
  const float* basis = nullptr;    // (count, sum of points): the factor of each axis
  const float* mass = nullptr;     // (count): w / max w, a factor of the basis; null where all are 1

  int64_t all_cells() const { return cells[0] * cells[1] * cells[2]; }
  int64_t cell_nodes() const { return points[0] * points[1] * points[2]; }
  int64_t nodes(int axis) const { return cells[axis] * points[axis]; }
  int64_t all_nodes() const { return nodes(0) * nodes(1) * nodes(2); }
};

// A strided tensor (batch, heads, rows, channels) of which some columns, entry by entry and channel by channel, are read or written.
struct TransformField {
  DType dtype;
  void* data;
  int64_t batch, row, column;  // strides
  int64_t channels;
};

struct PositionTransformKernels {
  // Columns begin .. begin + columns of points first .. last: to[i * TRANSFORM_COLUMNS + c] = (field - centre[c]) * scale[i].
  // Rows whose scale is 0 become 0. False if a number of the field is not finite.
  bool (*pack)(const TransformField&, int64_t begin, int64_t columns, const int64_t* place, const float* scale, const float* centre,
               int64_t first, int64_t last, float* to);
  size_t (*scratch)(int64_t cell_nodes);
  // The nodes of one cell of a grid of `columns` columns; rows: of all points, `mass` included on request.
  void (*spread)(const TransformSide&, int64_t cell, bool mass, const float* rows, int64_t columns, double* grid, void* scratch);
  // The same for numbers of float64, of which `sums` gets sum basis x and `sizes` sum |basis| x; either may be null.
  void (*spread_numbers)(const TransformSide&, int64_t cell, bool mass, const double* x, double* sums, double* sizes, void* scratch);
  // y[i, c] = sum of basis grid, for points first .. last of one cell; with `divide`, over total[i]. What is summed in float32 is the
  // residual from a constant of the cell: `ones` is the grid of a field of ones and `total` its sums (null: a grid of ones).
  void (*gather)(const TransformSide&, int64_t cell, int64_t first, int64_t last, const double* grid, int64_t columns, const double* ones,
                 const double* total, bool divide, float* y, void* scratch);
  // The same for numbers: y = sum basis grid, or with `sizes` sum |basis| grid
  void (*gather_numbers)(const TransformSide&, int64_t cell, int64_t first, int64_t last, const double* grid, bool sizes, double* y,
                         void* scratch);
  // field[place, columns] = y for points first .. last, or += y * scale where scale is given (float32 fields)
  void (*put)(const TransformField&, int64_t begin, int64_t columns, const int64_t* place, const float* scale, int64_t first, int64_t last,
              const float* y);
  // sums[i] += sum over columns x[i, c] y[i, c]
  void (*dot)(const float* x, const float* y, int64_t rows, double* sums);
};

namespace avx512 { extern const PositionTransformKernels position_transform; }
namespace avx2 { extern const PositionTransformKernels position_transform; }
namespace generic { extern const PositionTransformKernels position_transform; }

}  // namespace continuum_ops
