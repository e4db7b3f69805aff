// Inner products of patches: partial[split][row][column] = sum over a split's points and channels of a_row b_column. The points are
// split among blocks, since a few hundred patches alone do not fill a GPU; the partial sums are added later, in their order.
#pragma once

#include "patch_attention_tensors.cuh"

namespace continuum_ops {
namespace cuda {

constexpr int PRODUCT_STAGES = 3;

template <class T, class A, class S> constexpr size_t product_shared(bool weighted) {
  using Tl = Tile<T, false>;
  return PRODUCT_STAGES * (size_t(S::M + S::N) * (STEP<Tl> + Tl::PAD_ALONG) * sizeof(T) + (weighted ? size_t(S::M) * 4 * sizeof(A) : 0));
}

// One sum over the points whose weight is not zero; it ends where it is not a number.
template <class T, class A>
__device__ __forceinline__ A sum_of_live(const Patches<const T>& a, const Patches<const T>& b, int64_t base_a, int64_t base_b, const A* weights, uint32_t first, uint32_t count) {
  A sum = 0;
  for (uint32_t c = first; c < first + count && c < a.columns && sum == sum; ++c) {
    const A weight = weights[c / a.channels];
    if (weight != A(0)) sum = fused(A(widen(a.data[base_a + a.column(c)])) * weight, A(widen(b.data[base_b + b.column(c)])), sum);
  }
  return sum;
}

// What a block computes.
struct ProductPlace {
  int64_t m0, n0, local, group, split;

