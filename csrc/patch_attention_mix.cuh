// Patches mixed: out_row = alpha scale_row sum_source c_row,source x_source, over all points and channels of a patch. A block keeps its
// rows and walks along the columns: the copies for the next tile are under way while the last one is written.
#pragma once

#include "patch_attention_tensors.cuh"

namespace continuum_ops {
namespace cuda {

constexpr int MIX_STAGES = 4;

template <class T, class A> struct MixOutput {
  Patches<T> out;            // data null: not wanted
  PatchWeights<A> weights;   // of the rows of out, or none
  A alpha;
  int64_t row, rows;         // patches of out that are computed
  // For the gradient of the weights: sums over the channels of query times the product before out's own weight.
  Patches<const T> query;
  A* sums;  // (groups, patches, points, slots), or null
  int slots;
};

struct MixRange {
  int64_t group, groups, sources, tiles;  // tiles: of columns, each block's
};

// A point's channels may lie in several tiles: each has a slot for its sum.
inline int slots_of(int64_t channels, int tile) { return channels <= 0 || tile % channels == 0 ? 1 : int((channels - 1) / tile) + 2; }

template <class T, class A, class S> struct MixShape {
  using Tl = Tile<T, false>;
  static constexpr int V = Tl::VECTOR, BK = STEP<Tl>, C_PITCH = BK + Tl::PAD_ALONG, X_PITCH = S::N + Tl::PAD_ACROSS;
  static constexpr int ROW_VECTORS = S::N / V, SLAB = S::THREADS / ROW_VECTORS;  // rows of x that the threads copy at once
  static constexpr int STAGE = S::M * C_PITCH + BK * X_PITCH;
  static constexpr int BAND = 16 * S::WARPS_M, BAND_PITCH = S::N + 1;
  static_assert(S::THREADS % ROW_VECTORS == 0);
  static constexpr size_t shared(bool weighted, bool sums) {
    return MIX_STAGES * (size_t(STAGE) * sizeof(T) + (weighted ? size_t(BK) * ROW_VECTORS * sizeof(A) : 0)) + (sums ? size_t(BAND) * BAND_PITCH * sizeof(A) : 0);
  }
};

// Sums over the channels of each point of a tile: the products of one band of rows at a time stand in shared memory.
template <class S, class M, class T, class A>
__device__ __forceinline__ void sum_channels(const MixOutput<T, A>& o, const A (&acc)[S::MT][S::NT][4], A* band, const A* factors, int64_t g, int64_t m0,
                                             uint32_t column0, uint32_t columns) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, band_row = warp % S::WARPS_M * 16, warp_column = warp / S::WARPS_M * S::WARP_N;
  const Patches<const T>& q = o.query;
  const uint32_t end = column0 + S::N < columns ? column0 + S::N : columns;
  const uint32_t first = column0 / q.channels, points = (end - 1) / q.channels - first + 1;
  const int64_t tile = column0 / S::N;
#pragma unroll
  for (int i = 0; i < S::MT; ++i) {
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int in_band = band_row + fragment_row(lane, 2 * h), r = warp % S::WARPS_M * S::WARP_M + 16 * i + fragment_row(lane, 2 * h);
      if (m0 + r >= o.rows) continue;
      const T* query = q.data + q.group(g) + q.patch(o.row + m0 + r);
#pragma unroll
      for (int j = 0; j < S::NT; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int c = warp_column + 8 * j + fragment_column(lane, e);
          if (column0 + c < end) band[in_band * M::BAND_PITCH + c] = acc[i][j][2 * h + e] * factors[r] * widen(query[q.column(column0 + c)]);
        }
      }
    }
    __syncthreads();
    for (uint32_t at = threadIdx.x; at < M::BAND * points; at += S::THREADS) {
      const int in_band = int(at / points), r = in_band / 16 * S::WARP_M + 16 * i + in_band % 16;
      if (m0 + r >= o.rows) continue;
      const uint32_t x = first + at % points;
      const uint32_t begin = x * q.channels > column0 ? x * q.channels : column0, stop = (x + 1) * q.channels < end ? (x + 1) * q.channels : end;
      A sum = 0;
      for (uint32_t c = begin; c < stop; ++c) sum += band[in_band * M::BAND_PITCH + (c - column0)];
      const int64_t slot = tile - x * int64_t(q.channels) / S::N;
      o.sums[(((g * o.weights.patches + o.row + m0 + r) * o.weights.points) + x) * o.slots + slot] = sum;
    }
  }
}

