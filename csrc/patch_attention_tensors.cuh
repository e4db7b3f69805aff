// The tensors of patch attention as the kernels see them: grids cut into patches and read in place, weights in patch order, and the
// block of the matrix (query patches x key patches) that is worked on.
#pragma once

#include "cuda_tiles.h"

namespace continuum_ops {
namespace cuda {

// Divides numbers below 2^31 by a multiplication: 2^(31 + s) <= m d < 2^(31 + s) + 2^s where 2^s >= d, so that floor(n m / 2^(31 + s)) is exact.
struct Divisor {
  uint32_t value = 1, multiplier = uint32_t(1) << 31, shift = 31;

  Divisor() = default;
  explicit Divisor(uint32_t d) : value(d) {
    uint32_t s = 0;
    while ((uint64_t(1) << s) < d) ++s;
    shift = 31 + s;
    multiplier = uint32_t(((uint64_t(1) << shift) + d - 1) / d);
  }
  __host__ __device__ operator uint32_t() const { return value; }
};
__device__ __forceinline__ uint32_t operator/(uint32_t n, const Divisor& d) { return uint32_t(uint64_t(n) * d.multiplier >> d.shift); }

// A tensor (batch, *grid, heads, channels). What belongs to one patch and head is a row of points * channels columns, channels fastest.
template <class T> struct Patches {
  T* data;
  int64_t batch_stride, head_stride, channel_stride, strides[3];
  Divisor counts[3], points[3];  // patches of an axis, points of a patch
  Divisor channels;              // at least 1
  uint32_t heads;                // at least 1
  uint32_t columns;              // points * channels of a patch
  bool vectors;                  // 16-byte copies are possible: channels contiguous, in whole vectors, everything aligned

  __device__ int64_t group(int64_t g) const { return g / heads * batch_stride + g % heads * head_stride; }
  __device__ int64_t patch(int64_t index) const {
    const uint32_t i = uint32_t(index), rows = i / counts[2], i2 = i - rows * counts[2], i0 = rows / counts[1], i1 = rows - i0 * counts[1];
    return int64_t(i0) * points[0] * strides[0] + int64_t(i1) * points[1] * strides[1] + int64_t(i2) * points[2] * strides[2];
  }
  // Where column i of a row lies, relative to the patch.
  __device__ int64_t column(uint32_t i) const {
    const uint32_t x = i / channels, channel = i - x * channels;
    return point(x) + channel * channel_stride;
  }
  __device__ int64_t point(uint32_t x) const {
    const uint32_t rows = x / points[2], x2 = x - rows * points[2], x0 = rows / points[1], x1 = rows - x0 * points[1];
    return x0 * strides[0] + x1 * strides[1] + x2 * strides[2];
  }
};

// Weights in patch order, (entries, patches, points), each patch divided by a power of two so that the largest is about 1: products
// with them fit any dtype. A patch with a weight that is negative, infinite or not a number is NaN.
template <class A> struct PatchWeights {
  A *scaled, *scale;  // scale (entries, patches); null: no weights
  int64_t entries, patches;
  uint32_t heads, points;

  __device__ int64_t row(int64_t g, int64_t patch) const { return (entries == 1 ? 0 : g / heads) * patches + patch; }
  __device__ const A* of(int64_t g, int64_t patch) const { return scaled + row(g, patch) * points; }
  __device__ A scale_of(int64_t g, int64_t patch) const { return scaled ? scale[row(g, patch)] : A(1); }
};

// Rows [row, row + rows) and columns [column, column + columns) of the matrices of groups [group, group + groups), stored contiguously.
struct Block {
  int64_t group, groups, row, rows, column, columns;
  __host__ __device__ int64_t size() const { return groups * rows * columns; }
};

// How the columns of an inner product are shared out: so many splits, of so many steps each but the last.
struct Splits {
  int64_t count, steps;
};

// The left operand of a mixing product: (groups, rows, pitch) in the dtype of the tensors, zeros beyond the last source, and what each
// row is to be multiplied with.
template <class T, class A> struct Coefficients {
  T* data;
  A* scale;  // (groups, rows)
  int64_t pitch;
};

// Tiles of M x N by WM x WN warps, and how many blocks a multiprocessor is to hold.
template <int M_, int N_, int WM, int WN, int BLOCKS_> struct Shape {
  static constexpr int M = M_, N = N_, WARPS_M = WM, WARPS_N = WN, BLOCKS = BLOCKS_, THREADS = 32 * WM * WN;
  static constexpr int WARP_M = M / WM, WARP_N = N / WN, MT = WARP_M / 16, NT = WARP_N / 8;
  static_assert(MT * 16 * WM == M && NT * 8 * WN == N);
};
constexpr int LARGE = 192, SMALL = 64;  // rows of a tile: 192 hold the 169 patches of 13 x 13

template <class Tile> constexpr int STEP = 64 / 16 * Tile::VECTOR;  // columns (sources) of a step: 64 bytes of a row

// What has weight zero does not count, whatever it is.
template <class T, class A> __device__ __forceinline__ T weighted(T x, A weight) { return weight == A(0) ? convert<T>(0.f) : convert<T>(widen(x) * weight); }

// A vector in shared memory times its weight.
template <class T, class A> __device__ __forceinline__ void weigh(T* vector, A weight) {
  constexpr int V = 16 / int(sizeof(T));
  struct alignas(16) Vector { T x[V]; };
  Vector v = *reinterpret_cast<Vector*>(vector);
#pragma unroll
  for (int e = 0; e < V; ++e) v.x[e] = weighted(v.x[e], weight);
  *reinterpret_cast<Vector*>(vector) = v;
}

}  // namespace cuda
}  // namespace continuum_ops
