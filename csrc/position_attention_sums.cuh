// rows x columns = P x, by tensor cores. P is computed once per (query, key, head) for the batch and all channels of a block's columns
// (up to 512) and kept in shared memory. A row's nearest key and its maximum are known beforehand (find_shifts): nothing is rescaled, far
// tiles are skipped.
#pragma once

#include "cuda_tiles.h"
#include "position_attention_geometry.cuh"

namespace continuum_ops {
namespace cuda {

constexpr int ROWS = POINTS;   // of a block's tile
constexpr int WARP_ROWS = 32;  // of a warp's share of it
constexpr int MT = WARP_ROWS / 16;

template <class T, class A> struct SumOutput {
  T* out;  // (batch, heads, rows, channels)
  A *lse, *stats;  // forward only
  int64_t rows, others, columns;
  int heads, x_heads;  // of out, of x
};

template <class Tile, int CT, int THREADS> struct SumShape {
  static constexpr int WARP_COLUMNS = CT * 2 / (THREADS / 32), NT = WARP_COLUMNS / 8;  // two warps share a column range
  static constexpr int BK = Tile::is_half ? 64 : 32;                                   // keys (queries) of a step
  static constexpr int P_PITCH = BK + Tile::PAD_ALONG, X_PITCH = CT + Tile::PAD_ACROSS;
  static constexpr int PER_ROW = THREADS / ROWS, SCORES = BK / PER_ROW;  // threads of a row, scores of a thread
  static_assert(SCORES % 4 == 0 && PER_ROW <= 32 && (PER_ROW & (PER_ROW - 1)) == 0 && POINTS % BK == 0);
};

template <class T, bool TF32, int CT, int THREADS, bool TRANSPOSED, class A = typename Tile<T, TF32>::Acc>
__global__ void __launch_bounds__(THREADS, THREADS == 512 ? 1 : CT == 64 && Tile<T, TF32>::arithmetic <= Arithmetic::tf32 ? 3 : 2) weighted_sum(Geometry<A> geo, Columns<T> x, SumOutput<T, A> o) {
  using Tl = Tile<T, TF32>;
  using S = SumShape<Tl, CT, THREADS>;
  CUDA_DYN_SMEM(T, shared);
  __shared__ A denominators[ROWS];
  T *p_tile = shared, *x_tile = shared + ROWS * S::P_PITCH;

  const int64_t column_blocks = o.columns > 0 ? (o.columns + CT - 1) / CT : 1;
  const Points<A>&row_points = TRANSPOSED ? geo.key : geo.query, &other_points = TRANSPOSED ? geo.query : geo.key;
  const int64_t row_tiles = row_points.pad / ROWS;
  int64_t block = blockIdx.x;
  const int64_t column = block % column_blocks * CT;
  block /= column_blocks;
  const int64_t row_tile = block % row_tiles, row0 = row_tile * ROWS;
  block /= row_tiles;
  const int out_head = int(block % o.heads);
  const int64_t g = block / o.heads;
  // Values that the heads share get the gradients of all of them.
  const int head_begin = TRANSPOSED && o.heads == 1 ? 0 : out_head, head_end = TRANSPOSED && o.heads == 1 ? geo.heads : out_head + 1;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp % 2 * WARP_ROWS, warp_column = warp / 2 * S::WARP_COLUMNS;
  const int row = threadIdx.x / S::PER_ROW, j_first = threadIdx.x % S::PER_ROW * S::SCORES;
  const A* point = row_points.of(g) + row0 + row;
  const A* others = other_points.of(g);
  A acc[MT][S::NT][4] = {};
  A denominator = 0;

#pragma unroll 1
  for (int head = head_begin; head < head_end; ++head) {
    const A rate = geo.rate_of(head);
    const int64_t gh = g * geo.heads + head;
    const A* drops = geo.drop.of(gh);
    const A* log_weights = geo.log_weights.of(g);
    const A* reaches = geo.reach.of(g);
    // What belongs to the row: its own share of the exponent.
    const A row_term = TRANSPOSED ? log_weights[row0 + row] : drops[row0 + row];
    const A row_nearest = TRANSPOSED ? A(0) : geo.nearest.of(g)[row0 + row];
    const A row_reach = TRANSPOSED ? A(0) : reaches[row0 + row];
    for (int64_t j0 = 0; j0 < o.others; j0 += S::BK) {
      const int64_t other_tile = j0 / POINTS;
      if (TRANSPOSED ? skippable(geo, g, head, rate, other_tile, row_tile, VANISHING<A>)
                     : skippable(geo, g, head, rate, row_tile, other_tile, geo.log_negligible)) continue;
      stage<Tl, S::BK, CT, THREADS>(x_tile, S::X_PITCH, x, geo.geometries == 1 ? 0 : g, o.x_heads == 1 ? 0 : head, j0, o.others, column,
                                    o.columns, TRANSPOSED ? static_cast<const A*>(nullptr) : log_weights);
      bool counts = false;
#pragma unroll 1
      for (int s = 0; s < S::SCORES; s += 4) {
        const int64_t j = j0 + j_first + s;
        const Four<A> distance = distances(point, row_points, others + j, other_points, geo.period);
        const Four<A> term = *reinterpret_cast<const Four<A>*>((TRANSPOSED ? drops : log_weights) + j);
        Four<A> near, reach, scale;
        if (TRANSPOSED) {  // addresses formed here: as many kept over the loop spill on sm_80
          near = *reinterpret_cast<const Four<A>*>(geo.nearest.of(g) + j);
          reach = *reinterpret_cast<const Four<A>*>(reaches + j);
          scale = *reinterpret_cast<const Four<A>*>(geo.scale + (gh * geo.query.pad + j));
        }
        struct alignas(4 * sizeof(T)) { T x[4]; } packed;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          A p;
          if (TRANSPOSED) {
            p = exp_2(score(distance.x[e], near.x[e], rate, row_term + term.x[e], reach.x[e])) * scale.x[e];
            counts |= p != A(0);
          } else {
            p = exp_2(score(distance.x[e], row_nearest, rate, term.x[e] + row_term, row_reach));
            denominator += p;
            counts |= !(p <= geo.negligible);
          }
          packed.x[e] = convert<T>(p);
        }
        *reinterpret_cast<decltype(packed)*>(p_tile + row * S::P_PITCH + j_first + s) = packed;
      }
      copies_arrived();
      if (__syncthreads_or(counts)) {
        tile_product<Tl, MT, S::NT, false>(acc, p_tile + warp_row * S::P_PITCH, S::P_PITCH, x_tile + warp_column, S::X_PITCH, S::BK);
      }
      __syncthreads();
    }
  }

