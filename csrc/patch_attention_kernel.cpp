// Patch attention on one core for one instruction set: compiled once per CO_ISA_*.
//
// Both products pack a few points of all patches from the grid into scratch that the caches hold, widened to the accumulation type and
// weighted on the way, and multiply from there, R rows x 2 vectors of sums in registers. Sums over the points of a patch are cut into
// DEPTH terms, sums over patches into MIX_DEPTH: always in the same order, and with less rounding than one long sum.
#include "patch_attention.h"
#include "simd.h"

namespace continuum_ops::CO_ISA {
namespace {

constexpr int64_t DEPTH = 128;       // points x channels that are packed together
constexpr int64_t SPACING = DEPTH + 16;  // of packed rows: no multiple of a page's fraction
constexpr int64_t COLUMN_BLOCK = 192;
constexpr int64_t MIX_DEPTH = 256;
constexpr int64_t MIX_SPACING = MIX_DEPTH + 16;
constexpr int64_t AHEAD = 10;  // patches whose points are fetched in advance: a patch is a short run in each of many pages
constexpr double LOG2E = 1.4426950408889634074;

template <class T> struct Tiles {
#if defined(CO_ISA_avx512)
  static constexpr int R = 12;
#else
  static constexpr int R = 6;
#endif
  static constexpr int64_t L = lanes<T>, PANEL = 2 * L;
};

CO_INLINE int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

template <class T> int64_t panel_columns() { return round_up(DEPTH, Tiles<T>::PANEL); }

template <class T> struct Arena {
  char* at;
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(at);
    at += round_up(count * int64_t(sizeof(T)), 64);
    return p;
  }
};

template <class T> size_t scores_scratch_of() {
  constexpr int64_t P = Tiles<T>::PANEL;
  return size_t((ROW_BLOCK + P) * SPACING + round_up(COLUMN_BLOCK, P) * DEPTH) * sizeof(T) + 256;
}
template <class T> size_t mix_scratch_of() {
  return size_t((MIX_DEPTH + ROW_BLOCK + 2) * panel_columns<T>() + ROW_BLOCK * (DEPTH + MIX_SPACING)) * sizeof(T) + 448;
}

// A few points and channels of a patch.
struct Piece {
  int64_t x_begin, x_end, c_begin, c_end;
  int64_t channels() const { return c_end - c_begin; }
  int64_t size() const { return (x_end - x_begin) * channels(); }
};

int64_t chunk_points(int64_t channels) { return channels >= DEPTH || channels == 0 ? 1 : DEPTH / channels; }

template <class T> CO_INLINE const T* weights_of(const PatchOperand& w, int64_t b, int64_t p) {
  return w.data ? static_cast<const T*>(w.data) + b * w.batch + w.patch[p] : nullptr;
}

// Asks for the first lines of a point's channels.
template <bool WRITE, class S> CO_INLINE void prefetch_point(const S* point, int64_t channels) {
  const char *at = reinterpret_cast<const char*>(point), *end = reinterpret_cast<const char*>(point + channels);
  for (; at < end; at += 64) __builtin_prefetch(at, WRITE ? 1 : 0, 3);
}

// Asks for what the next call reads, a few points at a time while this one multiplies: all at once would wait for memory.
template <class S> class Ahead {
 public:
  Ahead() = default;
  // The points of patches [p, p_end).
  Ahead(const PatchOperand& o, int64_t b, int64_t h, int64_t p, int64_t p_end, int64_t x_begin, int64_t x_end)
      : patch_(o.patch), point_(o.point), from_(static_cast<const S*>(o.data) + b * o.batch + h * o.head), p_(p),
        p_end_(o.channel == 1 && x_begin < x_end ? p_end : p), x_(x_begin), x_begin_(x_begin), x_end_(x_end), channels_(smaller(o.channels, DEPTH)) {}
  int64_t left() const { return (p_end_ - p_) * (x_end_ - x_begin_); }
  __attribute__((always_inline)) int64_t ask(int64_t count) {
    for (; count > 0 && p_ < p_end_; --count) {
      const char *at = reinterpret_cast<const char*>(from_ + patch_[p_] + point_[x_]), *end = at + channels_ * int64_t(sizeof(S));
      for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);  // the first cache would not hold them
      if (++x_ == x_end_) x_ = x_begin_, ++p_;
    }
    return count;
  }

 private:
  const int64_t *patch_ = nullptr, *point_ = nullptr;
  const S* from_ = nullptr;
  int64_t p_ = 0, p_end_ = 0, x_ = 0, x_begin_ = 0, x_end_ = 0, channels_ = 0;
};

