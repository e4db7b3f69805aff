// What forward and backward share: the sizes of blocks, loading and masking them, and the products of their tiles.
#pragma once

#include "continuum_attention.h"
#include "philox.h"
#include "simd.h"

namespace continuum_ops::CO_ISA {
namespace {

template <class T> struct Shape {
  static constexpr int L = lanes<T>;
#if defined(CO_ISA_avx2)
  static constexpr int R = 4, C = 3, groups = 2;  // 12 accumulators of 16 registers
#elif defined(CO_ISA_avx512)
  static constexpr int R = 4, C = 4, groups = 1;  // 16 accumulators of 32 registers: the exponential needs the others
#else
  static constexpr int R = 4, C = 2, groups = 4;
#endif
  static constexpr int QB = groups * C * L;  // queries per block
};
constexpr int KB = 64;         // keys per block
constexpr int PAD = 16;        // zero rows behind a block, for tiles that overhang it
constexpr int STRIP = 4;       // blocks of queries that meet a block of keys while it is in the cache
constexpr int RUN = 16;        // key blocks whose sums are added up before they join the total: keeps rounding errors small
constexpr double BOUND = 40;   // exponents in [-40, 40] need no shift: sums and products stay far from overflow
constexpr double MIN_BIAS = -80, MIN_BIAS_MASKED = -20;  // a mask may leave a row nothing but the keys of least weight
constexpr int64_t SHORT_SUM = 64;  // longer products are summed in pieces: smaller rounding errors
constexpr int64_t PIECE = 32;
constexpr double TOLERANCE = 24;
// Before the first score. Finite, so that a score of -inf counts as nothing instead of as -inf - (-inf).
constexpr float NO_SHIFT = -0x1p120f;

// Flags that choose a branch at compile time inside a generic lambda.
struct True { constexpr operator bool() const { return true; } };
struct False { constexpr operator bool() const { return false; } };

struct Arena {
  char* at;
  template <class T> T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(at);
    at += (size_t(count) * sizeof(T) + 63) / 64 * 64;
    return p;
  }
};

CO_INLINE int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

template <class T> CO_INLINE void fill(T* p, int64_t n, T x) {
  for (int64_t i = 0; i < n; ++i) p[i] = x;
}

template <class S> CO_INLINE const S* lead_base(const Operand& o, int64_t lead) {
  return static_cast<const S*>(o.data) + o.lead_offset[lead];
}

CO_INLINE int64_t key_place(const KeySet& keys, int64_t j) { return keys.index ? keys.index[j] : j; }

// ---- loading ---------------------------------------------------------------------------------------------------------
template <class T> struct KeyBlock {
  const T *key, *value, *bias, *position;  // bias and position may be null
  ptrdiff_t ldk, ldv, ldp;
  int64_t first, count;
};

// Rows are read in place where they can be, else copied (and converted, and gathered) to `buffer`.
template <class T, class S>
CO_INLINE const T* load_rows(const Operand& o, const S* base, const KeySet& keys, int64_t first, int64_t count, int64_t width,
                             T* buffer, ptrdiff_t* ld) {
  if constexpr (sizeof(T) == sizeof(S)) {
    if (!keys.index && (o.column_stride == 1 || width <= 1)) {
      *ld = o.row_stride;
      return base + first * o.row_stride;
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    const S* row = base + key_place(keys, first + j) * o.row_stride;
    T* to = buffer + j * width;
    if (o.column_stride == 1) {
      for (int64_t c = 0; c < width; ++c) to[c] = widen(row[c]);
    } else {
      for (int64_t c = 0; c < width; ++c) to[c] = widen(row[c * o.column_stride]);
    }
  }
  *ld = width;
  return buffer;
}

template <class T, class S>
CO_INLINE KeyBlock<T> load_keys(const AttentionProblem& a, int64_t lead, int64_t first, int64_t count, T* key_buffer, T* value_buffer,
                                 T* position_buffer) {
  const KeySet& keys = a.keys[lead];
  KeyBlock<T> b{};
  b.first = first;
  b.count = count;
  b.bias = keys.bias ? static_cast<const T*>(keys.bias) + first : nullptr;
  b.key = load_rows<T, S>(a.key, lead_base<S>(a.key, lead), keys, first, count, a.d, key_buffer, &b.ldk);
  b.value = load_rows<T, S>(a.value, lead_base<S>(a.value, lead), keys, first, count, a.dv, value_buffer, &b.ldv);
  const DistanceTerm& g = a.distance;
  if (g.given) b.position = load_rows<T, T>(g.key_pos, lead_base<T>(g.key_pos, lead), keys, first, count, g.dims, position_buffer, &b.ldp);
  return b;
}

template <class T> CO_INLINE T rate_of(const DistanceTerm& g, int64_t lead) {
  return g.rate ? static_cast<const T*>(g.rate)[g.rate_offset[lead]] : T(0);
}

template <class T, class S> double max_norm_of(const AttentionProblem& a, int64_t lead, const KeySet& keys) {
  const S* base = lead_base<S>(a.key, lead);
  T most = 0;
  for (int64_t j = 0; j < keys.count; ++j) {
    const S* row = base + key_place(keys, j) * a.key.row_stride;
    T sum = 0;
    int64_t c = 0;
    if constexpr (sizeof(T) == sizeof(S)) {
      if (a.key.column_stride == 1) {
        Vec<T> s = Vec<T>{};
        for (; c + lanes<T> <= a.d; c += lanes<T>) {
          const Vec<T> x = load_unaligned<T>(row + c);
          s = fma(x, x, s);
        }
        for (int i = 0; i < lanes<T>; ++i) sum += s[i];
      }
    }
    for (; c < a.d; ++c) {
      const T x = widen(row[c * a.key.column_stride]);
      sum += x * x;
    }
    if (!(sum <= most)) most = sum;  // a NaN sticks: every comparison with it fails, and the caller's does too
    if (most != most) break;
  }
  return __builtin_sqrt(double(most));
}

// to[c * QB + i] = x[i, c] * factor: queries in lanes. Lanes past `count` are zero.
template <class T, class S, int QB>
CO_INLINE void transpose_rows(const S* x, const Operand& o, int64_t count, int64_t width, T factor, T* to) {
  for (int64_t i = 0; i < count; ++i) {
    const S* row = x + i * o.row_stride;
    for (int64_t c = 0; c < width; ++c) to[c * QB + i] = widen(row[c * o.column_stride]) * factor;
  }
  if (count < QB) {
    for (int64_t c = 0; c < width; ++c) fill<T>(to + c * QB + count, QB - count, T(0));
  }
}

// Is |exponent| <= BOUND for all scores of these queries?
template <class T, int QB> bool is_bounded(const AttentionProblem& a, const T* query, int64_t count, const KeySet& keys) {
  if (a.distance.rate) return false;  // the distance term has no lower bound
  const double min_bias = a.is_causal || a.mask.data || a.distance.radius.data ? MIN_BIAS_MASKED : MIN_BIAS;
  if (keys.count <= FEW_KEYS || !(keys.min_bias >= min_bias)) return false;
  const int64_t d = a.d;
  for (int64_t i = 0; i < count; i += lanes<T>) {
    Vec<T> s = Vec<T>{};
    for (int64_t c = 0; c < d; ++c) {
      const Vec<T> x = load(query + c * QB + i);
      s = fma(x, x, s);
    }
    for (int l = 0; l < lanes<T>; ++l) {
      if (!(__builtin_sqrt(double(s[l])) * keys.max_norm <= BOUND)) return false;
    }
  }
  return true;
}

enum class Kept { none, some, all };

// Which (key, query) pairs of a block count, beyond the keys that do not exist at all: to[j * QB + i] is all ones or zero.
template <class T, int QB>
Kept block_mask(const AttentionProblem& a, int64_t lead, int64_t i0, int64_t nq, int64_t first, int64_t count,
                typename LaneInt<T>::type* to) {
  const KeySet& keys = a.keys[lead];
  const bool causal = a.is_causal && key_place(keys, first + count - 1) > i0;
  if (causal && key_place(keys, first) > i0 + nq - 1) return Kept::none;
  if (!causal && !a.mask.data) return Kept::all;
  const uint8_t* mask = a.mask.data ? lead_base<uint8_t>(a.mask, lead) + i0 * a.mask.row_stride : nullptr;
  int64_t kept = 0;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t k = key_place(keys, first + j);
    auto* row = to + j * QB;
    for (int64_t i = 0; i < nq; ++i) {
      bool keep = !causal || k <= i0 + i;
      if (mask) keep &= mask[i * a.mask.row_stride + k * a.mask.column_stride] != 0;
      kept += keep;
      row[i] = keep ? -1 : 0;
    }
    for (int64_t i = nq; i < QB; ++i) row[i] = 0;
  }
  return kept == 0 ? Kept::none : kept == nq * count ? Kept::all : Kept::some;
}

// to[j * QB + i] = 0 where the probability is dropped, else 1 / (1 - p).
template <class T, int QB>
void dropout_factors(const AttentionProblem& a, int64_t lead, int64_t i0, int64_t nq, int64_t first, int64_t count, T* to) {
  const KeySet& keys = a.keys[lead];
  const uint64_t threshold = uint64_t(a.dropout_p * 4294967296.0);
  const T factor = a.dropout_p < 1 ? T(1 / (1 - a.dropout_p)) : T(0);
  for (int64_t i = 0; i < nq; ++i) {
    const int64_t row = a.query_places ? a.query_places[i0 + i] : i0 + i;
    int64_t quad = -1;
    PhiloxWords words{};
    for (int64_t j = 0; j < count; ++j) {
      const int64_t place = key_place(keys, first + j), k = a.key_places ? a.key_places[place] : place;
      if (k >> 2 != quad) {
        quad = k >> 2;
        words = philox(a.seed, uint32_t(quad), uint32_t(row), uint64_t(lead));
      }
      to[j * QB + i] = uint64_t(words.w[k & 3]) < threshold ? T(0) : factor;
    }
  }
}

// ---- scores ----------------------------------------------------------------------------------------------------------
template <class T, int R, int C, int QB>
__attribute__((noinline)) void long_product(const T* const (&rows)[R], const T* b, int64_t depth, Vec<T> (&total)[R][C]) {
  for (int64_t x = 0; x < depth; x += PIECE) {
    const T* part[R];
    Vec<T> acc[R][C] = {};
    for (int r = 0; r < R; ++r) part[r] = rows[r] + x;
    multiply_rows<T, R, C>(acc, part, b + x * QB, QB, smaller<int64_t>(PIECE, depth - x));
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) total[r][c] = x == 0 ? acc[r][c] : total[r][c] + acc[r][c];
    }
  }
}

