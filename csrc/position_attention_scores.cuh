// Per row sum_j g, sum_j g d2 and sum_j g (x - y) of the scores' gradient g: what the gradients of weights, rate and positions are made of.
#pragma once

#include "position_attention_sums.cuh"

namespace continuum_ops {
namespace cuda {

constexpr int SUM_THREADS = 256;
// Axes of one launch: as many sums a row as registers hold.
template <class A> constexpr int AXES_OF_LAUNCH = sizeof(A) == 8 ? 2 : 3;
constexpr int SIDE_NT = 2, SIDE_WARP = 8 * SIDE_NT;  // columns of a warp: 4 x 16 are a tile's 64

template <class A> struct ScoreSums {
  A* sums;  // (geometries, heads, rows, 2 + d)
  int64_t rows, others, columns;
  int value_heads, first_axis, axes;  // the axes of this launch; 0: no positions
};

template <class Tile> struct SideShape {
  static constexpr int KC = Tile::is_half ? 64 : Tile::is_double ? 16 : 32;  // columns (channels of the batch) of a step
  static constexpr int PITCH = KC + Tile::PAD_ALONG;
};

// g_ik = p_ik (grad_out_i . value_k + centre_i); rows are the queries, or the keys if TRANSPOSED.
template <class T, bool TF32, bool TRANSPOSED, class A = typename Tile<T, TF32>::Acc>
__global__ void __launch_bounds__(SUM_THREADS, Tile<T, TF32>::arithmetic >= Arithmetic::tf32x3 ? 1 : 2) score_sums(Geometry<A> geo, Columns<T> grad_out, Columns<T> value, ScoreSums<A> o) {
  using Tl = Tile<T, TF32>;
  using S = SideShape<Tl>;
  constexpr int AXES = AXES_OF_LAUNCH<A>;
  CUDA_DYN_SMEM(T, shared);
  const Points<A>&row_points = TRANSPOSED ? geo.key : geo.query, &other_points = TRANSPOSED ? geo.query : geo.key;
  const int64_t row_tiles = row_points.pad / ROWS, row_tile = blockIdx.x % row_tiles, row0 = row_tile * ROWS;
  const int64_t gh = blockIdx.x / row_tiles, g = gh / geo.heads;
  const int head = int(gh % geo.heads), value_head = o.value_heads == 1 ? 0 : head;
  const int64_t batch = geo.geometries == 1 ? 0 : g;
  const A rate = geo.rate_of(head);
  const A *log_weights = geo.log_weights.of(g), *reaches = geo.reach.of(g), *nearest = geo.nearest.of(g), *drops = geo.drop.of(gh);
  const A *scales = geo.scale + gh * geo.query.pad, *centres = geo.centre + gh * geo.query.pad;
  const A *row_position = row_points.of(g) + row0, *other_position = other_points.of(g);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp % 2 * WARP_ROWS, warp_column = warp / 2 * SIDE_WARP;
  constexpr int R = 2 * MT, C = 2 * SIDE_NT;  // this thread's rows and columns of the tile
  int rows[R];
#pragma unroll
  for (int r = 0; r < R; ++r) rows[r] = warp_row + r / 2 * 16 + fragment_row(lane, r % 2 * 2);
  A sums[R][2 + AXES] = {};

  for (int64_t j0 = 0; j0 < o.others; j0 += POINTS) {
    const int64_t other_tile = j0 / POINTS;
    // Nothing is negligible here: the gradient of a weight is divided by the weight.
    if (TRANSPOSED ? skippable(geo, g, head, rate, other_tile, row_tile, VANISHING<A>)
                   : skippable(geo, g, head, rate, row_tile, other_tile, VANISHING<A>)) continue;
    int64_t columns[C / 2];  // pairs of neighbours
#pragma unroll
    for (int c = 0; c < C / 2; ++c) columns[c] = j0 + warp_column + 8 * c + fragment_column(lane, 0);
    A distance[R][C] = {}, p[R][C];
#pragma unroll 1
    for (int axis = 0; axis < row_points.d; ++axis) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const A step = difference(row_position + rows[r], row_points, other_position + columns[c / 2] + c % 2, other_points, geo.period, axis);
          distance[r][c] = fused(step, step, distance[r][c]);
        }
      }
    }
    bool counts = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const int64_t query = TRANSPOSED ? columns[c / 2] + c % 2 : row0 + rows[r], key = TRANSPOSED ? row0 + rows[r] : columns[c / 2] + c % 2;
        p[r][c] = exp_2(score(distance[r][c], nearest[query], rate, log_weights[key] + drops[query], reaches[query])) * scales[query];
        counts |= p[r][c] != A(0);
      }
    }
    if (!__syncthreads_or(counts)) continue;

    A acc[MT][SIDE_NT][4] = {};
    for (int64_t column = 0; column < o.columns; column += S::KC) {
      T *left = shared, *right = shared + ROWS * S::PITCH;
      stage<Tl, ROWS, S::KC, SUM_THREADS>(TRANSPOSED ? right : left, S::PITCH, grad_out, batch, head, TRANSPOSED ? j0 : row0,
                                          geo.query.n, column, o.columns, static_cast<const A*>(nullptr));
      stage<Tl, ROWS, S::KC, SUM_THREADS>(TRANSPOSED ? left : right, S::PITCH, value, batch, value_head, TRANSPOSED ? row0 : j0,
                                          geo.key.n, column, o.columns, log_weights);
      copies_arrived();
      __syncthreads();
      tile_product<Tl, MT, SIDE_NT, true>(acc, left + warp_row * S::PITCH, S::PITCH, right + warp_column * S::PITCH, S::PITCH, S::KC);
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const int64_t query = TRANSPOSED ? columns[c / 2] + c % 2 : row0 + rows[r];
        const A gradient = p[r][c] * (acc[r / 2][c / 2][r % 2 * 2 + c % 2] + centres[query]);
        p[r][c] = gradient;
        if (TRANSPOSED) sums[r][0] += gradient;  // the weights' gradient
        sums[r][1] = fused(gradient, distance[r][c], sums[r][1]);
      }
    }
#pragma unroll
    for (int a = 0; a < AXES; ++a) {
      if (a >= o.axes) break;
      const int axis = o.first_axis + a;
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const A step = difference(row_position + rows[r], row_points, other_position + columns[c / 2] + c % 2, other_points, geo.period, axis);
          sums[r][2 + a] = fused(p[r][c], TRANSPOSED ? -step : step, sums[r][2 + a]);
        }
      }
    }
  }

  // The four lanes of a row, then the four warps of its columns, in this order.
  __shared__ A parts[4][ROWS][2 + AXES];
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int a = 0; a < 2 + AXES; ++a) {
      A sum = sums[r][a];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 == 0) parts[warp / 2][rows[r]][a] = sum;
    }
  }
  __syncthreads();
  const int width = 2 + row_points.d;
  for (int i = threadIdx.x; i < ROWS * (2 + AXES); i += SUM_THREADS) {
    const int r = i / (2 + AXES), a = i % (2 + AXES);
    if (row0 + r >= o.rows || a >= 2 + o.axes || (a < 2 && o.first_axis > 0)) continue;
    o.sums[(gh * o.rows + row0 + r) * width + (a < 2 ? a : a + o.first_axis)] = (parts[0][r][a] + parts[1][r][a]) + (parts[2][r][a] + parts[3][r][a]);
  }
}

}  // namespace cuda
}  // namespace continuum_ops
