// Tiles of matrices in shared memory: how they are filled from strided tensors, and the product of two of them by tensor cores.
#pragma once

#include <type_traits>

#include "cuda_portable.h"

namespace continuum_ops {
namespace cuda {

// How a product of two tiles is computed. float32 by one TF32 product of the rounded operands, or by three of their halves; float64
// by plain multiply-add.
enum class Arithmetic { half, tf32, tf32x3, plain };

template <class T, bool TF32> struct Tile {
  static constexpr bool is_half = sizeof(T) == 2, is_double = sizeof(T) == 8;
  static constexpr Arithmetic arithmetic =
      is_half ? Arithmetic::half : is_double ? Arithmetic::plain : TF32 ? Arithmetic::tf32 : Arithmetic::tf32x3;
  using Acc = std::conditional_t<is_double, double, float>;
  static constexpr int VECTOR = 16 / int(sizeof(T));  // elements of one 16-byte copy
  // Padding of a row: 16-byte aligned rows whose fragments lie in different banks. A tile that is read along its rows (left
  // operands, transposed right operands) and one that is read across them want different paddings for 4-byte elements.
  static constexpr int PAD_ALONG = is_half ? 8 : is_double ? 2 : 4;
  static constexpr int PAD_ACROSS = is_double ? 2 : 8;
};

// Where lane, register i of a 16 x 8 fragment lies.
__device__ __forceinline__ int fragment_row(int lane, int i) { return lane / 4 + i / 2 * 8; }
__device__ __forceinline__ int fragment_column(int lane, int i) { return lane % 4 * 2 + i % 2; }

// x as the sum of two. An infinity is in the low one: beside it in the high one, infinity - infinity and infinity * 0 would be NaN.
__device__ __forceinline__ void split_tf32(float x, float& high, float& low) {
  high = fabsf(x) < 3.3e38f ? to_tf32(x) : 0.f;
  low = to_tf32(x - high);
}

// acc (16 MT x 8 NT, one warp's) += a (16 MT x k) b (k x 8 NT); a is [row][k], b is [k][column], or [column][k] if TRANSPOSED.
template <class Tile, int MT, int NT, bool TRANSPOSED, class T, class Acc>
__device__ __forceinline__ void tile_product(Acc (&acc)[MT][NT][4], const T* a, int a_pitch, const T* b, int b_pitch, int k_size) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if constexpr (Tile::arithmetic == Arithmetic::half) {
    static_assert(NT % 2 == 0);
    const T* a_row = a + lane % 16 * a_pitch + lane / 16 * 8;
    const T* b_row = TRANSPOSED ? b + (lane / 16 * 8 + lane % 8) * b_pitch + lane / 8 % 2 * 8 : b + lane % 16 * b_pitch + lane / 16 * 8;
#pragma unroll 1  // unrolled, the fragments of several steps are held at once: registers are what is scarce
    for (int k = 0; k < k_size; k += 16) {
      uint32_t fa[MT][4];
#pragma unroll
      for (int i = 0; i < MT; ++i) load_matrices<false>(fa[i], a_row + i * 16 * a_pitch + k);
#pragma unroll
      for (int j = 0; j < NT; j += 2) {
        uint32_t r[4];
        load_matrices<!TRANSPOSED>(r, TRANSPOSED ? b_row + j * 8 * b_pitch + k : b_row + k * b_pitch + j * 8);
        const uint32_t b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          mma_16<T>(acc[i][j], fa[i], b0);
          mma_16<T>(acc[i][j + 1], fa[i], b1);
        }
      }
    }
  } else if constexpr (Tile::arithmetic == Arithmetic::plain) {
#pragma unroll 1
    for (int k = 0; k < k_size; ++k) {
      Acc left[MT][2], right[NT][2];
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        left[i][0] = a[(i * 16 + g) * a_pitch + k];
        left[i][1] = a[(i * 16 + g + 8) * a_pitch + k];
      }
#pragma unroll
      for (int j = 0; j < NT; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) right[j][e] = TRANSPOSED ? b[(j * 8 + 2 * t + e) * b_pitch + k] : b[k * b_pitch + j * 8 + 2 * t + e];
      }
#pragma unroll
      for (int i = 0; i < MT; ++i) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[i][j][e] = fused(left[i][e / 2], right[j][e % 2], acc[i][j][e]);
        }
      }
    }
  } else {
    constexpr bool three = Tile::arithmetic == Arithmetic::tf32x3;
#pragma unroll 1
    for (int k = 0; k < k_size; k += 8) {
      float high[MT][4], low[MT][4];
#pragma unroll
      for (int i = 0; i < MT; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float x = a[(i * 16 + g + e % 2 * 8) * a_pitch + k + t + e / 2 * 4];
          if constexpr (three) split_tf32(x, high[i][e], low[i][e]);
          else high[i][e] = to_tf32(x);
        }
      }
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        float b_high[2], b_low[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x = TRANSPOSED ? b[(j * 8 + g) * b_pitch + k + t + e * 4] : b[(k + t + e * 4) * b_pitch + j * 8 + g];
          if constexpr (three) split_tf32(x, b_high[e], b_low[e]);
          else b_high[e] = to_tf32(x);
        }
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          if constexpr (three) {
            // A sum of its own, small terms first, added by an ordinary addition: the unit's accumulator truncates, and over thousands
            // of keys the truncations would all point the same way.
            float sum[4] = {0.f, 0.f, 0.f, 0.f};
            mma_tf32(sum, low[i], b_high);
            mma_tf32(sum, high[i], b_low);
            mma_tf32(sum, high[i], b_high);
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[i][j][e] += sum[e];
          } else {
            mma_tf32(acc[i][j], high[i], b_high);
          }
        }
      }
    }
  }
}

