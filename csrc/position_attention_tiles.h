// What forward and backward share: distances, the nearest keys, packing, and the products of tiles.
#pragma once

#include "position_attention.h"
#include "simd.h"

namespace continuum_ops::CO_ISA {
namespace {

constexpr int64_t LB = LANE_BLOCK, DT = DEPTH_TILE;
constexpr int V = 3;  // vectors of lanes that are worked on together: LB is a multiple of V * lanes
constexpr double LOG2E = 1.4426950408889634074;

template <class T> struct Tiles {
  static constexpr int L = lanes<T>;
  // R x C: rows of the lane side and vectors of columns whose sums stay in registers. G: the same for rows of the depth side x V.
#if defined(CO_ISA_avx512)
  static constexpr int R = 6, C = 4, G = 8;
#elif defined(CO_ISA_avx2)
  static constexpr int R = 6, C = 2, G = 4;
#else
  static constexpr int R = 6, C = 2, G = 4;
#endif
  static constexpr int64_t PANEL = C * L;  // columns of a panel
  static constexpr int64_t KEYS = V * L;   // keys of a panel of transposed values
  // A tile is left out if its share of every sum is below 2^-BITS.
  static constexpr double BITS = sizeof(T) == 4 ? 30 : 60;
  static constexpr double SLACK = sizeof(T) == 4 ? 1e-5 : 1e-13;  // distances of boxes may be this much too large, relative
  static_assert(LB % (V * L) == 0 && LB % R == 0 && DT % G == 0);
};

struct Arena {
  uintptr_t at;  // a number: an arena at 0 tells how much it would take
  template <class T> T* take(int64_t count) {
    const uintptr_t p = at;
    at += (size_t(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(p);
  }
};

CO_INLINE int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
CO_INLINE int64_t tiles_of(int64_t count) { return (count + DT - 1) / DT; }

template <class T> CO_INLINE void fill(T* p, int64_t n, T x) {
  for (int64_t i = 0; i < n; ++i) p[i] = x;
}

template <class T> int64_t padded_columns_of(const PositionProblem& a) { return round_up(a.columns(), lanes<T>); }
template <class T> int64_t panels_of(const PositionProblem& a) { return (padded_columns_of<T>(a) + Tiles<T>::PANEL - 1) / Tiles<T>::PANEL; }
template <class T> int64_t panel_width(const PositionProblem& a, int64_t panel) {
  return smaller<int64_t>(Tiles<T>::PANEL, padded_columns_of<T>(a) - panel * Tiles<T>::PANEL);
}

// ---- distances -------------------------------------------------------------------------------------------------------
template <class T> struct Axis {  // of a periodic domain
  T inverse, minus_length, minus_length_remainder;
};

template <class T> Axis<T> axis_of(const PositionProblem& a, int64_t axis) {
  const double length = a.period ? a.period[axis] : __builtin_inf();
  if (!(length < __builtin_inf())) return {T(0), T(0), T(0)};
  return {T(1 / length), T(-length), T(-(length - double(T(length))))};
}

template <class T> CO_INLINE Vec<T> nearest_integer(Vec<T> x) {
#if defined(CO_ISA_avx512)
  if constexpr (sizeof(T) == 4) return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  else return _mm512_roundscale_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(CO_ISA_avx2)
  if constexpr (sizeof(T) == 4) return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  else return _mm256_round_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Vec<T> magic = broadcast(T(sizeof(T) == 4 ? 0x1.8p23 : 0x1.8p52)), limit = broadcast(T(sizeof(T) == 4 ? 0x1p22 : 0x1p51));
  const Vec<T> rounded = (x + magic) - magic;
  return (x < limit) & (x > -limit) ? rounded : x;
#endif
}

// x - y along one axis, to the nearest image. Split: xl and yl are what rounding x and y to float left over.
template <class T, bool PERIODIC, bool SPLIT>
CO_INLINE Vec<T> difference(Vec<T> x, Vec<T> xl, Vec<T> y, Vec<T> yl, const Axis<T>& axis) {
  const Vec<T> s = x - y;
  if constexpr (!PERIODIC) return SPLIT ? s + (xl - yl) : s;
  const Vec<T> images = nearest_integer<T>(s * axis.inverse);
  const Vec<T> near = fma(images, broadcast(axis.minus_length), s);
  if constexpr (!SPLIT) return near;
  const Vec<T> z = s - x;
  const Vec<T> lost = (x - (s - z)) - (y + z);  // x - y = s + lost, exactly
  return near + fma(images, broadcast(axis.minus_length_remainder), lost + (xl - yl));
}

// The coordinates of points first.. of a set: axis after axis.
template <class T> struct Coordinates {
  const T *high, *low;
  int64_t stride;
};
template <class T> CO_INLINE Coordinates<T> coordinates(const PositionProblem& a, const PointSet& s, int64_t first) {
  const T* x = static_cast<const T*>(s.coordinate);
  return {x + first, a.split ? x + a.d * s.padded + first : x + first, s.padded};
}

// to[j * LB + i] = |x_i - y_j|^2 for `active` lanes i and `count` points j of a tile
template <class T, int D, bool PERIODIC, bool SPLIT>
void distance_tile(const PositionProblem& a, Coordinates<T> x, Coordinates<T> y, int64_t count, int64_t active, T* to) {
  constexpr int L = lanes<T>;
  if constexpr (D > 0) {
    Axis<T> axes[D];
    for (int t = 0; t < D; ++t) axes[t] = axis_of<T>(a, t);
    for (int64_t i = 0; i < active; i += V * L) {
      Vec<T> xh[D][V], xl[D][V];
      CO_UNROLL
      for (int t = 0; t < D; ++t) {
        CO_UNROLL
        for (int v = 0; v < V; ++v) {
          xh[t][v] = load_unaligned(x.high + t * x.stride + i + v * L);
          xl[t][v] = SPLIT ? load_unaligned(x.low + t * x.stride + i + v * L) : Vec<T>{};
        }
      }
      for (int64_t j = 0; j < count; ++j) {
        Vec<T> sum[V];
        CO_UNROLL
        for (int t = 0; t < D; ++t) {
          const Vec<T> yh = broadcast(y.high[t * y.stride + j]), yl = SPLIT ? broadcast(y.low[t * y.stride + j]) : Vec<T>{};
          CO_UNROLL
          for (int v = 0; v < V; ++v) {
            const Vec<T> z = difference<T, PERIODIC, SPLIT>(xh[t][v], xl[t][v], yh, yl, axes[t]);
            sum[v] = t == 0 ? z * z : fma(z, z, sum[v]);
          }
        }
        CO_UNROLL
        for (int v = 0; v < V; ++v) store(to + j * LB + i + v * L, sum[v]);
      }
    }
  } else {
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t i = 0; i < active; i += L) {
        Vec<T> sum{};
        for (int64_t t = 0; t < a.d; ++t) {
          const Vec<T> yh = broadcast(y.high[t * y.stride + j]), yl = SPLIT ? broadcast(y.low[t * y.stride + j]) : Vec<T>{};
          const Vec<T> xl = SPLIT ? load_unaligned(x.low + t * x.stride + i) : Vec<T>{};
          const Vec<T> z = difference<T, PERIODIC, SPLIT>(load_unaligned(x.high + t * x.stride + i), xl, yh, yl, axis_of<T>(a, t));
          sum = fma(z, z, sum);
        }
        store(to + j * LB + i, sum);
      }
    }
  }
}

template <class T> using DistanceTile = void (*)(const PositionProblem&, Coordinates<T>, Coordinates<T>, int64_t, int64_t, T*);

template <class T, bool PERIODIC, bool SPLIT> DistanceTile<T> distance_of(int64_t d) {
  switch (d) {
    case 1: return distance_tile<T, 1, PERIODIC, SPLIT>;
    case 2: return distance_tile<T, 2, PERIODIC, SPLIT>;
    case 3: return distance_tile<T, 3, PERIODIC, SPLIT>;
    default: return distance_tile<T, 0, PERIODIC, SPLIT>;
  }
}
template <class T> DistanceTile<T> distance_of(const PositionProblem& a) {
  if constexpr (sizeof(T) == 4) {
    if (a.split) return a.period ? distance_of<T, true, true>(a.d) : distance_of<T, false, true>(a.d);
  }
  return a.period ? distance_of<T, true, false>(a.d) : distance_of<T, false, false>(a.d);
}

// A bound from below of |x - y|^2 for x in one box and y in the other.
template <class T> double box_distance(const PositionProblem& a, const double* p, const double* q) {
  double sum = 0;
  for (int64_t t = 0; t < a.d; ++t) {
    double gap;
    if (a.period && a.period[t] < __builtin_inf()) {
      const double length = a.period[t], apart = ((p[t] + p[a.d + t]) - (q[t] + q[a.d + t])) / 2;
      const double nearest = __builtin_fabs(apart - length * __builtin_floor(apart / length + 0.5));
      gap = nearest - ((p[a.d + t] - p[t]) + (q[a.d + t] - q[t])) / 2 - Tiles<T>::SLACK * length;
    } else {
      const double left = p[t] - q[a.d + t], right = q[t] - p[a.d + t];
      gap = left > right ? left : right;
    }
    if (gap > 0) sum += gap * gap;
  }
  return sum * (1 - Tiles<T>::SLACK);
}

// ---- the nearest keys of a lane block of queries -----------------------------------------------------------------------
template <class T> struct Lanes {
  Coordinates<T> x;
  int64_t first, count, active;  // active: lanes that are computed, a multiple of V vectors and of R rows
};
template <class T> Lanes<T> lane_block(const PositionProblem& a, const PointSet& s, int64_t block) {
  const int64_t first = block * LB, count = smaller<int64_t>(LB, s.count - first);
  return {coordinates<T>(a, s, first), first, count, smaller<int64_t>(LB, round_up(round_up(count, Tiles<T>::R), V * Tiles<T>::L))};
}

// nearest[i]: distance^2 to the nearest key; apart[i]: to the nearest that is not at the place of the query. Tiles that cannot hold it
// are not looked at: box[tile] is their least distance^2. Infinite where there is none, or none within reach.
template <class T>
void nearest_keys(const PositionProblem& a, const PositionGroup& g, const Lanes<T>& q, const double* box, double reach,
                  DistanceTile<T> distance, T* d2, T* nearest, T* apart) {
  constexpr int L = lanes<T>;
  fill<T>(nearest, LB, T(__builtin_inf()));
  fill<T>(apart, LB, T(__builtin_inf()));
  const int64_t tiles = tiles_of(g.key.count);
  int64_t start = 0;
  for (int64_t t = 1; t < tiles; ++t) {
    if (box[t] < box[start]) start = t;
  }
  double bound = __builtin_inf();
  for (int64_t step = -1; step < tiles; ++step) {
    const int64_t t = step < 0 ? start : step;
    if (step == start || box[t] > bound || box[t] > reach) continue;
    const int64_t count = smaller<int64_t>(DT, g.key.count - t * DT);
    distance(a, q.x, coordinates<T>(a, g.key, t * DT), count, q.active, d2);
    for (int64_t i = 0; i < q.active; i += L) {
      Vec<T> least = load(nearest + i), other = load(apart + i);
      for (int64_t j = 0; j < count; ++j) {
        const Vec<T> x = load(d2 + j * LB + i);
        least = x < least ? x : least;  // a NaN is not less
        other = (x < other) & (x > Vec<T>{}) ? x : other;
      }
      store(nearest + i, least);
      store(apart + i, other);
    }
    bound = 0;
    for (int64_t i = 0; i < q.count; ++i) bound = apart[i] > bound ? double(apart[i]) : bound;
  }
}

// Weights may differ so much that the nearest key of a query is not what its sum consists of.
CO_INLINE bool uneven(const PositionGroup& g) { return g.min_bias < -60; }

// shift[i]: the largest exponent of query i of one head, relative to that of a key of largest weight at the nearest key's place
template <class T>
void largest_exponents(const PositionProblem& a, const PositionGroup& g, const Lanes<T>& q, const double* box, double reach, double rate,
                       const T* nearest, DistanceTile<T> distance, T* d2, T* shift) {
  constexpr int L = lanes<T>;
  const T* bias = static_cast<const T*>(g.bias);
  const T* limit = g.reach ? static_cast<const T*>(g.reach) + q.first : nullptr;
  const Vec<T> factor = broadcast(T(-rate * LOG2E)), low = broadcast(T(-0x1p120));
  fill<T>(shift, LB, T(-0x1p120));
  for (int64_t t = 0; t < tiles_of(g.key.count); ++t) {
    if (box[t] > reach) continue;
    const int64_t first = t * DT, count = smaller<int64_t>(DT, g.key.count - first);
    distance(a, q.x, coordinates<T>(a, g.key, first), count, q.active, d2);
    for (int64_t i = 0; i < q.active; i += L) {
      Vec<T> most = load(shift + i);
      const Vec<T> near = load(nearest + i), end = limit ? load_unaligned(limit + i) : broadcast(T(__builtin_inf()));
      for (int64_t j = 0; j < count; ++j) {
        const Vec<T> x = load(d2 + j * LB + i), e = fma(x - near, factor, broadcast(bias[first + j]));
        most = (e > most) & (x <= end) ? e : most;
      }
      store(shift + i, most);
    }
  }
  for (int64_t i = 0; i < q.active; i += L) {  // no key within reach
    const Vec<T> s = load(shift + i);
    store(shift + i, s > low ? s : Vec<T>{});
  }
}

// ---- packing ---------------------------------------------------------------------------------------------------------
// Row `row` of all entries of a group, one after the other; true if a number is not finite. Past the columns: zeros up to `padded`.
template <class T, class S>
bool gather_row(const PositionProblem& a, const BatchedOperand& o, int64_t first_entry, int64_t head, int64_t row, int64_t padded, T* to) {
  const S* base = static_cast<const S*>(o.data) + head * o.head + row * o.row;
  for (int64_t e = 0; e < a.entries; ++e) {
    const S* from = base + (first_entry + e) * o.batch;
    T* at = to + e * a.c;
    if (o.column == 1) {
      for (int64_t c = 0; c < a.c; ++c) at[c] = widen(from[c]);
    } else {
      for (int64_t c = 0; c < a.c; ++c) at[c] = widen(from[c * o.column]);
    }
  }
  for (int64_t c = a.columns(); c < padded; ++c) to[c] = T(0);
  using Word = typename LaneInt<T>::type;
  constexpr Word exponent = sizeof(T) == 4 ? Word(0x7f800000) : Word(0x7ff0000000000000ll);
  Word special = 0;
  for (int64_t c = 0; c < padded; ++c) {
    const Word word = bits<Word>(to[c]) & exponent;
    special |= word == exponent ? Word(-1) : Word(0);
  }
  return special != 0;
}

template <class T> CO_INLINE void row_to_panels(const PositionProblem& a, const T* row, int64_t rows, int64_t j, T* to) {
  const int64_t padded = padded_columns_of<T>(a);
  for (int64_t c = 0; c < padded; c += Tiles<T>::PANEL) {
    const int64_t width = smaller<int64_t>(Tiles<T>::PANEL, padded - c);
    for (int64_t x = 0; x < width; x += lanes<T>) store(to + c * rows + j * width + x, load(row + c + x));
  }
}

template <class T, class S>
bool pack_panels(const PositionProblem& a, const BatchedOperand& o, int64_t first_entry, int64_t head, const PointSet& s,
                 int64_t row_begin, int64_t row_end, void* to, void* scratch) {
  bool special = false;
  T* row = static_cast<T*>(scratch);
  for (int64_t j = row_begin; j < row_end; ++j) {
    special |= gather_row<T, S>(a, o, first_entry, head, s.place[j], padded_columns_of<T>(a), row);
    row_to_panels<T>(a, row, s.count, j, static_cast<T*>(to));
  }
  return special;
}

// to[(i / KEYS) * columns * KEYS + c * KEYS + i % KEYS] = value of key i of the block
template <class T, class S>
bool pack_transposed(const PositionProblem& a, const PositionGroup& g, int64_t value_head, int64_t block, void* to, void* scratch) {
  constexpr int64_t KEYS = Tiles<T>::KEYS;
  const int64_t columns = a.columns(), first = block * LB;
  bool special = false;
  T* row = static_cast<T*>(scratch);
  for (int64_t i = 0; i < LB; ++i) {
    if (first + i < g.key.count) {
      special |= gather_row<T, S>(a, a.value, g.first_entry, value_head, g.key.place[first + i], padded_columns_of<T>(a), row);
    } else {
      fill<T>(row, columns, T(0));
    }
    T* at = static_cast<T*>(to) + i / KEYS * columns * KEYS + i % KEYS;
    for (int64_t c = 0; c < columns; ++c) at[c * KEYS] = row[c];
  }
  return special;
}

template <class T, class S>
bool pack_gradient(const PositionProblem& a, const BatchedOperand& grad_out, const void* out, const PositionGroup& g, int64_t head,
                   int64_t row_begin, int64_t row_end, void* to, void* delta, void* scratch) {
  const int64_t padded = padded_columns_of<T>(a);
  const BatchedOperand result{out, a.heads * a.n * a.c, a.n * a.c, a.c, 1};
  const T* inverse_sum = static_cast<const T*>(g.inverse_sum) + head * g.query.padded;
  bool special = false;
  T *row = static_cast<T*>(scratch), *y = row + padded;
  for (int64_t j = row_begin; j < row_end; ++j) {
    T* at = static_cast<T*>(delta) + head * g.query.padded + j;
    if (inverse_sum[j] == T(0)) {  // nothing to attend to: no gradient, whatever comes in
      fill<T>(row, padded, T(0));
      *at = T(0);
    } else {
      special |= gather_row<T, S>(a, grad_out, g.first_entry, head, g.query.place[j], padded, row);
      gather_row<T, S>(a, result, g.first_entry, head, g.query.place[j], padded, y);
      Vec<T> sum{};
      for (int64_t c = 0; c < padded; c += lanes<T>) sum = fma(load(row + c), load(y + c), sum);
      T dot = 0;
      for (int l = 0; l < lanes<T>; ++l) dot += sum[l];
      *at += dot;
    }
    row_to_panels<T>(a, row, g.query.count, j, static_cast<T*>(to));
  }
  return special;
}

// ---- products --------------------------------------------------------------------------------------------------------
// to[i, c] += sum_j p[j, i] x[j, c]: `active` lanes i, C vectors of columns
template <class T, int C> void mix_panel(const T* p, const T* x, int64_t depth, int64_t active, T* to) {
  constexpr int R = Tiles<T>::R, L = lanes<T>;
  for (int64_t i = 0; i < active; i += R) {
    Vec<T> acc[R][C] = {};
    multiply_columns<T, R, C>(acc, p + i, LB, x, C * L, depth);
    CO_UNROLL
    for (int r = 0; r < R; ++r) {
      CO_UNROLL
      for (int c = 0; c < C; ++c) {
        T* t = to + (i + r) * C * L + c * L;
        store(t, load(t) + acc[r][c]);
      }
    }
  }
}

// The same for panels begin..end of a matrix with `rows` rows, from row `first`; to: LB rows per panel.
template <class T>
void mix(const PositionProblem& a, const T* p, const T* x, int64_t rows, int64_t first, int64_t depth, int64_t lanes_used, int64_t begin,
         int64_t end, T* to) {
  constexpr int64_t PANEL = Tiles<T>::PANEL;
  const int64_t active = round_up(lanes_used, Tiles<T>::R);
  for (int64_t panel = begin; panel < end; ++panel) {
    const int64_t width = panel_width<T>(a, panel);
    const T* from = x + panel * PANEL * rows + first * width;
    T* at = to + (panel - begin) * PANEL * LB;
    switch (width / lanes<T>) {
      case 1: mix_panel<T, 1>(p, from, depth, active, at); break;
      case 2: mix_panel<T, 2>(p, from, depth, active, at); break;
      case 3: mix_panel<T, smaller(3, Tiles<T>::C)>(p, from, depth, active, at); break;
      default: mix_panel<T, Tiles<T>::C>(p, from, depth, active, at);
    }
  }
}

}  // namespace
}  // namespace continuum_ops::CO_ISA
