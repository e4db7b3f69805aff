// Patch attention on one core for one instruction set: compiled once per CO_ISA_*.
//
// Both products pack a few points of all patches from the grid into scratch that the caches hold, widened to the accumulation type and
// weighted on the way, and multiply from there, some rows x 2 vectors of sums in registers. While one piece is multiplied the next one
// is asked for and packed, a little after each tile: a patch is a short run in each of many pages, often at distances that share few
// sets of a cache, where what is asked for long before is gone when it is needed. Sums over the points of a patch are cut into DEPTH
// terms, sums over patches into MIX_DEPTH: always in the same order, and with less rounding than one long sum.
#include "patch_attention.h"
#include "simd.h"

namespace continuum_ops::CO_ISA {
namespace {

constexpr int64_t DEPTH = 128;       // points x channels that are packed together
constexpr int64_t SPACING = DEPTH + 16;  // of packed rows: no multiple of a page's fraction
constexpr int64_t COLUMN_BLOCK = 192;
constexpr int64_t MIX_DEPTH = 256;
constexpr int64_t MIX_SPACING = MIX_DEPTH + 16;
constexpr int64_t PACE = 16;   // terms between two requests for memory: more at once than a core keeps track of would stall it
constexpr int64_t AHEAD = 4;   // patches asked for in advance where nothing is multiplied meanwhile
constexpr double LOG2E = 1.4426950408889634074;

template <class T> struct Tiles {
#if defined(CO_ISA_avx512)
  static constexpr int LEAST = 12, MOST = 14;  // rows of a tile
#else
  static constexpr int LEAST = 5, MOST = 6;
#endif
  static constexpr int64_t L = lanes<T>, PANEL = 2 * L, GROUP = PANEL < 8 ? PANEL : 8;  // columns that are transposed together
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
  return size_t(2 * ROW_BLOCK * SPACING + Tiles<T>::GROUP * SPACING + 2 * round_up(COLUMN_BLOCK, Tiles<T>::PANEL) * DEPTH) * sizeof(T) + 320;
}
template <class T> size_t mix_scratch_of() {
  return size_t((2 * MIX_DEPTH + ROW_BLOCK + 1) * panel_columns<T>() + ROW_BLOCK * (MIX_RUN * DEPTH + MIX_SPACING)) * sizeof(T) + 384;
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

// Asks for the lines of a point's channels.
template <bool WRITE> CO_INLINE void prefetch_point(const char* at, int64_t bytes) {
  for (const char* end = at + bytes; at < end; at += 64) __builtin_prefetch(at, WRITE ? 1 : 0, 3);
}

// Asks for a piece of the patches [0, end) of an operand, a few points at a time.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const PatchOperand& o, int64_t element, int64_t b, int64_t h, int64_t first, int64_t count, const Piece& at)
      : from_(static_cast<const char*>(o.data) + (b * o.batch + h * o.head + at.c_begin) * element), patch_(o.patch + first),
        point_(o.point + at.x_begin), element_(element), bytes_(at.channels() * element), points_(at.x_end - at.x_begin),
        count_(o.channel == 1 ? count : 0) {}
  // At most `count` points, up to patch `end`; returns what is left of count.
  __attribute__((always_inline)) int64_t ask(int64_t count, int64_t end) {
    end = smaller(end, count_);
    for (; count > 0 && p_ < end; --count) {
      prefetch_point<false>(from_ + (patch_[p_] + point_[x_]) * element_, bytes_);
      if (++x_ == points_) x_ = 0, ++p_;
    }
    return count;
  }

 private:
  const char* from_ = nullptr;
  const int64_t *patch_ = nullptr, *point_ = nullptr;
  int64_t element_ = 0, bytes_ = 0, points_ = 0, count_ = 0, p_ = 0, x_ = 0;
};

// What is fetched while tiles multiply: `units` patches, first those of rows, then those of columns, evenly over the tiles.
class Pace {
 public:
  Ahead rows, columns;
  Pace() = default;
  Pace(int64_t row_units, int64_t units, int64_t points, int64_t tiles, int64_t depth)
      : row_units_(row_units), units_(units), tiles_(larger<int64_t>(tiles, 1)) {
    const int64_t slots = larger<int64_t>(depth / PACE, 1) * larger<int64_t>(tiles_ - 1, 1);
    share_ = (units * points + slots - 1) / slots;
  }
  // In a tile.
  __attribute__((always_inline)) void ask() { columns.ask(rows.ask(share_, smaller(asked_, row_units_)), asked_ - row_units_); }
  // Before a tile.
  void start_tile(int64_t depth) {
    packed_ = asked_, ++tile_;
    asked_ = tile_ + 1 < tiles_ ? units_ * tile_ / (tiles_ - 1) : units_;
    if (depth < PACE) ask();
  }
  // After a tile: units to have been packed.
  int64_t ready() const { return tile_ < tiles_ ? packed_ : units_; }
  void ask_to(int64_t end) {
    share_ = units_ << 20, asked_ = smaller(end, units_);
    ask();
  }
  int64_t units() const { return units_; }