// Row p of a piece, widened, to[0 .. size): times weights (0 where the weight is, whatever stands there), and 0 at points that are not
// finite if they are to be hidden; returns whether there was one.
template <class T, class S>
CO_INLINE bool load_row(const PatchOperand& o, int64_t b, int64_t h, int64_t p, int64_t last, const Piece& at, const T* weights, const int64_t* weight_point,
                        bool hide, T* to) {
  const S* from = static_cast<const S*>(o.data) + b * o.batch + h * o.head + o.patch[p];
  const int64_t channels = at.channels(), ahead = o.patch[smaller(p + AHEAD, last)] - o.patch[p];
  bool hidden = false;
  for (int64_t x = at.x_begin; x < at.x_end; ++x, to += channels) {
    const S* point = from + o.point[x] + at.c_begin * o.channel;
    if (o.channel == 1) prefetch_point<false>(point + ahead, channels);
    T w = 1;
    if (weights) {
      w = weights[weight_point[x]];
      if (w == T(0)) {
        for (int64_t c = 0; c < channels; ++c) to[c] = 0;
        continue;
      }
    }
    if (o.channel == 1 && sizeof(S) == sizeof(T) && channels % lanes<T> == 0) {
      const T* same = reinterpret_cast<const T*>(point);
      const Vec<T> factor = broadcast(w);
      for (int64_t c = 0; c < channels; c += lanes<T>) store_unaligned(to + c, load_unaligned(same + c) * factor);
    } else if (o.channel == 1) {
      for (int64_t c = 0; c < channels; ++c) to[c] = T(widen(point[c])) * w;
    } else {
      for (int64_t c = 0; c < channels; ++c) to[c] = T(widen(point[c * o.channel])) * w;
    }
    if (hide) {
      T zero = 0;
      for (int64_t c = 0; c < channels; ++c) zero += to[c] * T(0);
      if (zero != T(0)) {
        hidden = true;
        for (int64_t c = 0; c < channels; ++c) to[c] = 0;
      }
    }
  }
  return hidden;
}

template <class T, int R, int C>
CO_INLINE void score_tile(const T* rows, const T* panel, int64_t depth, bool add, T* c, int64_t ldc) {
  constexpr int64_t L = lanes<T>;
  Vec<T> acc[R][C];
  CO_UNROLL
  for (int r = 0; r < R; ++r) {
    CO_UNROLL
    for (int i = 0; i < C; ++i) acc[r][i] = Vec<T>{};
  }
  multiply_spaced_rows<T, R, C, int(SPACING)>(acc, rows, panel, Tiles<T>::PANEL, depth);
  CO_UNROLL
  for (int r = 0; r < R; ++r) {
    CO_UNROLL
    for (int i = 0; i < C; ++i) {
      T* at = c + r * ldc + i * L;
      store(at, add ? load(at) + acc[r][i] : acc[r][i]);
    }
  }
}

template <class T, int C, class F>
CO_INLINE void score_panel(const T* rows, int64_t count, const T* panel, int64_t depth, bool add, T* c, int64_t ldc, F between) {
  constexpr int R = Tiles<T>::R;
  int64_t r = 0;
  for (; r + R <= count; r += R) {
    score_tile<T, R, C>(rows + r * SPACING, panel, depth, add, c + r * ldc, ldc);
    between();
  }
  for (; r + 4 <= count; r += 4) score_tile<T, 4, C>(rows + r * SPACING, panel, depth, add, c + r * ldc, ldc);
  for (; r < count; ++r) score_tile<T, 1, C>(rows + r * SPACING, panel, depth, add, c + r * ldc, ldc);
}

// What is not finite in the columns makes the scores of the rows that see it NaN.
template <class T, class S>
void mark_hidden(const PatchScores& a, int64_t b, int64_t h, int64_t row_begin, int64_t row_end, int64_t j, const Piece& at, T* c) {
  const S* column = static_cast<const S*>(a.column.data) + b * a.column.batch + h * a.column.head + a.column.patch[j];
  for (int64_t x = at.x_begin; x < at.x_end; ++x) {
    T zero = 0;
    for (int64_t i = at.c_begin; i < at.c_end; ++i) zero += T(widen(column[a.column.point[x] + i * a.column.channel])) * T(0);
    if (zero == T(0)) continue;
    for (int64_t p = row_begin; p < row_end; ++p) {
      const T* w = weights_of<T>(a.weights, b, p);
      if (!w || w[a.weights.point[x]] != T(0)) c[(p - row_begin) * a.padded + j] += zero;
    }
  }
}