  template <class S> static __device__ __forceinline__ ProductPlace of(const Block& block, unsigned index) {
    ProductPlace p;
    const int64_t tiles_m = (block.rows + S::M - 1) / S::M, tiles_n = (block.columns + S::N - 1) / S::N;
    int64_t rest = index;  // heads side by side: they read the same memory pages
    p.m0 = rest % tiles_m * S::M;
    rest /= tiles_m;
    p.n0 = rest % tiles_n * S::N;
    rest /= tiles_n;
    p.local = rest % block.groups, p.split = rest / block.groups, p.group = block.group + p.local;
    return p;
  }
};

// a is weighted, if there are weights.
template <class T, bool TF32, class S, class A = typename Tile<T, TF32>::Acc>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) patch_products(Patches<const T> a, Patches<const T> b, PatchWeights<A> weights, Block block,
                                                                         Splits splits, A* partial) {
  using Tl = Tile<T, TF32>;
  constexpr int V = Tl::VECTOR, KC = STEP<Tl>, PITCH = KC + Tl::PAD_ALONG, ROWS = S::M + S::N, SLAB = S::THREADS / 4, STAGE = ROWS * PITCH;
  static_assert(KC == 4 * V);
  CUDA_DYN_SMEM(T, shared);
  A* shared_weights = reinterpret_cast<A*>(shared + PRODUCT_STAGES * STAGE);
  __shared__ int64_t bases[ROWS], weight_bases[S::M];  // where a tile's rows begin; -1: beyond the block

  uint32_t first_column;  // of the split
  int steps;
  {
    const ProductPlace place = ProductPlace::of<S>(block, blockIdx.x);
    const int64_t all_steps = (int64_t(a.columns) + KC - 1) / KC, first = place.split * splits.steps;
    first_column = uint32_t(first * KC);
    steps = int(all_steps - first < splits.steps ? all_steps - first : splits.steps);
    for (int r = threadIdx.x; r < ROWS; r += S::THREADS) {
      int64_t base = -1;
      if (r < S::M) {
        const int64_t row = place.m0 + r;
        if (row < block.rows) base = a.group(place.group) + a.patch(block.row + row);
        if (weights.scaled) weight_bases[r] = row < block.rows ? weights.row(place.group, block.row + row) * weights.points : 0;
      } else if (place.n0 + r - S::M < block.columns) {
        base = b.group(place.group) + b.patch(block.column + place.n0 + r - S::M);
      }
      bases[r] = base;
    }
  }
  __syncthreads();

  const int slot = threadIdx.x % 4 * V, first_row = threadIdx.x / 4;  // this thread's vector of the rows first_row + k SLAB
  int load_stage = 0;
  uint32_t column = first_column + slot;  // of the next load
  auto load = [&] {
    T* tile = shared + load_stage * STAGE;
    A* tile_weights = shared_weights + load_stage * S::M * 4;
    const bool within = column < a.columns;
    const uint32_t point = column / a.channels;
    auto copy = [&](const Patches<const T>& x, int64_t at, int r, bool is_a) {
      T* to = tile + r * PITCH + slot;
      const int64_t base = bases[r];
      const bool weigh_it = is_a && weights.scaled;
      if (x.vectors) {
        const bool valid = within && base >= 0;
        copy_16(to, valid ? x.data + base + at : x.data, valid);
        if (weigh_it) copy_async<sizeof(A)>(tile_weights + r * 4 + slot / V, weights.scaled + (valid ? weight_bases[r] + point : 0), valid);
        return;
      }
#pragma unroll 1
      for (int e = 0; e < V; ++e) {
        T value = convert<T>(0.f);
        if (base >= 0 && column + e < x.columns) {
          value = x.data[base + x.column(column + e)];
          if (weigh_it) value = weighted(value, weights.scaled[weight_bases[r] + (column + e) / x.channels]);
        }
        to[e] = value;
      }
    };
    int r = first_row;
    int64_t at = a.column(column);
#pragma unroll 1  // registers are what is scarce
    for (; r < S::M; r += SLAB) copy(a, at, r, true);
    at = b.column(column);
#pragma unroll 1
    for (; r < ROWS; r += SLAB) copy(b, at, r, false);
    column += KC;
    load_stage = load_stage + 1 == PRODUCT_STAGES ? 0 : load_stage + 1;
  };

  const int warp = threadIdx.x / 32, warp_row = warp % S::WARPS_M * S::WARP_M, warp_column = warp / S::WARPS_M * S::WARP_N;
  A acc[S::MT][S::NT][4] = {};
#pragma unroll 1
  for (int step = 0; step < PRODUCT_STAGES - 1; ++step) {
    if (step < steps) load();
    end_copy_group();
  }
  int stage = 0;
#pragma unroll 1
  for (int left = steps; left > 0; --left) {
    T* tile = shared + stage * STAGE;
    copy_groups_arrived<PRODUCT_STAGES - 2>();
    if (weights.scaled && a.vectors) {
#pragma unroll 1
      for (int r = first_row; r < S::M; r += SLAB) weigh(tile + r * PITCH + slot, shared_weights[(stage * S::M + r) * 4 + slot / V]);
    }
    __syncthreads();  // everybody's copies are here, and the tile that the next load overwrites has been used
    if (left >= PRODUCT_STAGES) load();
    end_copy_group();
    tile_product<Tl, S::MT, S::NT, true>(acc, tile + warp_row * PITCH, PITCH, tile + (S::M + warp_column) * PITCH, PITCH, KC);
    stage = stage + 1 == PRODUCT_STAGES ? 0 : stage + 1;
  }

  const ProductPlace place = ProductPlace::of<S>(block, opaque(blockIdx.x));
  A* to = partial + (place.split * block.groups + place.local) * block.rows * block.columns;
  const int lane = threadIdx.x % 32;
  bool number = true;
#pragma unroll
  for (int i = 0; i < S::MT; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t r = place.m0 + warp_row + 16 * i + fragment_row(lane, e);
      if (r >= block.rows) continue;
#pragma unroll
      for (int j = 0; j < S::NT; ++j) {
        const int64_t c = place.n0 + warp_column + 8 * j + fragment_column(lane, e);
        if (c >= block.columns) continue;
        to[r * block.columns + c] = acc[i][j][e];
        number = number && acc[i][j][e] == acc[i][j][e];
      }
    }
  }
  if (!weights.scaled || __syncthreads_and(number)) return;
  // What b holds where the weight is zero may have made a sum NaN, and does not count: such sums once more.
  for (int i = threadIdx.x; i < S::M * S::N; i += S::THREADS) {
    const int r = i / S::N, c = i % S::N;
    if (bases[r] < 0 || bases[S::M + c] < 0) continue;
    A& at = to[(place.m0 + r) * block.columns + place.n0 + c];
    if (at != at) at = sum_of_live(a, b, bases[r], bases[S::M + c], weights.scaled + weight_bases[r], first_column, uint32_t(steps) * KC);
  }
}

}  // namespace cuda
}  // namespace continuum_ops
