// The term -rate |x_i - y_k|^2 of the scores and the radius, tile by tile, with their gradients.
//
// Distances come from differences: |x|^2 - 2 x.y + |y|^2 would cancel far from the origin. Along a periodic axis the difference is
// that of the nearest images.
#pragma once

#include "continuum_attention_tiles.h"

namespace continuum_ops::CO_ISA {
namespace {

// The positions of a block of queries.
template <class T> struct QueryPlaces {
  T* position;  // (dims, QB)
  T* reach;     // (QB): the largest squared distance that counts; null without a radius
};

template <class T> struct Axis {
  T length = 0, inverse = 0;  // 0: not periodic
};

template <class T> CO_INLINE Axis<T> axis_of(const DistanceTerm& g, int64_t c) {
  if (!g.period || g.period[c] == 0) return {};
  return {T(g.period[c]), T(1 / g.period[c])};
}

// y - x to the nearest image
template <class T> CO_INLINE Vec<T> image(Vec<T> y, Vec<T> x, Axis<T> axis) {
  const Vec<T> z = y - x, magic = broadcast(sizeof(T) == 4 ? T(12582912.0) : T(6755399441055744.0));  // rounds to an integer
  if (axis.length == T(0)) return z;
  const Vec<T> turns = fma(z, broadcast(axis.inverse), magic) - magic;
  return z - broadcast(axis.length) * turns;
}

template <class T> QueryPlaces<T> take_places(const DistanceTerm& g, Arena& arena) {
  constexpr int QB = Shape<T>::QB;
  if (!g.given) return {};
  return {arena.take<T>(g.dims * QB), g.radius.data ? arena.take<T>(QB) : nullptr};
}

template <class T> void load_places(const DistanceTerm& g, int64_t lead, int64_t i0, int64_t nq, const QueryPlaces<T>& to) {
  constexpr int QB = Shape<T>::QB;
  if (!g.given) return;
  transpose_rows<T, T, QB>(lead_base<T>(g.query_pos, lead) + i0 * g.query_pos.row_stride, g.query_pos, nq, g.dims, T(1), to.position);
  for (int64_t c = 0; c < g.dims; ++c) {  // unused lanes repeat the first: finite where that is
    fill<T>(to.position + c * QB + nq, QB - nq, to.position[c * QB]);
  }
  if (!to.reach) return;
  const T* radius = lead_base<T>(g.radius, lead) + i0 * g.radius.row_stride;
  constexpr T slack = 1 + 8 * (sizeof(T) == 4 ? T(0x1p-23) : T(0x1p-52));
  for (int64_t i = 0; i < nq; ++i) {
    const T r = radius[i * g.radius.row_stride];
    to.reach[i] = r * r * slack;
  }
  fill<T>(to.reach + nq, QB - nq, T(-1));
}

// d2[j * QB + i] = |x_i - y_j|^2, and what the radius leaves of the pairs that `kept` and `mask` describe.
template <class T>
Kept distance_tile(const DistanceTerm& g, const QueryPlaces<T>& x, const T* key_pos, ptrdiff_t ld, int64_t count, Kept kept,
                   typename LaneInt<T>::type* mask, T* d2) {
  constexpr int QB = Shape<T>::QB, L = lanes<T>;
  using Mask = MaskVec<T>;
  Mask any_kept{}, dropped{};
  fill<T>(d2, count * QB, T(0));
  for (int64_t c = 0; c < g.dims; ++c) {
    const Axis<T> axis = axis_of<T>(g, c);
    auto add_axis = [&](auto periodic) {
      const Axis<T> a = periodic ? axis : Axis<T>{};
      for (int64_t j = 0; j < count; ++j) {
        const Vec<T> y = broadcast(key_pos[j * ld + c]);
        CO_UNROLL
        for (int i = 0; i < QB; i += L) {
          const Vec<T> z = image<T>(y, load(x.position + c * QB + i), a);
          store(d2 + j * QB + i, fma(z, z, load(d2 + j * QB + i)));
        }
      }
    };
    axis.length == T(0) ? add_axis(False{}) : add_axis(True{});
  }
  if (!x.reach) return kept;
  for (int64_t j = 0; j < count; ++j) {
    CO_UNROLL
    for (int i = 0; i < QB; i += L) {
      const Mask far = load(d2 + j * QB + i) > load(x.reach + i);  // a NaN is not far: it comes out
      Mask* row = reinterpret_cast<Mask*>(mask + j * QB + i);
      const Mask keep = kept == Kept::all ? ~far : *row & ~far;
      *row = keep;
      any_kept |= keep;
      dropped |= ~keep;
    }
  }
  auto lanes_of = [](Mask m) {
    typename LaneInt<T>::type all = 0;
    for (int l = 0; l < L; ++l) all |= m[l];
    return all != 0;
  };
  return !lanes_of(any_kept) ? Kept::none : lanes_of(dropped) ? Kept::some : Kept::all;
}

// Adds what the scores' gradients ds mean for positions: d / dx_i = 2 rate sum_k ds_ik (y_k - x_i), d / dy_k the same with the
// other sign. to_query (dims, QB) is without the factor 2 rate; to_key is indexed by the key's place.
template <class T>
void position_gradients(const DistanceTerm& g, const T* ds, int64_t count, int64_t active, const QueryPlaces<T>& x, const T* key_pos,
                        ptrdiff_t ld, T rate, const KeySet& keys, int64_t first, T* to_query, T* to_key) {
  constexpr int QB = Shape<T>::QB, L = lanes<T>;
  for (int64_t c = 0; c < g.dims; ++c) {
    const Axis<T> axis = axis_of<T>(g, c);
    Vec<T> query_sum[QB / L] = {};
    for (int64_t j = 0; j < count; ++j) {
      const Vec<T> y = broadcast(key_pos[j * ld + c]);
      Vec<T> key_sum = Vec<T>{};
      CO_UNROLL
      for (int i = 0; i < QB / L; ++i) {
        if (i * L >= active) break;
        const Vec<T> z = image<T>(y, load(x.position + c * QB + i * L), axis), s = load(ds + j * QB + i * L);
        query_sum[i] = fma(s, z, query_sum[i]);
        key_sum = fma(s, z, key_sum);
      }
      to_key[key_place(keys, first + j) * g.dims + c] -= 2 * rate * sum_of_lanes<T>(key_sum);
    }
    for (int i = 0; i < QB / L; ++i) {
      if (i * L >= active) break;
      T* to = to_query + c * QB + i * L;
      store(to, load(to) + query_sum[i]);
    }
  }
}

// sum ds d2 over a tile
template <class T> double rate_gradient(const T* ds, const T* d2, int64_t count, int64_t active) {
  constexpr int QB = Shape<T>::QB, L = lanes<T>;
  Vec<T> sum = Vec<T>{};
  for (int64_t j = 0; j < count; ++j) {
    Vec<T> row = Vec<T>{};
    for (int64_t i = 0; i < active; i += L) row = fma(load(ds + j * QB + i), load(d2 + j * QB + i), row);
    sum += row;
  }
  double total = 0;
  for (int l = 0; l < L; ++l) total += double(sum[l]);
  return total;
}

}  // namespace
}  // namespace continuum_ops::CO_ISA