template <class T, class S>
void scores(const PatchScores& a, int64_t b, int64_t h, int64_t row_begin, int64_t row_end, int64_t point_begin, int64_t point_end,
            bool add, T* c, const PatchNext& next, void* scratch) {
  constexpr int64_t P = Tiles<T>::PANEL, L = lanes<T>;
  Arena<T> arena{static_cast<char*>(scratch)};
  T* rows = arena.take(ROW_BLOCK * SPACING);
  T* strip = arena.take(P * SPACING);
  T* panels = arena.take(round_up(COLUMN_BLOCK, P) * DEPTH);
  const int64_t channels = a.row.channels, step = chunk_points(channels), count = row_end - row_begin;
  if (channels == 0 || point_begin == point_end) {
    for (int64_t i = 0; !add && i < count * a.padded; ++i) c[i] = 0;
    return;
  }
  Ahead<S> next_rows(a.row, b, next.head, row_begin, row_end, next.point_begin, next.point_end);
  Ahead<S> next_columns(a.column, b, next.head, 0, a.keys, next.point_begin, next.point_end);
  const int64_t tiles = larger<int64_t>(count / Tiles<T>::R, 1) * ((a.keys + P - 1) / P) * ((channels + DEPTH - 1) / DEPTH);
  const int64_t share = (next_rows.left() + next_columns.left() + tiles - 1) / larger<int64_t>(tiles, 1);
  auto between = [&] { next_columns.ask(next_rows.ask(share)); };
  for (int64_t x = point_begin; x < point_end; x += step) {
    for (int64_t channel = 0; channel < channels; channel += DEPTH) {
      const Piece at{x, smaller(x + step, point_end), channel, smaller(channel + DEPTH, channels)};
      const int64_t depth = at.size();
      for (int64_t p = row_begin; p < row_end; ++p) {
        load_row<T, S>(a.row, b, h, p, row_end - 1, at, weights_of<T>(a.weights, b, p), a.weights.point, false, rows + (p - row_begin) * SPACING);
      }
      for (int64_t block = 0; block < a.keys; block += COLUMN_BLOCK) {
        const int64_t end = smaller(block + COLUMN_BLOCK, a.keys);
        bool hidden = false;
        for (int64_t j = block; j < end; j += P) {
          T* panel = panels + (j - block) * DEPTH;
          for (int64_t l = 0; l < P; ++l) {
            T* row = strip + l * SPACING;
            if (j + l >= end) {
              for (int64_t i = 0; i < depth; ++i) row[i] = 0;
            } else {
              hidden |= load_row<T, S>(a.column, b, h, j + l, a.keys - 1, at, nullptr, nullptr, a.hide, row);
            }
          }
          transpose<P>(strip, SPACING, depth, panel);
        }
        for (int64_t j = block; j < end; j += P) {
          const T* panel = panels + (j - block) * DEPTH;
          if (end - j > L) score_panel<T, 2>(rows, count, panel, depth, add, c + j, a.padded, between);
          else score_panel<T, 1>(rows, count, panel, depth, add, c + j, a.padded, between);
        }
        for (int64_t j = block; hidden && j < end; ++j) mark_hidden<T, S>(a, b, h, row_begin, row_end, j, at, c);
      }
      add = true;
    }
  }
}

// ---- softmax of rows ---------------------------------------------------------------------------------------------------
// The sums of all parts in order, times scale, in vectors; what stands past the keys becomes `rest`.
template <class T> CO_INLINE void add_parts(const PatchRows& a, int64_t row, T scale, T rest, T* to) {
  constexpr int64_t L = lanes<T>;
  const T* from = static_cast<const T*>(a.parts) + row * a.padded;
  for (int64_t j = 0; j < a.padded; j += L) {
    Vec<T> sum = load(from + j);
    for (int64_t part = 1; part < a.count; ++part) sum += load(from + part * a.part_stride + j);
    store(to + j, sum * broadcast(scale));
  }
  for (int64_t j = a.keys; j < a.padded; ++j) to[j] = rest;
}

constexpr int64_t SUM_BLOCK = 64;  // vectors of a partial sum