// acc = rows b for R rows (keys or values) from row j of the block, C vectors of queries. Rows past the block repeat its last one.
template <class T, int R, int C, int QB>
CO_INLINE void product_tile(Vec<T> (&acc)[R][C], const T* data, ptrdiff_t ld, int64_t j, int64_t count, const T* b, int64_t depth) {
  const T* rows[R];
  CO_UNROLL
  for (int r = 0; r < R; ++r) rows[r] = data + smaller<int64_t>(j + r, count - 1) * ld;
  if (depth <= SHORT_SUM) {
    CO_UNROLL
    for (int r = 0; r < R; ++r) {
      CO_UNROLL
      for (int c = 0; c < C; ++c) acc[r][c] = Vec<T>{};
    }
    multiply_rows<T, R, C>(acc, rows, b, QB, depth);
  } else {
    Vec<T> total[R][C];
    long_product<T, R, C, QB>(rows, b, depth, total);
    CO_UNROLL
    for (int r = 0; r < R; ++r) {
      CO_UNROLL
      for (int c = 0; c < C; ++c) acc[r][c] = total[r][c];
    }
  }
}

// acc = log2 w + scaled scores; rate is in base 2
template <class T, int R, int C, int QB, bool DISTANCE>
CO_INLINE void score_tile(Vec<T> (&acc)[R][C], const KeyBlock<T>& b, int64_t j, const T* query, int64_t d, const T* d2, T rate) {
  product_tile<T, R, C, QB>(acc, b.key, b.ldk, j, b.count, query, d);
  if (b.bias) {  // after the product: starting from a large log w would round every partial sum at its size
    CO_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec<T> bias = broadcast(b.bias[smaller<int64_t>(j + r, b.count - 1)]);
      CO_UNROLL
      for (int c = 0; c < C; ++c) acc[r][c] += bias;
    }
  }
  if constexpr (DISTANCE) {
    const Vec<T> factor = broadcast(-rate);
    CO_UNROLL
    for (int r = 0; r < R; ++r) {
      const T* row = d2 + smaller<int64_t>(j + r, b.count - 1) * QB;
      CO_UNROLL
      for (int c = 0; c < C; ++c) acc[r][c] = fma(factor, load(row + c * lanes<T>), acc[r][c]);
    }
  }
}

