// What the launchers of the forward and the backward pass share: scratch memory, packed inputs, the choice of a block's width.
#pragma once

#include <algorithm>

#include "cuda_launch.h"
#include "position_attention_cuda.h"
#include "position_attention_sums.cuh"

namespace continuum_ops {
namespace cuda {

template <class A> struct Pieces {
  Geometry<A> geo{};
  A *query_sums = nullptr, *key_sums = nullptr, *period = nullptr;

  Pieces(const PositionProblem& p, const PositionGradients* gradients, Scratch& scratch) {
    const int64_t n = padded(p.n), m = padded(p.m), geometries = p.geometries();
    auto points = [&](int64_t entries, int64_t count, int64_t pad) {
      const int parts = p.wide_positions && sizeof(A) == 4 ? 2 : 1;
      A* position = scratch.take<A>(entries * p.d * parts * pad);
      return Points<A>{position, scratch.take<A>(entries * pad / POINTS * p.d * 2), entries, count, pad, int(p.d), parts};
    };
    auto field = [&](int64_t entries, int64_t pad) {
      A* value = scratch.take<A>(entries * pad);
      return Field<A>{value, scratch.take<A>(entries * pad / POINTS), entries, pad};
    };
    geo.query = points(p.query_entries, p.n, n);
    geo.key = points(std::max(p.key_entries, p.weight_entries), p.m, m);
    geo.log_weights = field(p.weight_entries, m);
    geo.reach = field(p.radius_entries, n);
    geo.nearest = field(geometries, n);
    geo.drop = field(geometries * p.heads, n);
    if (p.period) geo.period = period = scratch.take<A>(2 * p.d);
    geo.rate = static_cast<const A*>(p.rate);
    geo.rate_stride = p.rate_stride;
    geo.geometries = geometries;
    geo.heads = int(p.heads);
    // All negligible terms of a row together stay below half a unit in the last place of its largest one.
    geo.negligible = std::numeric_limits<A>::epsilon() / 2 / A(std::max<int64_t>(p.m, 1));
    geo.log_negligible = std::log2(geo.negligible);
    if (!gradients) return;
    geo.scale = scratch.take<A>(geometries * p.heads * n);
    geo.centre = scratch.take<A>(geometries * p.heads * n);
    const bool key_side = gradients->grad_key_pos || gradients->grad_weights;
    if (gradients->grad_query_pos || (gradients->grad_rate && !key_side)) query_sums = scratch.take<A>(geometries * p.heads * p.n * (2 + p.d));
    if (key_side) key_sums = scratch.take<A>(geometries * p.heads * p.m * (2 + p.d));
  }
};

template <class T> Columns<T> columns_of(const PositionProblem& p, const void* data, const int64_t (&strides)[4]) {
  constexpr int64_t V = 16 / sizeof(T);
  const bool vectors = strides[3] == 1 && p.channels % V == 0 && strides[0] % V == 0 && strides[1] % V == 0 && strides[2] % V == 0 &&
                       reinterpret_cast<uintptr_t>(data) % 16 == 0;
  return {static_cast<const T*>(data), strides[0], strides[1], strides[2], strides[3], uint32_t(std::max<int64_t>(p.channels, 1)), vectors};
}

template <class A> void pack(Launcher& launch, const PositionProblem& p, Pieces<A>& pieces) {
  Geometry<A>& geo = pieces.geo;
  auto strided2 = [](const void* data, const int64_t (&s)[2]) { return Strided2<A>{static_cast<const A*>(data), {s[0], s[1]}}; };
  for (int64_t first = 0; p.period && first < p.d; first += 16) {
    Period period{};
    for (int64_t i = first; i < std::min(p.d, first + 16); ++i) period.length[i - first] = p.period[i];
    launch(pack_period<A>, 1, 16, 0, pieces.period, period, int(first), int(p.d));
  }
  launch(pack_weights<A>, geo.log_weights.entries * geo.log_weights.pad / POINTS, POINTS, 0, geo.log_weights, strided2(p.weights, p.weights_strides), p.m);
  launch(pack_radius<A>, geo.reach.entries * geo.reach.pad / POINTS, POINTS, 0, geo.reach, strided2(p.radius, p.radius_strides), p.n);
  auto points = [&](const Points<A>& to, const void* data, const int64_t (&s)[3], int weighted) {
    const int64_t tiles = to.entries * to.pad / POINTS;
    if (p.wide_positions) {
      launch(pack_points<A, double>, tiles, POINTS, 0, to, Strided3<double>{static_cast<const double*>(data), {s[0], s[1], s[2]}}, geo.log_weights, weighted);
    } else {
      launch(pack_points<A, A>, tiles, POINTS, 0, to, Strided3<A>{static_cast<const A*>(data), {s[0], s[1], s[2]}}, geo.log_weights, weighted);
    }
  };
  points(geo.query, p.query_pos, p.query_pos_strides, 0);
  points(geo.key, p.key_pos, p.key_pos_strides, 1);
}

template <class T, bool TF32, int CT, int THREADS, bool TRANSPOSED, class A>
void launch_sum(Launcher& launch, const Geometry<A>& geo, const Columns<T>& x, const SumOutput<T, A>& o) {
  using S = SumShape<Tile<T, TF32>, CT, THREADS>;
  constexpr size_t shared = (size_t(ROWS) * S::P_PITCH + size_t(S::BK) * S::X_PITCH) * sizeof(T);
  static_assert(shared <= 80 * 1024, "two blocks of an A100's multiprocessor");
  const int64_t column_blocks = std::max<int64_t>(1, (o.columns + CT - 1) / CT);
  const int64_t tiles = (TRANSPOSED ? geo.key.pad : geo.query.pad) / ROWS;
  launch(weighted_sum<T, TF32, CT, THREADS, TRANSPOSED>, geo.geometries * o.heads * tiles * column_blocks, THREADS, shared, geo, x, o);
}

// Wide blocks compute P once for more columns, narrow ones waste less where there are few.
template <class T, bool TF32, bool TRANSPOSED, class A>
void launch_sum(Launcher& launch, const Geometry<A>& geo, const Columns<T>& x, const SumOutput<T, A>& o) {
  using Tl = Tile<T, TF32>;
  if constexpr (Tl::is_double) {
    return launch_sum<T, TF32, 64, 256, TRANSPOSED>(launch, geo, x, o);
  } else {
    if (o.columns <= 64) return launch_sum<T, TF32, 64, 256, TRANSPOSED>(launch, geo, x, o);
    if constexpr (Tl::arithmetic == Arithmetic::tf32x3) {  // three products a score: computing P again for each 256 columns is little beside them
      return launch_sum<T, TF32, 256, 512, TRANSPOSED>(launch, geo, x, o);
    } else {
      if (o.columns <= 256) return launch_sum<T, TF32, 256, 256, TRANSPOSED>(launch, geo, x, o);
      return launch_sum<T, TF32, 512, 512, TRANSPOSED>(launch, geo, x, o);
    }
  }
}

}  // namespace cuda
}  // namespace continuum_ops