template <class T> void softmax(const PatchRows& a, int64_t row_begin, int64_t row_end) {
  constexpr int64_t L = lanes<T>;
  for (int64_t row = row_begin; row < row_end; ++row) {
    T *p = static_cast<T*>(a.p) + row * a.keys, *lse = static_cast<T*>(a.lse);
    T* s = static_cast<T*>(const_cast<void*>(a.parts)) + row * a.padded;  // the first part makes room for the terms
    if (a.keys == 0) {
      if (lse) lse[row] = -__builtin_inf();
      continue;
    }
    add_parts<T>(a, row, T(a.scale), T(-__builtin_inf()), s);
    Vec<T> top = broadcast(T(-__builtin_inf()));
    for (int64_t j = 0; j < a.padded; j += L) top = max(top, load(s + j));
    T largest = top[0];
    for (int64_t l = 1; l < L; ++l) largest = top[l] > largest ? top[l] : largest;
    Vec<T> total{};
    for (int64_t begin = 0; begin < a.padded; begin += SUM_BLOCK * L) {
      Vec<T> sum{};
      for (int64_t j = begin; j < smaller(begin + SUM_BLOCK * L, a.padded); j += L) {
        const Vec<T> e = exp2<true>((load(s + j) - broadcast(largest)) * broadcast(T(LOG2E)));
        store(s + j, e);
        sum += e;
      }
      total += sum;
    }
    const T sum = sum_of_lanes<T>(total);
    if (lse) lse[row] = T(double(largest) + __builtin_log(double(sum)));
    for (int64_t j = 0; j < a.keys; ++j) p[j] = s[j] / sum;
  }
}

// gradient of the scores: p (g - sum p g + grad_lse), times scale
template <class T> void softmax_backward(const PatchRows& a, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* p = static_cast<const T*>(a.p) + row * a.keys;
    T* g = static_cast<T*>(const_cast<void*>(a.parts)) + row * a.padded;
    add_parts<T>(a, row, T(1), T(0), g);
    double sum = 0;
    for (int64_t j = 0; j < a.keys; ++j) sum += double(p[j]) * double(g[j]);
    const T shift = T((a.grad_lse ? double(static_cast<const T*>(a.grad_lse)[row]) : 0.0) - sum);
    T *grad = static_cast<T*>(a.grad) + row * a.keys, *gt = static_cast<T*>(a.grad_transposed) + row;
    T* pt = static_cast<T*>(a.p_transposed) + row;
    for (int64_t j = 0; j < a.keys; ++j) {
      const T value = T(a.scale) * (p[j] * (g[j] + shift));
      grad[j] = value;
      gt[j * a.transposed_stride] = value;
      pt[j * a.transposed_stride] = p[j];
    }
  }
}

// ---- mixing ------------------------------------------------------------------------------------------------------------
template <class T, int R, int C>
CO_INLINE void mix_tile(const T* rows, const T* panel, int64_t depth, bool add, T* to, int64_t ldt) {
  constexpr int64_t L = lanes<T>;
  Vec<T> acc[R][C];
  CO_UNROLL
  for (int r = 0; r < R; ++r) {
    CO_UNROLL
    for (int i = 0; i < C; ++i) acc[r][i] = Vec<T>{};
  }
  multiply_spaced_rows<T, R, C, int(MIX_SPACING)>(acc, rows, panel, Tiles<T>::PANEL, depth);
  CO_UNROLL
  for (int r = 0; r < R; ++r) {
    CO_UNROLL
    for (int i = 0; i < C; ++i) {
      T* at = to + r * ldt + i * L;
      store(at, add ? load(at) + acc[r][i] : acc[r][i]);
    }
  }
}

template <class T, int C, class F>
CO_INLINE void mix_panel(const T* rows, int64_t count, const T* panel, int64_t depth, bool add, T* to, int64_t ldt, F between) {
  constexpr int R = Tiles<T>::R;
  constexpr int64_t S = MIX_SPACING;
  int64_t r = 0;
  for (; r + R <= count; r += R) {
    mix_tile<T, R, C>(rows + r * S, panel, depth, add, to + r * ldt, ldt);
    between();
  }
  for (; r + 4 <= count; r += 4) mix_tile<T, 4, C>(rows + r * S, panel, depth, add, to + r * ldt, ldt);
  for (; r < count; ++r) mix_tile<T, 1, C>(rows + r * S, panel, depth, add, to + r * ldt, ldt);
}