// A tensor (batch, heads, rows, channels) whose channels of all batch entries stand side by side as the columns of a matrix.
template <class T> struct Columns {
  const T* data;
  int64_t batch_stride, head_stride, row_stride, channel_stride;
  uint32_t channels;
  bool vectors;  // 16-byte copies are possible: channels contiguous, in whole vectors, everything aligned
};

// Rows [row, row + ROWS) of columns [column, column + WIDTH) to shared memory; zeros outside `rows` and `columns`, and where the key
// does not exist (its log-weight is -inf), whatever lies there.
template <class Tile, int ROWS, int WIDTH, int THREADS, class T, class A>
__device__ __forceinline__ void stage(T* to, int pitch, const Columns<T>& x, int64_t batch, int64_t head, int64_t row, int64_t rows,
                                      int64_t column, int64_t columns, const A* log_weights) {
  constexpr int V = Tile::VECTOR, PER_ROW = WIDTH / V;
  static_assert(WIDTH % V == 0 && THREADS % PER_ROW == 0);
  const int c = threadIdx.x % PER_ROW * V;
  const int64_t first = column + c;
  const T* base = x.data + head * x.head_stride;
  auto live = [&](int r) { return row + r < rows && !(log_weights && log_weights[row + r] == -INFINITE<A>); };
  if (x.vectors) {
    const uint32_t entry = uint32_t(first) / x.channels, channel = uint32_t(first) - entry * x.channels;
    const T* from = base + (batch + entry) * x.batch_stride + channel;
#pragma unroll 2
    for (int r = threadIdx.x / PER_ROW; r < ROWS; r += THREADS / PER_ROW) {
      const bool valid = first < columns && live(r);
      copy_16(to + r * pitch + c, valid ? from + (row + r) * x.row_stride : x.data, valid);
    }
    return;
  }
#pragma unroll 1
  for (int r = threadIdx.x / PER_ROW; r < ROWS; r += THREADS / PER_ROW) {
    const bool row_live = live(r);
#pragma unroll 1
    for (int e = 0; e < V; ++e) {
      T value = convert<T>(0.f);
      if (row_live && first + e < columns) {
        const uint32_t entry = uint32_t(first + e) / x.channels, channel = uint32_t(first + e) - entry * x.channels;
        value = base[(batch + entry) * x.batch_stride + (row + r) * x.row_stride + channel * x.channel_stride];
      }
      to[r * pitch + c + e] = value;
    }
  }
}

}  // namespace cuda
}  // namespace continuum_ops
