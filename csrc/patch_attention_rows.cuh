// What is done to the rows of scores between the products of tiles: softmax and its derivative, the coefficients of the mixing products,
// and the weights before and after.
#pragma once

#include "patch_attention_tensors.cuh"

namespace continuum_ops {
namespace cuda {

constexpr int ROW_THREADS = 128, TRANSPOSE_THREADS = 256, TRANSPOSE = 32;
constexpr float LOG2_E = 1.4426950408889634f;

template <class A> struct LargestOf { __device__ A operator()(A a, A b) const { return max_or_nan(a, b); } };
template <class A> struct SumOf { __device__ A operator()(A a, A b) const { return a + b; } };

// Over a block of ROW_THREADS, in a fixed order, known to all.
template <class Op, class A> __device__ __forceinline__ A reduce(A x) {
  __shared__ A parts[ROW_THREADS / 32];
  const Op op;
#pragma unroll
  for (int step = 16; step; step /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, step));
  __syncthreads();  // what an earlier call left has been read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = parts[0];
#pragma unroll
  for (int i = 1; i < ROW_THREADS / 32; ++i) x = op(x, parts[i]);
  return x;
}

// A power of two near `top`, so that what has it as its largest entry is about 1 when divided by it.
template <class A> __device__ __forceinline__ A power_near(A top) {
  if (!(top > A(0)) || top == INFINITE<A>) return A(1);
  int exponent;
  frexp(top, &exponent);
  exponent = exponent < -120 ? -120 : exponent > 120 ? 120 : exponent;
  return A(ldexp(A(1), exponent));
}

template <class A> __global__ void __launch_bounds__(ROW_THREADS) pack_patch_weights(PatchWeights<A> to, Patches<const A> from) {
  const int64_t row = blockIdx.x, entry = row / to.patches;
  const A* weights = from.data + entry * from.batch_stride + from.patch(row % to.patches);
  A top = 0;
  for (uint32_t x = threadIdx.x; x < to.points; x += ROW_THREADS) {
    const A w = weights[from.point(x)];
    top = max_or_nan(top, w >= A(0) && w < INFINITE<A> ? w : NOT_A_NUMBER<A>);
  }
  top = reduce<LargestOf<A>>(top);
  const A scale = top == top ? power_near(top) : NOT_A_NUMBER<A>;
  if (threadIdx.x == 0) to.scale[row] = scale;
  for (uint32_t x = threadIdx.x; x < to.points; x += ROW_THREADS) to.scaled[row * to.points + x] = top == top ? weights[from.point(x)] / scale : scale;
}

// (groups, patches) with its own strides.
template <class A> struct RowTerm {
  const A* data;
  int64_t batch_stride, head_stride, patch_stride;
  uint32_t heads;
  __device__ A of(int64_t g, int64_t patch) const { return data ? data[g / heads * batch_stride + g % heads * head_stride + patch * patch_stride] : A(0); }
};

template <class A> __device__ __forceinline__ A sum_of_splits(const A* partial, int64_t splits, int64_t stride) {
  A sum = 0;
#pragma unroll 4
  for (int64_t s = 0; s < splits; ++s) sum += partial[s * stride];
  return sum;
}

template <class T, class A> struct SoftmaxOutput {
  A* matrix;                 // (groups, rows, columns): probabilities, or where not `normalised` their multiples; scratch if unwanted
  bool normalised;
  A* lse;                    // (all groups, patches), or null
  A* stats;                  // (groups, patches, 2): shift and 1 / sum of every row, or null
  bool from_stats;           // stats are known: the columns are part of the rows
  Coefficients<T, A> coefficients;  // data null: not wanted
  int64_t patches;
};

// One block per row: s = factor sum over the splits, its softmax.
template <class T, class A>
__global__ void __launch_bounds__(ROW_THREADS) patch_softmax(const A* partial, int64_t splits, Block block, A factor, PatchWeights<A> weights, SoftmaxOutput<T, A> o) {
  const int64_t row = blockIdx.x, local = row / block.rows, r = row % block.rows, g = block.group + local, patch = block.row + r;
  const A* from = partial + row * block.columns;
  A *to = o.matrix + row * block.columns, *stats = o.stats ? o.stats + 2 * (local * o.patches + patch) : nullptr;
  factor *= weights.scale_of(g, patch);
  A top = -INFINITE<A>;
  for (int64_t c = threadIdx.x; c < block.columns; c += ROW_THREADS) {
    const A s = factor * sum_of_splits(from + c, splits, block.size());
    to[c] = s;
    top = max_or_nan(top, s);
  }
  top = o.from_stats ? stats[0] : reduce<LargestOf<A>>(top);
  T* coefficients = o.coefficients.data ? o.coefficients.data + row * o.coefficients.pitch : nullptr;
  A sum = 0;
  for (int64_t c = threadIdx.x; c < block.columns; c += ROW_THREADS) {
    const A e = exp_2((to[c] - top) * A(1.4426950408889634));
    to[c] = e;
    sum += e;
    if (coefficients) coefficients[c] = convert<T>(e);
  }
  A inverse;
  if (o.from_stats) {
    inverse = stats[1];
  } else {
    sum = reduce<SumOf<A>>(sum);
    inverse = block.columns == 0 ? A(0) : 1 / sum;
    if (threadIdx.x == 0) {
      if (o.lse) o.lse[g * o.patches + patch] = top + log_2(sum) * A(0.6931471805599453);
      if (stats) stats[0] = top, stats[1] = inverse;
    }
  }
  if (o.normalised) {
    for (int64_t c = threadIdx.x; c < block.columns; c += ROW_THREADS) to[c] *= inverse;
  }
  if (coefficients) {
    for (int64_t c = block.columns + threadIdx.x; c < o.coefficients.pitch; c += ROW_THREADS) coefficients[c] = convert<T>(0.f);
    if (threadIdx.x == 0) o.coefficients.scale[row] = inverse;
  }
}

template <class T, class A> struct ScoreGradients {
  const A* probabilities;  // (groups, rows, columns)
  RowTerm<A> grad_lse;
  A* gradients;            // (groups, rows, columns), of the scores
  A* delta;                // (groups, patches): sum of probability times its gradient; read if `from_delta`, else written
  bool from_delta;
  Coefficients<T, A> coefficients;  // data null: not wanted
  int64_t patches;
};

// One block per row: g = p (dp - sum p dp + grad_lse), dp the sum over the splits.
template <class T, class A>
__global__ void __launch_bounds__(ROW_THREADS) patch_score_gradients(const A* partial, int64_t splits, Block block, ScoreGradients<T, A> o) {
  const int64_t row = blockIdx.x, local = row / block.rows, patch = block.row + row % block.rows;
  const A *from = partial + row * block.columns, *p = o.probabilities + row * block.columns;
  A *to = o.gradients + row * block.columns, *delta = o.delta + local * o.patches + patch;
  A sum = 0;
  for (int64_t c = threadIdx.x; c < block.columns; c += ROW_THREADS) {
    const A dp = sum_of_splits(from + c, splits, block.size());
    to[c] = dp;
    sum = fused(p[c], dp, sum);
  }
  if (o.from_delta) {
    sum = *delta;
  } else {
    sum = reduce<SumOf<A>>(sum);
    if (threadIdx.x == 0) *delta = sum;
  }
  const A centre = o.grad_lse.of(block.group + local, patch) - sum;
  A top = 0;
  for (int64_t c = threadIdx.x; c < block.columns; c += ROW_THREADS) {
    const A g = p[c] * (to[c] + centre);
    to[c] = g;
    top = max_or_nan(top, g < A(0) ? -g : g);
  }
  if (!o.coefficients.data) return;
  const A scale = sizeof(T) == 2 ? power_near(reduce<LargestOf<A>>(top)) : A(1);
  T* coefficients = o.coefficients.data + row * o.coefficients.pitch;
  for (int64_t c = threadIdx.x; c < o.coefficients.pitch; c += ROW_THREADS) coefficients[c] = c < block.columns ? convert<T>(to[c] / scale) : convert<T>(0.f);
  if (threadIdx.x == 0) o.coefficients.scale[row] = scale;
}

// The columns of a matrix as rows of coefficients, its rows times the scales of their patches' weights. One block per 32 columns.
template <class T, class A>
__global__ void __launch_bounds__(TRANSPOSE_THREADS) transpose_coefficients(const A* matrix, Block block, PatchWeights<A> weights, Coefficients<T, A> to) {
  constexpr int STRIDE = TRANSPOSE_THREADS / TRANSPOSE;
  __shared__ A tile[TRANSPOSE][TRANSPOSE + 1];
  __shared__ A scales[TRANSPOSE];
  const int64_t tiles = (block.columns + TRANSPOSE - 1) / TRANSPOSE, local = blockIdx.x / tiles, c0 = blockIdx.x % tiles * TRANSPOSE, g = block.group + local;
  const int lane = threadIdx.x % TRANSPOSE, part = threadIdx.x / TRANSPOSE;
  const A* from = matrix + local * block.rows * block.columns;
  auto entry = [&](int64_t r) {
    return r < block.rows && c0 + lane < block.columns ? from[r * block.columns + c0 + lane] * weights.scale_of(g, block.row + r) : A(0);
  };
  if (sizeof(T) == 2) {
    A top = 0;
    for (int64_t r = part; r < block.rows; r += STRIDE) {
      const A x = entry(r);
      top = max_or_nan(top, x < A(0) ? -x : x);
    }
    tile[part][lane] = top;
    __syncthreads();
    if (part == 0) {
      for (int i = 1; i < STRIDE; ++i) top = max_or_nan(top, tile[i][lane]);
      scales[lane] = power_near(top);
    }
  } else if (part == 0) {
    scales[lane] = A(1);
  }
  __syncthreads();
  if (part == 0 && c0 + lane < block.columns) to.scale[local * block.columns + c0 + lane] = scales[lane];
  for (int64_t r0 = 0; r0 < to.pitch; r0 += TRANSPOSE) {
#pragma unroll
    for (int k = part; k < TRANSPOSE; k += STRIDE) tile[k][lane] = entry(r0 + k);
    __syncthreads();
#pragma unroll
    for (int k = part; k < TRANSPOSE; k += STRIDE) {
      if (c0 + k < block.columns && r0 + lane < to.pitch) to.data[(local * block.columns + c0 + k) * to.pitch + r0 + lane] = convert<T>(tile[lane][k] / scales[k]);
    }
    __syncthreads();
  }
}

// The gradient of the weights: over heads, the channels' tiles, and the batch where it shares the weights. 0 where the weight is.
template <class A>
__global__ void __launch_bounds__(TRANSPOSE_THREADS) reduce_patch_weights(Patches<A> to, PatchWeights<A> weights, const A* sums, int slots, int tile,
                                                                          int64_t channels, int64_t batch) {
  const int64_t at = int64_t(blockIdx.x) * TRANSPOSE_THREADS + threadIdx.x;
  if (at >= weights.entries * weights.patches * weights.points) return;
  const int64_t x = at % weights.points, row = at / weights.points, patch = row % weights.patches, entry = row / weights.patches;
  const int64_t begin = weights.entries == 1 ? 0 : entry, end = weights.entries == 1 ? batch : entry + 1;
  const int used = channels > 0 ? int(((x + 1) * channels - 1) / tile - x * channels / tile) + 1 : 0;
  A sum = 0;
  for (int64_t g = begin * weights.heads; g < end * weights.heads; ++g) {
    const A* from = sums + ((g * weights.patches + patch) * weights.points + x) * slots;
    for (int slot = 0; slot < used; ++slot) sum += from[slot];
  }
  to.data[entry * to.batch_stride + to.patch(patch) + to.point(uint32_t(x))] = weights.scaled[at] == A(0) ? A(0) : sum;
}

}  // namespace cuda
}  // namespace continuum_ops