template <class T, class D>
CO_INLINE void store_row(const PatchMix& a, int64_t b, int64_t h, int64_t p, int64_t last, const Piece& at, const T* from) {
  D* to = static_cast<D*>(a.to.data) + b * a.to.batch + h * a.to.head + a.to.patch[p];
  const T* weights = weights_of<T>(a.to_weights, b, p);
  const int64_t channels = at.channels(), ahead = a.to.patch[smaller(p + AHEAD, last)] - a.to.patch[p];
  for (int64_t x = at.x_begin; x < at.x_end; ++x, from += channels) {
    D* point = to + a.to.point[x] + at.c_begin;  // contiguous channels
    prefetch_point<true>(point + ahead, channels);
    const T w = weights ? weights[a.to_weights.point[x]] : T(1);
    if (w == T(0)) {
      for (int64_t c = 0; c < channels && !a.add; ++c) narrow(T(0), point + c);
    } else if (a.add) {
      for (int64_t c = 0; c < channels; ++c) narrow(T(widen(point[c])) + from[c] * w, point + c);
    } else if (sizeof(D) == sizeof(T) && channels % lanes<T> == 0) {
      T* same = reinterpret_cast<T*>(point);
      const Vec<T> factor = broadcast(w);
      for (int64_t c = 0; c < channels; c += lanes<T>) store_unaligned(same + c, load_unaligned(from + c) * factor);
    } else {
      for (int64_t c = 0; c < channels; ++c) narrow(from[c] * w, point + c);
    }
  }
}

template <class T, class S>
void add_weights_gradient(const PatchMix& a, int64_t b, int64_t h, int64_t p, const Piece& at, const T* mixed, T* sum) {
  const S* query = static_cast<const S*>(a.query.data) + b * a.query.batch + h * a.query.head + a.query.patch[p];
  for (int64_t x = at.x_begin; x < at.x_end; ++x, mixed += at.channels()) {
    const S* point = query + a.query.point[x] + at.c_begin * a.query.channel;
    T dot = 0;
    for (int64_t c = 0; c < at.channels(); ++c) dot = fma(T(widen(point[c * a.query.channel])), mixed[c], dot);
    sum[x - at.x_begin] += dot;
  }
}

template <class T, class S>
void mix(const PatchMix& a, int64_t b, int64_t row_offset, int64_t row_begin, int64_t row_end, int64_t point_begin, int64_t point_end,
         void* scratch) {
  constexpr int64_t P = Tiles<T>::PANEL, L = lanes<T>;
  const int64_t width = panel_columns<T>(), channels = a.from.channels, step = chunk_points(channels), count = row_end - row_begin;
  Arena<T> arena{static_cast<char*>(scratch)};
  T* panels = arena.take(MIX_DEPTH * width);
  T* mixed = arena.take(ROW_BLOCK * width);
  T* row = arena.take(2 * width);
  T* weights_sum = arena.take(ROW_BLOCK * DEPTH);
  T* rows = arena.take(ROW_BLOCK * MIX_SPACING);
  for (int64_t x = point_begin; x < point_end; x += step) {
    const int64_t x_end = smaller(x + step, point_end), points = x_end - x;
    if (a.weights_gradient.data) {
      for (int64_t i = 0; i < count * points; ++i) weights_sum[i] = 0;
    }
    for (int64_t h = 0; h < a.heads; ++h) {
      const T* matrix = static_cast<const T*>(a.matrix) + ((b - a.first) * a.heads + h) * a.head_stride + row_begin * a.depth;
      for (int64_t channel = 0; channel < channels; channel += DEPTH) {
        const Piece at{x, x_end, channel, smaller(channel + DEPTH, channels)};
        const int64_t columns = at.size(), padded = round_up(columns, P);
        for (int64_t i = columns; i < padded; ++i) row[i] = 0;
        Ahead<S> next;  // head of these points
        if (h + 1 < a.heads && channel == 0) next = Ahead<S>(a.from, b, h + 1, 0, a.depth, x, x_end);
        const int64_t tiles = larger<int64_t>(count / Tiles<T>::R, 1) * (padded / P) * ((a.depth + MIX_DEPTH - 1) / MIX_DEPTH);
        const int64_t share = (next.left() + tiles - 1) / larger<int64_t>(tiles, 1);
        auto between = [&] { next.ask(share); };
        for (int64_t begin = 0; begin < a.depth; begin += MIX_DEPTH) {
          const int64_t depth = smaller(a.depth - begin, MIX_DEPTH);
          for (int64_t r = 0; r < count; ++r) __builtin_memcpy(rows + r * MIX_SPACING, matrix + r * a.depth + begin, depth * sizeof(T));
          for (int64_t j = 0; j < depth; ++j) {
            load_row<T, S>(a.from, b, h, begin + j, a.depth - 1, at, weights_of<T>(a.from_weights, b, begin + j), a.from_weights.point, a.hide, row);
            for (int64_t i = 0; i < columns; i += P) {
              T* to = panels + i * depth + j * P;
              store(to, load(row + i));
              store(to + L, load(row + i + L));
            }
          }
          for (int64_t i = 0; i < columns; i += P) {
            const T* panel = panels + i * depth;
            if (columns - i > L) mix_panel<T, 2>(rows, count, panel, depth, begin > 0, mixed + i, width, between);
            else mix_panel<T, 1>(rows, count, panel, depth, begin > 0, mixed + i, width, between);
          }
        }
        if (a.depth == 0) {
          for (int64_t i = 0; i < count * width; ++i) mixed[i] = 0;
        }
        for (int64_t r = 0; r < count; ++r) {
          const int64_t p = row_offset + row_begin + r;
          if (a.weights_gradient.data) add_weights_gradient<T, S>(a, b, h, p, at, mixed + r * width, weights_sum + r * points);
          const int64_t last = row_offset + row_end - 1;
          if (a.wide) store_row<T, T>(a, b, h, p, last, at, mixed + r * width);
          else store_row<T, S>(a, b, h, p, last, at, mixed + r * width);
        }
      }
    }
    for (int64_t r = 0; a.weights_gradient.data && r < count; ++r) {
      const int64_t p = row_offset + row_begin + r;
      const T* w = weights_of<T>(a.to_weights, b, p);
      T* to = static_cast<T*>(a.weights_gradient.data) + b * a.weights_gradient.batch + a.weights_gradient.patch[p];
      for (int64_t i = 0; i < points; ++i) {
        const bool dead = w[a.to_weights.point[x + i]] == T(0);
        to[a.weights_gradient.point[x + i]] = dead ? T(0) : weights_sum[r * points + i];
      }
    }
  }
}