 private:
  int64_t row_units_ = 0, units_ = 0, tiles_ = 1, share_ = 0, tile_ = 0, asked_ = 0, packed_ = 0;
};

// Whether points are whole vectors of T.
template <class T, class S> CO_INLINE bool vectors_of(const PatchOperand& o, const Piece& at) {
  return o.channel == 1 && sizeof(S) == sizeof(T) && at.channels() % lanes<T> == 0;
}

// Row p of a piece, widened, to[0 .. size): times weights (0 where the weight is, whatever stands there), and 0 at points that are not
// finite if they are to be hidden; returns whether there was one.
template <class T, class S>
CO_INLINE bool load_row(const PatchOperand& o, int64_t b, int64_t h, int64_t p, const Piece& at, const T* weights, const int64_t* weight_point,
                        bool hide, T* to) {
  const S* from = static_cast<const S*>(o.data) + b * o.batch + h * o.head + o.patch[p];
  const int64_t channels = at.channels();
  if (vectors_of<T, S>(o, at) && !weights && !hide) {
    for (int64_t x = at.x_begin; x < at.x_end; ++x) {
      const T* point = reinterpret_cast<const T*>(from + o.point[x] + at.c_begin);
      for (int64_t c = 0; c < channels; c += lanes<T>, to += lanes<T>) store_unaligned(to, load_unaligned(point + c));
    }
    return false;
  }
  bool hidden = false;
  for (int64_t x = at.x_begin; x < at.x_end; ++x, to += channels) {
    const S* point = from + o.point[x] + at.c_begin * o.channel;
    T w = 1;
    if (weights) {
      w = weights[weight_point[x]];
      if (w == T(0)) {
        for (int64_t c = 0; c < channels; ++c) to[c] = 0;
        continue;
      }
    }
    if (vectors_of<T, S>(o, at)) {
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

// ---- tiles -------------------------------------------------------------------------------------------------------------
// to[r, i] = or += sum over x < depth of rows[r, x] panel[x, i]
template <class T, int R, int C, int SPACING>
__attribute__((noinline)) void tile(const T* rows, const T* panel, int64_t depth, bool add, T* to, int64_t ldt, Pace& pace) {
  constexpr int64_t L = lanes<T>, P = Tiles<T>::PANEL;
  Vec<T> acc[R][C];
  CO_UNROLL
  for (int r = 0; r < R; ++r) {
    CO_UNROLL
    for (int i = 0; i < C; ++i) acc[r][i] = Vec<T>{};
  }
  int64_t x = 0;
  for (; x + PACE <= depth; x += PACE) {
    multiply_spaced_rows<T, R, C, SPACING>(acc, rows + x, panel + x * P, P, PACE);
    pace.ask();
  }
  multiply_spaced_rows<T, R, C, SPACING>(acc, rows + x, panel + x * P, P, depth - x);
  CO_UNROLL
  for (int r = 0; r < R; ++r) {
    CO_UNROLL
    for (int i = 0; i < C; ++i) {
      T* at = to + r * ldt + i * L;
      store(at, add ? load(at) + acc[r][i] : acc[r][i]);
    }
  }
}

// Rows cut into tiles of nearly equal height: one of a single row at the end would wait for itself.
template <class T> struct RowTiles {
  int64_t count, tiles, least, taller;  // the first `taller` tiles have a row more
  explicit RowTiles(int64_t rows) : count(rows), tiles((rows + Tiles<T>::MOST - 1) / Tiles<T>::MOST) {
    least = tiles > 0 ? rows / tiles : 0, taller = tiles > 0 ? rows % tiles : 0;
    if (least >= Tiles<T>::LEAST) return;
    least = 0, tiles = rows / FULL + rows % FULL / 4 + rows % FULL % 4;
  }
  int64_t rows_at(int64_t r, int64_t index) const {
    if (least > 0) return least + (index < taller);
    return count - r >= FULL ? FULL : count - r >= 4 ? 4 : 1;
  }

 private:
  static constexpr int64_t FULL = Tiles<T>::MOST / 6 * 6;  // where the rows are too few for that
};

template <class T, int C, int SPACING>
void tile_of(int64_t height, const T* rows, const T* panel, int64_t depth, bool add, T* to, int64_t ldt, Pace& pace) {
  constexpr int LEAST = Tiles<T>::LEAST, MOST = Tiles<T>::MOST;
  pace.start_tile(depth);
  if (height == MOST) tile<T, MOST, C, SPACING>(rows, panel, depth, add, to, ldt, pace);
  else if (height == MOST - 1) tile<T, MOST - 1, C, SPACING>(rows, panel, depth, add, to, ldt, pace);
  else if (height == LEAST) tile<T, LEAST, C, SPACING>(rows, panel, depth, add, to, ldt, pace);
  else if (height == 4) tile<T, 4, C, SPACING>(rows, panel, depth, add, to, ldt, pace);
  else tile<T, 1, C, SPACING>(rows, panel, depth, add, to, ldt, pace);
}

#include "patch_attention_scores.h"
#include "patch_attention_mix.h"

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

void scores_any(const PatchScores& a, int64_t b, const PatchPart& part, void* c, void* scratch) {
  by_dtype(a.dtype, [&](auto t, auto s) {
    using T = typename decltype(t)::type;
    scores<T, typename decltype(s)::type>(a, b, part, static_cast<T*>(c), scratch);
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