  if (!TRANSPOSED) {
#pragma unroll
    for (int step = 1; step < S::PER_ROW; step *= 2) denominator += __shfl_xor_sync(0xffffffffu, denominator, step);
    if (threadIdx.x % S::PER_ROW == 0) {
      denominators[row] = denominator;
      if (column == 0 && row0 + row < o.rows) {
        const int64_t at = (g * geo.heads + out_head) * o.rows + row0 + row;
        const A shift = -geo.drop.of(g * geo.heads + out_head)[row0 + row], nearest = geo.nearest.of(g)[row0 + row];
        const A logarithm = fused(-geo.rate[out_head * geo.rate_stride], nearest, (shift + log_2(denominator)) * A(0.6931471805599453));
        o.stats[3 * at] = nearest;
        o.stats[3 * at + 1] = shift;
        o.stats[3 * at + 2] = denominator;
        o.lse[at] = denominator == A(0) ? -INFINITE<A> : logarithm;
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = warp_row + 16 * i + fragment_row(lane, e);
      if (row0 + r >= o.rows) continue;
      const A divisor = TRANSPOSED ? A(1) : denominators[r] == A(0) ? A(1) : denominators[r];
#pragma unroll
      for (int j = 0; j < S::NT; ++j) {
        const int64_t c = column + warp_column + 8 * j + fragment_column(lane, e);
        if (c >= o.columns) continue;
        const uint32_t entry = uint32_t(c) / x.channels, channel = uint32_t(c) - entry * x.channels;
        const int64_t b = (geo.geometries == 1 ? 0 : g) + entry;
        o.out[((b * o.heads + out_head) * o.rows + row0 + r) * x.channels + channel] = convert<T>(acc[i][j][e] / divisor);
      }
    }
  }
}

}  // namespace cuda
}  // namespace continuum_ops