// ---- by dtype ----------------------------------------------------------------------------------------------------------
template <class T> struct Tag { using type = T; };
template <class F> CO_INLINE auto by_dtype(DType t, F f) {
  switch (t) {
    case DType::float64: return f(Tag<double>{}, Tag<double>{});
    case DType::bfloat16: return f(Tag<float>{}, Tag<bfloat16>{});
    case DType::float16: return f(Tag<float>{}, Tag<float16>{});
    default: return f(Tag<float>{}, Tag<float>{});
  }
}

int64_t padded_of(DType t, int64_t keys) { return round_up(keys, t == DType::float64 ? Tiles<double>::PANEL : Tiles<float>::PANEL); }
size_t scores_scratch(DType t) { return t == DType::float64 ? scores_scratch_of<double>() : scores_scratch_of<float>(); }
size_t mix_scratch(DType t) { return t == DType::float64 ? mix_scratch_of<double>() : mix_scratch_of<float>(); }

void scores_any(const PatchScores& a, int64_t b, int64_t h, int64_t row_begin, int64_t row_end, int64_t point_begin, int64_t point_end,
                bool add, void* c, const PatchNext& next, void* scratch) {
  by_dtype(a.dtype, [&](auto t, auto s) {
    using T = typename decltype(t)::type;
    scores<T, typename decltype(s)::type>(a, b, h, row_begin, row_end, point_begin, point_end, add, static_cast<T*>(c), next, scratch);
  });
}
void softmax_any(DType t, const PatchRows& a, int64_t begin, int64_t end) {
  if (t == DType::float64) softmax<double>(a, begin, end); else softmax<float>(a, begin, end);
}
void softmax_backward_any(DType t, const PatchRows& a, int64_t begin, int64_t end) {
  if (t == DType::float64) softmax_backward<double>(a, begin, end); else softmax_backward<float>(a, begin, end);
}
void mix_any(const PatchMix& a, int64_t b, int64_t row_offset, int64_t row_begin, int64_t row_end, int64_t point_begin, int64_t point_end,
             void* scratch) {
  by_dtype(a.dtype, [&](auto t, auto s) {
    mix<typename decltype(t)::type, typename decltype(s)::type>(a, b, row_offset, row_begin, row_end, point_begin, point_end, scratch);
  });
}

}  // namespace

extern const PatchAttentionKernels patch_attention = {padded_of,  chunk_points, scores_scratch,       mix_scratch,
                                                      scores_any, softmax_any,  softmax_backward_any, mix_any};

}  // namespace continuum_ops::CO_ISA