// to[r, i] += a[x, r] b[x, i]: R channels x C vectors of queries, summed over the keys x of a block.
template <class T, int R, int C, int QB>
CO_INLINE void mix_tile(const T* a, ptrdiff_t lda, const T* b, int64_t depth, T* to) {
  Vec<T> acc[R][C] = {};
  multiply_columns<T, R, C>(acc, a, lda, b, QB, depth);
  CO_UNROLL
  for (int r = 0; r < R; ++r) {
    CO_UNROLL
    for (int c = 0; c < C; ++c) {
      T* t = to + r * QB + c * lanes<T>;
      store(t, load(t) + acc[r][c]);
    }
  }
}

template <class T, int C> CO_INLINE void mix_columns(const T* a, ptrdiff_t lda, int64_t width, const T* b, int64_t depth, T* to) {
  constexpr int QB = Shape<T>::QB;
  int64_t r = 0;
  for (; r + 4 <= width; r += 4) mix_tile<T, 4, C, QB>(a + r, lda, b, depth, to + r * QB);
  if (r + 2 <= width) {
    mix_tile<T, 2, C, QB>(a + r, lda, b, depth, to + r * QB);
    r += 2;
  }
  if (r < width) mix_tile<T, 1, C, QB>(a + r, lda, b, depth, to + r * QB);
}

template <class T> void mix(const T* a, ptrdiff_t lda, int64_t width, const T* b, int64_t depth, int64_t active, T* to) {
  constexpr int C = Shape<T>::C, L = Shape<T>::L;
  int64_t q = 0;
  for (; q + C * L <= active; q += C * L) mix_columns<T, C>(a, lda, width, b + q, depth, to + q);
  for (; q < active; q += L) mix_columns<T, 1>(a, lda, width, b + q, depth, to + q);
}

}  // namespace
}  // namespace continuum_ops::CO_ISA