template <class T, bool TF32, class S, class A = typename Tile<T, TF32>::Acc>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) patch_mix(Coefficients<T, A> coefficients, Patches<const T> x, PatchWeights<A> x_weights,
                                                                    MixRange range, MixOutput<T, A> o) {
  using Tl = Tile<T, TF32>;
  using M = MixShape<T, A, S>;
  constexpr int V = Tl::VECTOR, BK = M::BK;
  CUDA_DYN_SMEM(T, shared);
  A* shared_weights = reinterpret_cast<A*>(shared + MIX_STAGES * M::STAGE);
  A* band = shared_weights + (x_weights.scaled ? MIX_STAGES * BK * M::ROW_VECTORS : 0);
  __shared__ int64_t out_bases[S::M];
  __shared__ A factors[S::M], own_scales[S::M];

  const int64_t tiles_m = (o.rows + S::M - 1) / S::M;
  int64_t rest = blockIdx.x;
  const int64_t m0 = rest % tiles_m * S::M;
  rest /= tiles_m;
  const int64_t local = rest % range.groups, g = range.group + local;
  const int64_t all_tiles = (int64_t(x.columns) + S::N - 1) / S::N, first_tile = rest / range.groups * range.tiles;
  const int64_t tiles = all_tiles - first_tile < range.tiles ? all_tiles - first_tile : range.tiles;
  const int per_tile = int((range.sources + BK - 1) / BK);
  const int64_t steps = tiles * per_tile;

  for (int r = threadIdx.x; r < S::M; r += S::THREADS) {
    const bool live = m0 + r < o.rows;
    out_bases[r] = live && o.out.data ? o.out.group(g) + o.out.patch(o.row + m0 + r) : -1;
    factors[r] = live ? o.alpha * coefficients.scale[local * o.rows + m0 + r] : A(0);
    own_scales[r] = live ? o.weights.scale_of(g, o.row + m0 + r) : A(0);
  }
  __syncthreads();

  const T* left = coefficients.data + (local * o.rows + m0) * coefficients.pitch;
  const T* right = x.data + x.group(g);
  const int slot = threadIdx.x % M::ROW_VECTORS, slab_row = threadIdx.x / M::ROW_VECTORS;
  // The tile and the step in it that are loaded next.
  int64_t load_tile = first_tile;
  int load_step = 0, load_stage = 0;
  auto load = [&] {
    T *c_tile = shared + load_stage * M::STAGE, *x_tile = c_tile + S::M * M::C_PITCH;
    const int64_t source0 = int64_t(load_step) * BK;
#pragma unroll 1
    for (int i = threadIdx.x; i < S::M * 4; i += S::THREADS) {
      const int r = i / 4, c = i % 4 * V;
      const bool valid = m0 + r < o.rows;
      copy_16(c_tile + r * M::C_PITCH + c, left + (valid ? r * coefficients.pitch + source0 + c : 0), valid);
    }
    const uint32_t column = uint32_t(load_tile * S::N) + slot * V;
    const bool within = column < x.columns;
    const int64_t at = x.vectors ? x.column(column) : 0;
#pragma unroll 1  // registers are what is scarce
    for (int r = slab_row; r < BK; r += M::SLAB) {
      const int64_t source = source0 + r;
      const bool live = source < range.sources;
      const T* from = right + (live ? x.patch(source) : 0);
      T* to = x_tile + r * M::X_PITCH + slot * V;
      if (x.vectors) {
        const bool valid = live && within;
        copy_16(to, valid ? from + at : x.data, valid);
        if (x_weights.scaled) {
          const A* weight = x_weights.of(g, source) + column / x.channels;
          copy_async<sizeof(A)>(shared_weights + (load_stage * BK + r) * M::ROW_VECTORS + slot, valid ? weight : x_weights.scaled, valid);
        }
      } else {
#pragma unroll 1
        for (int e = 0; e < V; ++e) {
          T value = convert<T>(0.f);
          if (live && column + e < x.columns) {
            value = from[x.column(column + e)];
            if (x_weights.scaled) value = weighted(value, x_weights.of(g, source)[(column + e) / x.channels]);
          }
          to[e] = value;
        }
      }
    }
    load_stage = load_stage + 1 == MIX_STAGES ? 0 : load_stage + 1;
    if (++load_step == per_tile) load_step = 0, ++load_tile;
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp % S::WARPS_M * S::WARP_M, warp_column = warp / S::WARPS_M * S::WARP_N;
#pragma unroll 1
  for (int step = 0; step < MIX_STAGES - 1; ++step) {
    if (step < steps) load();
    end_copy_group();
  }
  int64_t step = 0;
  int stage = 0;
#pragma unroll 1
  for (int64_t tile = first_tile; tile < first_tile + tiles; ++tile) {
    A acc[S::MT][S::NT][4] = {};
#pragma unroll 1
    for (int k = 0; k < per_tile; ++k, ++step) {
      T *c_tile = shared + stage * M::STAGE, *x_tile = c_tile + S::M * M::C_PITCH;
      copy_groups_arrived<MIX_STAGES - 2>();
      if (x_weights.scaled && x.vectors) {
#pragma unroll 1
        for (int r = slab_row; r < BK; r += M::SLAB) weigh(x_tile + r * M::X_PITCH + slot * V, shared_weights[(stage * BK + r) * M::ROW_VECTORS + slot]);
      }
      __syncthreads();
      if (step + MIX_STAGES - 1 < steps) load();
      end_copy_group();
      tile_product<Tl, S::MT, S::NT, false>(acc, c_tile + warp_row * M::C_PITCH, M::C_PITCH, x_tile + warp_column, M::X_PITCH, BK);
      stage = stage + 1 == MIX_STAGES ? 0 : stage + 1;
    }
    const uint32_t column0 = uint32_t(tile * S::N);
    if (o.sums) sum_channels<S, M>(o, acc, band, factors, g, m0, column0, x.columns);
    if (!o.out.data) continue;
    const bool pairs = o.out.channels % 2 == 0;  // contiguous: two neighbours in one store
#pragma unroll
    for (int j = 0; j < S::NT; ++j) {
      const uint32_t c = column0 + warp_column + 8 * j + fragment_column(lane, 0);
      if (c >= x.columns) continue;
      const bool second = c + 1 < x.columns;
      const int64_t at = o.out.column(c), at_second = pairs || !second ? at + 1 : o.out.column(c + 1);
#pragma unroll
      for (int i = 0; i < S::MT; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int r = warp_row + 16 * i + fragment_row(lane, 2 * h);
          if (out_bases[r] < 0) continue;
          const A factor = factors[r];
          A first = acc[i][j][2 * h] * factor, next = acc[i][j][2 * h + 1] * factor;
          if (o.weights.scaled) {
            const A *weight = o.weights.of(g, o.row + m0 + r), own = own_scales[r];
            first = weighted(first, weight[c / o.out.channels]) * own;
            if (second) next = weighted(next, weight[(c + 1) / o.out.channels]) * own;
          }
          T* to = o.out.data + out_bases[r];
          struct alignas(2 * sizeof(T)) Pair { T x[2]; } pair = {{convert<T>(first), convert<T>(next)}};
          if (pairs) {
            *reinterpret_cast<Pair*>(to + at) = pair;
          } else {
            to[at] = pair.x[0];
            if (second) to[at_second] = pair.x[1];
          }
        }
      }
    }
  }
}

}  // namespace cuda
}  // namespace continuum_ops
