// Before and after the gradients' tiles: what a row needs of the forward pass, and the sums over heads and batch in a fixed order.
#pragma once

#include "cuda_tiles.h"
#include "position_attention_geometry.cuh"

namespace continuum_ops {
namespace cuda {

constexpr int PACK_ROWS = 4, REDUCE_THREADS = 256;

// One warp per row: grad_out . out over all columns, and the row's nearest key, shift and denominator. A row without keys has gradient 0.
template <class T, class A>
__global__ void __launch_bounds__(32 * PACK_ROWS) pack_rows(Geometry<A> geo, Columns<T> grad_out, const T* out, const A* stats, Strided3<A> grad_lse,
                                                            int64_t batch, int64_t channels) {
  const int64_t pad = geo.query.pad, n = geo.query.n, blocks = pad / PACK_ROWS;
  const int64_t gh = blockIdx.x / blocks, i = blockIdx.x % blocks * PACK_ROWS + threadIdx.x / 32, g = gh / geo.heads, h = gh % geo.heads;
  const int lane = threadIdx.x % 32;
  const bool live = i < n;
  A sum = 0;
  if (live) {
    const int64_t begin = geo.geometries == 1 ? 0 : g, end = geo.geometries == 1 ? batch : g + 1;
    for (int64_t b = begin; b < end; ++b) {
      const T* grad = grad_out.data + b * grad_out.batch_stride + h * grad_out.head_stride + i * grad_out.row_stride;
      const T* value = out + ((b * geo.heads + h) * n + i) * channels;
      for (int64_t c = lane; c < channels; c += 32) sum = fused(A(widen(grad[c * grad_out.channel_stride])), A(widen(value[c])), sum);
    }
  }
#pragma unroll
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane != 0) return;
  const A denominator = live ? stats[3 * (gh * n + i) + 2] : A(0);
  const bool empty = denominator == A(0);
  const A lse = live && grad_lse.data ? grad_lse.data[g * grad_lse.strides[0] + h * grad_lse.strides[1] + i * grad_lse.strides[2]] : A(0);
  if (h == 0) geo.nearest.value[g * pad + i] = live ? stats[3 * (gh * n + i)] : A(0);
  geo.drop.value[gh * pad + i] = live ? -stats[3 * (gh * n + i) + 1] : -INFINITE<A>;
  geo.scale[gh * pad + i] = empty ? A(0) : 1 / denominator;
  geo.centre[gh * pad + i] = empty ? A(0) : lse - sum;
}

// The gradient of a position: sign * sum_h rate_h sum_j g (x - y), over the batch too where the positions are shared.
template <class A>
__global__ void __launch_bounds__(REDUCE_THREADS) reduce_positions(Geometry<A> geo, A* to, const A* sums, int64_t entries, int64_t rows, A sign) {
  const int d = geo.query.d;
  const int64_t at = int64_t(blockIdx.x) * REDUCE_THREADS + threadIdx.x;
  if (at >= entries * rows * d) return;
  const int64_t axis = at % d, row = at / d % rows, entry = at / d / rows;
  const int64_t begin = entries == 1 ? 0 : entry, end = entries == 1 ? geo.geometries : entry + 1;
  A sum = 0;
  for (int64_t g = begin; g < end; ++g) {
    for (int h = 0; h < geo.heads; ++h) {
      const A rate = geo.rate[h * geo.rate_stride];
      sum = fused(sign * (rate >= A(0) ? rate : NOT_A_NUMBER<A>), sums[((g * geo.heads + h) * rows + row) * (2 + d) + 2 + axis], sum);
    }
  }
  to[at] = sum;
}

// d / d w_k = (d / d log w_k) / w_k, and 0 where the key does not exist.
template <class A>
__global__ void __launch_bounds__(REDUCE_THREADS) reduce_weights(Geometry<A> geo, A* to, const A* sums, Strided2<A> weights, int64_t entries, int64_t m) {
  const int width = 2 + geo.query.d;
  const int64_t at = int64_t(blockIdx.x) * REDUCE_THREADS + threadIdx.x;
  if (at >= entries * m) return;
  const int64_t k = at % m, entry = at / m;
  const int64_t begin = entries == 1 ? 0 : entry, end = entries == 1 ? geo.geometries : entry + 1;
  A sum = 0;
  for (int64_t gh = begin * geo.heads; gh < end * geo.heads; ++gh) sum += sums[(gh * m + k) * width];
  const A w = weights.data[entry * weights.strides[0] + k * weights.strides[1]];
  to[at] = w == A(0) ? A(0) : sum / w;
}

// One block per head: -sum over all rows of sum_j g d2.
template <class A> __global__ void __launch_bounds__(REDUCE_THREADS) reduce_rate(Geometry<A> geo, A* to, const A* sums, int64_t rows) {
  __shared__ A parts[REDUCE_THREADS];
  const int h = blockIdx.x, width = 2 + geo.query.d;
  A sum = 0;
  for (int64_t g = 0; g < geo.geometries; ++g) {
    const A* from = sums + (g * geo.heads + h) * rows * width + 1;
    for (int64_t row = threadIdx.x; row < rows; row += REDUCE_THREADS) sum += from[row * width];
  }
  parts[threadIdx.x] = sum;
  for (int half = REDUCE_THREADS / 2; half; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  if (threadIdx.x == 0) to[h] = -parts[0];
}

}  // namespace cuda
}  // namespace continuum_ops
