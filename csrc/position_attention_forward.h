// The forward pass over a lane block of queries and a range of column panels.
#pragma once

#include "position_attention_tiles.h"

namespace continuum_ops::CO_ISA {
namespace {

constexpr int64_t SUMS_KEPT = 1 << 17;  // numbers that all heads worked on together may collect: they stay in the cache

CO_INLINE int64_t heads_together(const PositionProblem& a, int64_t columns) {
  const int64_t fit = SUMS_KEPT / (LB * (columns > 0 ? columns : 1));
  return fit < 1 ? 1 : smaller(fit, a.heads);
}

// p[j, i] = w_j / max w 2^(-rate (d2 - nearest) log2(e) - shift), added up over the tile in sum[i]
template <class T, bool REACH, bool WEIGHTED>
void probabilities(const T* d2, int64_t count, int64_t active, T factor, const T* nearest, const T* shift, const T* reach, const T* bias,
                   T* p, T* sum) {
  constexpr int L = lanes<T>;
  const Vec<T> f = broadcast(factor);
  for (int64_t i = 0; i < active; i += V * L) {
    Vec<T> near[V], less[V], end[V], total[V];
    CO_UNROLL
    for (int v = 0; v < V; ++v) {
      near[v] = load(nearest + i + v * L);
      less[v] = WEIGHTED ? load(shift + i + v * L) : Vec<T>{};
      end[v] = REACH ? load_unaligned(reach + i + v * L) : Vec<T>{};
      total[v] = Vec<T>{};
    }
    for (int64_t j = 0; j < count; ++j) {
      CO_UNROLL
      for (int v = 0; v < V; ++v) {
        const Vec<T> x = load(d2 + j * LB + i + v * L), apart = x - near[v];
        Vec<T> e = exp2<true>(WEIGHTED ? fma(apart, f, broadcast(bias[j])) - less[v] : apart * f);
        if constexpr (REACH) e = x > end[v] ? Vec<T>{} : e;
        store(p + j * LB + i + v * L, e);
        total[v] += e;
      }
    }
    CO_UNROLL
    for (int v = 0; v < V; ++v) store(sum + i + v * L, load(sum + i + v * L) + total[v]);
  }
}

template <class T> struct ForwardScratch {
  uintptr_t end;
  double* box;
  T *d2, *p, *nearest, *apart, *shift, *sum, *row, *out;
  ForwardScratch(void* scratch, const PositionProblem& a, const PositionGroup& g, int64_t columns, int64_t heads) {
    Arena arena{reinterpret_cast<uintptr_t>(scratch)};
    box = arena.take<double>(tiles_of(g.key.count));
    d2 = arena.take<T>(DT * LB), p = arena.take<T>(DT * LB);
    nearest = arena.take<T>(LB), apart = arena.take<T>(LB);
    shift = arena.take<T>(a.heads * LB), sum = arena.take<T>(a.heads * LB);
    row = arena.take<T>(columns), out = arena.take<T>(heads * columns * LB);
    end = arena.at;
  }
  static size_t bytes(const PositionProblem& a, const PositionGroup& g, int64_t columns, int64_t heads) {
    return ForwardScratch(nullptr, a, g, columns, heads).end;
  }
};

template <class T> size_t forward_scratch_of(const PositionProblem& a, const PositionGroup& g, int64_t panels) {
  const int64_t columns = smaller(panels * Tiles<T>::PANEL, padded_columns_of<T>(a));
  return ForwardScratch<T>::bytes(a, g, columns, heads_together(a, columns));
}

// Fills box and nearest of the scratch; returns the largest distance^2 that counts for any query of the block.
template <class T>
double look_around(const PositionProblem& a, const PositionGroup& g, const Lanes<T>& q, int64_t block, DistanceTile<T> distance,
                   double* box, T* d2, T* nearest, T* apart) {
  for (int64_t t = 0; t < tiles_of(g.key.count); ++t) {
    box[t] = box_distance<T>(a, g.query.block_box + block * 2 * a.d, g.key.tile_box + t * 2 * a.d);
  }
  const double reach = g.reach ? g.block_reach[block] : double(__builtin_inf());
  nearest_keys<T>(a, g, q, box, reach, distance, d2, nearest, apart);
  return reach;
}

template <class T, class S>
void forward(const PositionProblem& a, const PositionGroup& g, const PositionOutput& o, int64_t group, int64_t block, int64_t panel_begin,
             int64_t panel_end, void* scratch) {
  const int64_t padded = padded_columns_of<T>(a), first_column = panel_begin * Tiles<T>::PANEL;
  const int64_t columns = smaller(panel_end * Tiles<T>::PANEL, padded) - first_column, together = heads_together(a, columns);
  const ForwardScratch<T> s(scratch, a, g, columns, together);
  const Lanes<T> q = lane_block<T>(a, g.query, block);
  const DistanceTile<T> distance = distance_of<T>(a);
  const double reach = look_around<T>(a, g, q, block, distance, s.box, s.d2, s.nearest, s.apart);
  const T* limit = g.reach ? static_cast<const T*>(g.reach) + q.first : nullptr;
  const T* bias = static_cast<const T*>(g.bias);
  const int64_t tiles = tiles_of(g.key.count);

  double far = 0;  // the largest distance^2 of a query to its nearest key
  for (int64_t i = 0; i < q.count; ++i) {
    if (limit && s.nearest[i] > limit[i]) continue;
    far = s.nearest[i] <= far ? far : double(s.nearest[i]);
  }
  const double margin = Tiles<T>::BITS + __builtin_log2(double(g.key.count) + 1) - g.min_bias;

  fill<T>(s.shift, a.heads * LB, T(0));
  fill<T>(s.sum, a.heads * LB, T(0));
  if (uneven(g)) {
    for (int64_t h = 0; h < a.heads; ++h) {
      largest_exponents<T>(a, g, q, s.box, reach, a.rate[h], s.nearest, distance, s.d2, s.shift + h * LB);
    }
  }
  for (int64_t head = 0; head < a.heads; head += together) {
    const int64_t end = smaller(head + together, a.heads);
    fill<T>(s.out, (end - head) * columns * LB, T(0));
    for (int64_t t = 0; t < tiles; ++t) {
      if (s.box[t] > reach) continue;
      const int64_t first = t * DT, count = smaller<int64_t>(DT, g.key.count - first);
      bool measured = false;
      for (int64_t h = head; h < end; ++h) {
        if (g.skip && g.skip[h]) continue;
        if (a.rate[h] * LOG2E * (s.box[t] - far) > margin && !g.special_value[t]) continue;  // negligible
        if (!measured) distance(a, q.x, coordinates<T>(a, g.key, first), count, q.active, s.d2);
        measured = true;
        const auto run = limit ? (bias ? probabilities<T, true, true> : probabilities<T, true, false>)
                               : (bias ? probabilities<T, false, true> : probabilities<T, false, false>);
        run(s.d2, count, q.active, T(-a.rate[h] * LOG2E), s.nearest, s.shift + h * LB, limit, bias ? bias + first : nullptr, s.p,
            s.sum + h * LB);
        const T* value = static_cast<const T*>(g.value) + (a.value_heads > 1 ? h * g.key.count * padded : 0);
        mix<T>(a, s.p, value, g.key.count, first, count, q.count, panel_begin, panel_end, s.out + (h - head) * columns * LB);
      }
    }
    for (int64_t h = head; h < end; ++h) {
      if (g.skip && g.skip[h]) continue;
      for (int64_t i = 0; i < q.count; ++i) {
        const int64_t place = g.query.place[q.first + i], row = (group * a.heads + h) * a.n + place;
        const T sum = s.sum[h * LB + i];
        const bool empty = sum == T(0);
        if (panel_begin == 0 && o.stats) {
          static_cast<T*>(o.stats)[2 * row] = empty ? T(0) : s.nearest[i];
          static_cast<T*>(o.stats)[2 * row + 1] = sum;
        }
        if (panel_begin == 0 && o.lse) {
          const double log2_sum = double(s.shift[h * LB + i]) + g.log2_max_weight + __builtin_log2(double(sum));
          static_cast<T*>(o.lse)[row] =
              empty ? T(-__builtin_inf()) : T(log2_sum * 0.69314718055994530942 - a.rate[h] * double(s.nearest[i]));
        }
        for (int64_t c = 0; c < columns; c += Tiles<T>::PANEL) {
          const int64_t width = smaller(Tiles<T>::PANEL, columns - c);
          const T* from = s.out + (h - head) * columns * LB + c * LB + i * width;
          for (int64_t x = 0; x < width; ++x) s.row[c + x] = empty ? T(0) : from[x] / sum;
        }
        const int64_t live = smaller(columns, a.columns() - first_column);
        for (int64_t x = 0; x < live;) {
          const int64_t e = (first_column + x) / a.c, c = (first_column + x) % a.c, run = smaller(a.c - c, live - x);
          S* to = static_cast<S*>(o.out) + (((g.first_entry + e) * a.heads + h) * a.n + place) * a.c + c;
          for (int64_t k = 0; k < run; ++k) narrow(s.row[x + k], to + k);
          x += run;
        }
      }
    }
  }
}

template <class T>
void near_keys_of(const PositionProblem& a, const PositionGroup& g, int64_t block, void* nearest, void* apart, void* shift,
                  void* scratch) {
  const ForwardScratch<T> s(scratch, a, g, 0, 1);
  const Lanes<T> q = lane_block<T>(a, g.query, block);
  const DistanceTile<T> distance = distance_of<T>(a);
  const double reach = look_around<T>(a, g, q, block, distance, s.box, s.d2, s.nearest, static_cast<T*>(apart));
  for (int64_t i = 0; nearest && i < LB; ++i) static_cast<T*>(nearest)[i] = s.nearest[i];
  if (!uneven(g)) return;
  for (int64_t h = 0; h < a.heads; ++h) {
    T* to = static_cast<T*>(shift) + h * g.query.padded + q.first;
    largest_exponents<T>(a, g, q, s.box, reach, a.rate[h], s.nearest, distance, s.d2, to);
  }
}

}  // namespace
}  // namespace continuum_ops::CO_ISA
