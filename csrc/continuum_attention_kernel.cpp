// Continuum attention on one core for one instruction set: compiled once per CO_ISA_*.
//
// Lanes hold queries. A block of queries meets the keys block by block (flash style, O(block) scratch):
//   S^T = K Q^T   rows of K are read as scalars and spread over the lanes, R keys x C vectors of queries in registers
//   P^T = 2^(S^T + log2 w - m)   in the same registers
//   O^T += V^T P^T   R channels x C vectors of queries in registers
// If |q| max|k| bounds every exponent of the block (Cauchy-Schwarz), no running maximum is needed (m = 0). Otherwise m is raised
// lazily: only when a score exceeds it by 2^24, which float32 sums bear without loss. Few keys get the exact maximum: the
// largest term is then exactly 1, and what cancels in the gradient of a nearly one-hot row cancels to the last bit.
#include "continuum_attention.h"

#include "philox.h"
#include "simd.h"

namespace continuum_ops::CO_ISA {
namespace {

template <class T> struct Shape {
  static constexpr int L = lanes<T>;
#if defined(CO_ISA_avx2)
  static constexpr int R = 4, C = 3, groups = 2;  // 12 accumulators of 16 registers
#elif CO_VECTOR_BYTES == 64
  static constexpr int R = 4, C = 4, groups = 1;  // 16 accumulators of 32 registers: the exponential needs the others
#else
  static constexpr int R = 4, C = 2, groups = 4;
#endif
  static constexpr int QB = groups * C * L;  // queries per block
};
constexpr int KB = 64;         // keys per block
constexpr int PAD = 16;        // zero rows behind a block, for tiles that overhang it
constexpr int STRIP = 4;  // blocks of queries that meet a block of keys while it is in the cache
constexpr int RUN = 16;        // key blocks whose sums are added up before they join the total: keeps rounding errors small
constexpr double BOUND = 40;   // exponents in [-40, 40] need no shift: sums and products stay far from overflow
constexpr double MIN_BIAS = -80;
constexpr int64_t FEW_KEYS = 512;
constexpr double TOLERANCE = 24;

struct Arena {
  char* at;
  template <class T> T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(at);
    at += (size_t(count) * sizeof(T) + 63) / 64 * 64;
    return p;
  }
};

template <class T> CO_INLINE void fill(T* p, int64_t n, T x) {
  for (int64_t i = 0; i < n; ++i) p[i] = x;
}

template <class S> CO_INLINE const S* lead_base(const Operand& o, int64_t lead) {
  return static_cast<const S*>(o.data) + o.lead_offset[lead];
}

CO_INLINE int64_t key_place(const KeySet& keys, int64_t j) { return keys.index ? keys.index[j] : j; }

// ---- loading ---------------------------------------------------------------------------------------------------------
template <class T> struct KeyBlock {
  const T *key, *value, *bias;  // bias may be null
  ptrdiff_t ldk, ldv;
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
CO_INLINE KeyBlock<T> load_keys(const AttentionProblem& a, int64_t lead, int64_t first, int64_t count, T* key_buffer, T* value_buffer) {
  const KeySet& keys = a.keys[lead];
  KeyBlock<T> b;
  b.first = first;
  b.count = count;
  b.bias = keys.bias ? static_cast<const T*>(keys.bias) + first : nullptr;
  b.key = load_rows<T, S>(a.key, lead_base<S>(a.key, lead), keys, first, count, a.d, key_buffer, &b.ldk);
  b.value = load_rows<T, S>(a.value, lead_base<S>(a.value, lead), keys, first, count, a.dv, value_buffer, &b.ldv);
  return b;
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
template <class T, int QB> bool is_bounded(const T* query, int64_t count, int64_t d, const KeySet& keys) {
  if (keys.count <= FEW_KEYS || !(keys.min_bias >= MIN_BIAS)) return false;
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
    int64_t quad = -1;
    PhiloxWords words{};
    for (int64_t j = 0; j < count; ++j) {
      const int64_t k = key_place(keys, first + j);
      if (k >> 2 != quad) {
        quad = k >> 2;
        words = philox(a.seed, uint32_t(quad), uint32_t(i0 + i), uint64_t(lead));
      }
      to[j * QB + i] = uint64_t(words.w[k & 3]) < threshold ? T(0) : factor;
    }
  }
}

// ---- scores ----------------------------------------------------------------------------------------------------------
// acc[r][c] = log2 w + scaled score of R keys from key j of the block and C vectors of queries. Rows past the block repeat its last row.
template <class T, int R, int C, int QB>
CO_INLINE void score_tile(Vec<T> (&acc)[R][C], const KeyBlock<T>& b, int64_t j, const T* query, int64_t d) {
  const T* rows[R];
  CO_UNROLL
  for (int r = 0; r < R; ++r) {
    rows[r] = b.key + smaller<int64_t>(j + r, b.count - 1) * b.ldk;
    CO_UNROLL
    for (int c = 0; c < C; ++c) acc[r][c] = Vec<T>{};
  }
  multiply_rows<T, R, C>(acc, rows, query, QB, d);
  if (b.bias) {  // after the product: starting from a large log w would round every partial sum at its size
    CO_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec<T> bias = broadcast(b.bias[smaller<int64_t>(j + r, b.count - 1)]);
      CO_UNROLL
      for (int c = 0; c < C; ++c) acc[r][c] += bias;
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

template <class T> void mix(const T* a, ptrdiff_t lda, int64_t width, const T* b, int64_t depth, int64_t active, T* to) {
  using Sh = Shape<T>;
  constexpr int QB = Sh::QB, C = Sh::C;
  for (int64_t q = 0; q < active; q += C * lanes<T>) {
    int64_t r = 0;
    for (; r + 4 <= width; r += 4) mix_tile<T, 4, C, QB>(a + r, lda, b + q, depth, to + r * QB + q);
    if (r + 2 <= width) {
      mix_tile<T, 2, C, QB>(a + r, lda, b + q, depth, to + r * QB + q);
      r += 2;
    }
    if (r < width) mix_tile<T, 1, C, QB>(a + r, lda, b + q, depth, to + r * QB + q);
  }
}

// ---- forward -----------------------------------------------------------------------------------------------------------
template <class T> struct ForwardState {
  T *shift, *sum, *sum_total;  // (QB)
  T *out, *out_total;          // (dv, QB)
  T* p;                        // (KB, QB)
  int64_t dv;
  T tolerance;                 // a score may exceed the shift by this much
};

// Raises the shift of C vectors of queries to at least `top` and rescales what was summed with the old one.
template <class T, int QB>
__attribute__((noinline)) void raise_shift(const ForwardState<T>& st, int64_t q, int64_t rows_done, Vec<T> top) {
  const Vec<T> before = load(st.shift + q), after = max(top, before);
  const MaskVec<T> raised = after > before;
  const Vec<T> factor = raised ? exp2<true>(before - after) : broadcast(T(1));
  store(st.shift + q, raised ? after : before);
  auto rescale = [&](T* x) { store(x + q, load(x + q) * factor); };
  rescale(st.sum);
  rescale(st.sum_total);
  for (int64_t c = 0; c < st.dv; ++c) {
    rescale(st.out + c * QB);
    rescale(st.out_total + c * QB);
  }
  for (int64_t j = 0; j < rows_done; ++j) rescale(st.p + j * QB);
}

template <class T, bool BOUNDED, bool MASKED>
void forward_scores(const KeyBlock<T>& b, const T* query, int64_t d, int64_t active, const typename LaneInt<T>::type* mask,
                    const ForwardState<T>& st) {
  using Sh = Shape<T>;
  constexpr int R = Sh::R, C = Sh::C, L = Sh::L, QB = Sh::QB;
  T* const sums = st.sum;  // locals: the compiler cannot know that stores of T leave st alone
  T* const shifts = st.shift;
  T* const probabilities = st.p;
  const Vec<T> tolerance = broadcast(st.tolerance);
  for (int64_t q = 0; q < active; q += C * L) {
    for (int64_t j = 0; j < b.count; j += R) {
      Vec<T> acc[R][C];
      score_tile<T, R, C, QB>(acc, b, j, query + q, d);
      const int64_t live = b.count - j;
      if constexpr (MASKED) {
        for (int r = 0; r < R && r < live; ++r) {
          for (int c = 0; c < C; ++c) {
            const auto keep = *reinterpret_cast<const MaskVec<T>*>(mask + (j + r) * QB + q + c * L);
            acc[r][c] = keep ? acc[r][c] : broadcast(T(-__builtin_inf()));
          }
        }
      }
      if constexpr (!BOUNDED) {
        Vec<T> top[C];
        CO_UNROLL
        for (int c = 0; c < C; ++c) {
          top[c] = acc[0][c];
          CO_UNROLL
          for (int r = 1; r < R; ++r) top[c] = max(top[c], acc[r][c]);  // rows past the block repeat a row: harmless
        }
        auto need = greater(top[0], load(shifts + q) + tolerance);
        CO_UNROLL
        for (int c = 1; c < C; ++c) need = either(need, greater(top[c], load(shifts + q + c * L) + tolerance));
        if (__builtin_expect(any(need), 0)) {
          for (int c = 0; c < C; ++c) raise_shift<T, QB>(st, q + c * L, j, top[c]);
        }
      }
      CO_UNROLL
      for (int c = 0; c < C; ++c) {
        Vec<T> sum = load(sums + q + c * L), shift = BOUNDED ? Vec<T>{} : load(shifts + q + c * L), tile = Vec<T>{};
        CO_UNROLL
        for (int r = 0; r < R; ++r) {
          if (r >= live) break;
          Vec<T> p = exp2<!BOUNDED>(BOUNDED ? acc[r][c] : acc[r][c] - shift);
          if constexpr (MASKED) {
            const auto keep = *reinterpret_cast<const MaskVec<T>*>(mask + (j + r) * QB + q + c * L);
            p = keep ? p : Vec<T>{};
          }
          store(probabilities + (j + r) * QB + q + c * L, p);
          tile = r == 0 ? p : tile + p;
        }
        store(sums + q + c * L, sum + tile);
      }
    }
  }
}

template <class T> CO_INLINE void add_into(T* total, T* part, int64_t n) {
  for (int64_t i = 0; i < n; i += lanes<T>) {
    store(total + i, load(total + i) + load(part + i));
    store(part + i, Vec<T>{});
  }
}

CO_INLINE int64_t active_lanes(int64_t nq, int64_t step) { return (nq + step - 1) / step * step; }

// One block of queries and what is being summed for it.
template <class T> struct ForwardBlock {
  int64_t i0, nq, active;
  bool bounded;
  T* query;
  ForwardState<T> st;
};

// A strip of up to STRIP blocks of queries shares every block of keys while that is in the cache.
template <class T, class S>
void forward(const AttentionProblem& a, const AttentionOutput& o, int64_t lead, int64_t block_begin, int64_t block_end, void* scratch) {
  using Sh = Shape<T>;
  constexpr int QB = Sh::QB;
  Arena arena{static_cast<char*>(scratch)};
  T* key_buffer = arena.take<T>(KB * a.d);
  T* value_buffer = arena.take<T>(KB * a.dv);
  T* factors = arena.take<T>(KB * QB);
  auto* mask = arena.take<typename LaneInt<T>::type>(KB * QB);
  T* p = arena.take<T>(KB * QB);

  const KeySet& keys = a.keys[lead];
  ForwardBlock<T> strip[STRIP];
  const int64_t blocks = block_end - block_begin;
  for (int64_t t = 0; t < blocks; ++t) {
    ForwardBlock<T>& x = strip[t];
    x.i0 = (block_begin + t) * QB;
    x.nq = smaller<int64_t>(QB, a.n - x.i0);
    x.active = active_lanes(x.nq, Sh::C * Sh::L);
    x.query = arena.take<T>(a.d * QB);
    x.st = {arena.take<T>(QB), arena.take<T>(QB), arena.take<T>(QB), arena.take<T>(a.dv * QB), arena.take<T>(a.dv * QB), p, a.dv,
            T(keys.count <= FEW_KEYS ? 0 : TOLERANCE)};
    transpose_rows<T, S, QB>(lead_base<S>(a.query, lead) + x.i0 * a.query.row_stride, a.query, x.nq, a.d,
                             T(a.scale * 1.4426950408889634074), x.query);
    x.bounded = is_bounded<T, QB>(x.query, x.nq, a.d, keys);
    fill<T>(x.st.shift, QB, x.bounded ? T(0) : T(-__builtin_inf()));
    fill<T>(x.st.sum, QB, T(0));
    fill<T>(x.st.sum_total, QB, T(0));
    fill<T>(x.st.out, a.dv * QB, T(0));
    fill<T>(x.st.out_total, a.dv * QB, T(0));
  }
  auto join_totals = [&] {
    for (int64_t t = 0; t < blocks; ++t) {
      add_into<T>(strip[t].st.sum_total, strip[t].st.sum, QB);
      add_into<T>(strip[t].st.out_total, strip[t].st.out, a.dv * QB);
    }
  };

  for (int64_t first = 0, run = 1; first < keys.count; first += KB, ++run) {
    const int64_t count = smaller<int64_t>(KB, keys.count - first);
    KeyBlock<T> b{};
    for (int64_t t = 0; t < blocks; ++t) {
      const ForwardBlock<T>& x = strip[t];
      const Kept kept = block_mask<T, QB>(a, lead, x.i0, x.nq, first, count, mask);
      if (kept == Kept::none) continue;
      if (b.count == 0) b = load_keys<T, S>(a, lead, first, count, key_buffer, value_buffer);
      if (kept == Kept::all) {
        x.bounded ? forward_scores<T, true, false>(b, x.query, a.d, x.active, mask, x.st)
                  : forward_scores<T, false, false>(b, x.query, a.d, x.active, mask, x.st);
      } else {
        x.bounded ? forward_scores<T, true, true>(b, x.query, a.d, x.active, mask, x.st)
                  : forward_scores<T, false, true>(b, x.query, a.d, x.active, mask, x.st);
      }
      if (a.dropout_p > 0) {
        dropout_factors<T, QB>(a, lead, x.i0, x.nq, first, count, factors);
        for (int64_t j = 0; j < count; ++j) {
          for (int64_t i = 0; i < x.nq; ++i) p[j * QB + i] *= factors[j * QB + i];
        }
      }
      mix<T>(b.value, b.ldv, a.dv, p, count, x.active, x.st.out);
    }
    if (run % RUN == 0) join_totals();
  }
  join_totals();

  for (int64_t t = 0; t < blocks; ++t) {
    const ForwardBlock<T>& x = strip[t];
    const int64_t row0 = lead * a.n + x.i0;
    S* out = static_cast<S*>(o.out) + row0 * a.dv;
    T* lse = static_cast<T*>(o.lse) + row0;
    T* stats = static_cast<T*>(o.stats) + 2 * row0;
    for (int64_t i = 0; i < x.nq; ++i) {
      const T sum = x.st.sum_total[i];
      const bool empty = sum == T(0);
      const T shift = empty ? T(0) : x.st.shift[i];
      stats[2 * i] = shift;
      stats[2 * i + 1] = sum;
      lse[i] = empty ? T(-__builtin_inf())
                     : T((double(shift) + keys.log2_max_weight + __builtin_log2(double(sum))) * 0.69314718055994530942);
      for (int64_t c = 0; c < a.dv; ++c) {
        narrow(empty ? T(0) : x.st.out_total[c * QB + i] / sum, out + i * a.dv + c);
      }
    }
  }
}

// ---- backward ----------------------------------------------------------------------------------------------------------
// With p = w 2^(s - m) / sum the probability, g the gradient of out and D_i = g_i . out_i:
//   dS = p (g . v - D + grad_lse),  dV = p^T g,  dQ = scale dS K,  dK = scale dS^T Q,  d/dlog w = sum_i dS
// The division by `sum` is folded into the rows of g, D and grad_lse, so that each exponential is used as it comes.
template <class T, bool BOUNDED, bool MASKED, bool DROPOUT>
void backward_scores(const KeyBlock<T>& b, const T* query, int64_t d, const T* grad, int64_t dv, const T* shift, const T* delta,
                     const T* grad_lse, int64_t active, const typename LaneInt<T>::type* mask, const T* factors, T* p_out, T* ds_out) {
  using Sh = Shape<T>;
  constexpr int R = Sh::R, C = Sh::C, L = Sh::L, QB = Sh::QB;
  for (int64_t q = 0; q < active; q += C * L) {
    for (int64_t j = 0; j < b.count; j += R) {
      const int64_t live = b.count - j;
      Vec<T> acc[R][C];
      score_tile<T, R, C, QB>(acc, b, j, query + q, d);
      CO_UNROLL
      for (int c = 0; c < C; ++c) {
        const Vec<T> m = load(shift + q + c * L);
        CO_UNROLL
        for (int r = 0; r < R; ++r) {
          if (r >= live) break;
          Vec<T> p = exp2<!BOUNDED>(BOUNDED ? acc[r][c] : acc[r][c] - m);
          if constexpr (MASKED) {
            const auto keep = *reinterpret_cast<const MaskVec<T>*>(mask + (j + r) * QB + q + c * L);
            p = keep ? p : Vec<T>{};
          }
          store(p_out + (j + r) * QB + q + c * L, p);
        }
      }
      const T* rows[R];
      CO_UNROLL
      for (int r = 0; r < R; ++r) {
        rows[r] = b.value + smaller<int64_t>(j + r, b.count - 1) * b.ldv;
        CO_UNROLL
        for (int c = 0; c < C; ++c) acc[r][c] = Vec<T>{};
      }
      multiply_rows<T, R, C>(acc, rows, grad + q, QB, dv);
      CO_UNROLL
      for (int c = 0; c < C; ++c) {
        const Vec<T> dl = load(delta + q + c * L), gl = load(grad_lse + q + c * L);
        CO_UNROLL
        for (int r = 0; r < R; ++r) {
          if (r >= live) break;
          const int64_t at = (j + r) * QB + q + c * L;
          const Vec<T> p = load(p_out + at);
          if constexpr (DROPOUT) {
            const Vec<T> f = load(factors + at);
            store(ds_out + at, p * ((f * acc[r][c] - dl) + gl));
            store(p_out + at, p * f);
          } else {
            store(ds_out + at, p * ((acc[r][c] - dl) + gl));
          }
          if constexpr (MASKED) {  // 0 * inf: a dropped pair has no gradient whatever its value row holds
            const auto keep = *reinterpret_cast<const MaskVec<T>*>(mask + at);
            store(ds_out + at, keep ? load(ds_out + at) : Vec<T>{});
          }
        }
      }
    }
  }
}

// to[key j + r, channel c0..] += sum_i p[j + r, i] x[i, c0..]: R keys x C vectors of channels
template <class T, int R, int C>
CO_INLINE void outer_tile(const T* p, int64_t j, int64_t live, const T* x, ptrdiff_t ldx, int64_t nq, const KeySet& keys, int64_t first,
                          T* to, int64_t width, int64_t c0) {
  constexpr int QB = Shape<T>::QB, L = lanes<T>;
  const T* rows[R];
  CO_UNROLL
  for (int r = 0; r < R; ++r) rows[r] = p + (j + r) * QB;
  Vec<T> acc[R][C] = {};
  multiply_rows<T, R, C>(acc, rows, x + c0, ldx, nq);
  CO_UNROLL
  for (int r = 0; r < R; ++r) {
    if (r >= live) break;
    T* row = to + key_place(keys, first + j + r) * width + c0;
    CO_UNROLL
    for (int c = 0; c < C; ++c) {
      const int64_t left = width - c0 - c * L;
      if (left >= L) {
        store_unaligned<T>(row + c * L, load_unaligned<T>(row + c * L) + acc[r][c]);
      } else {
        for (int64_t l = 0; l < left; ++l) row[c * L + l] += acc[r][c][l];
      }
    }
  }
}

template <class T>
void outer(const T* p, int64_t count, const T* x, ptrdiff_t ldx, int64_t nq, const KeySet& keys, int64_t first, T* to, int64_t width) {
  constexpr int L = lanes<T>;
#if defined(CO_ISA_avx2)
  constexpr int R1 = 8, R2 = 6, C = 2;
#elif CO_VECTOR_BYTES == 64
  constexpr int R1 = 16, R2 = 4, C = 4;
#else
  constexpr int R1 = 8, R2 = 4, C = 2;
#endif
  int64_t c0 = 0;
  for (; width - c0 > (C - 1) * L; c0 += C * L) {
    for (int64_t j = 0; j < count; j += R2) outer_tile<T, R2, C>(p, j, count - j, x, ldx, nq, keys, first, to, width, c0);
  }
  if constexpr (C == 4) {
    for (; width - c0 > L; c0 += 2 * L) {
      for (int64_t j = 0; j < count; j += 8) outer_tile<T, 8, 2>(p, j, count - j, x, ldx, nq, keys, first, to, width, c0);
    }
  }
  for (; c0 < width; c0 += L) {
    for (int64_t j = 0; j < count; j += R1) outer_tile<T, R1, 1>(p, j, count - j, x, ldx, nq, keys, first, to, width, c0);
  }
}

CO_INLINE int64_t padded(int64_t width, int64_t step) { return (width + step - 1) / step * step; }

template <class T> struct BackwardBlock {
  int64_t i0, nq, active;
  bool bounded;
  T *query, *grad;            // scale log2(e) q and g / sum, lanes are queries
  T *query_rows, *grad_rows;  // scale q and g / sum, lanes are channels
  T *shift, *delta, *grad_lse, *grad_query;
};

template <class T, class S>
void load_backward_block(const AttentionProblem& a, const AttentionGradients& g, int64_t ldq, int64_t ldg, BackwardBlock<T>& x) {
  constexpr int QB = Shape<T>::QB;
  const S* q = lead_base<S>(a.query, g.lead) + x.i0 * a.query.row_stride;
  const S* grad = lead_base<S>(g.grad_out, g.lead) + x.i0 * g.grad_out.row_stride;
  const int64_t row0 = g.lead * a.n + x.i0;
  const S* out = static_cast<const S*>(g.out) + row0 * a.dv;
  const T* stats = static_cast<const T*>(g.stats) + 2 * row0;
  const T* grad_lse = g.grad_lse ? static_cast<const T*>(g.grad_lse) + row0 : nullptr;
  transpose_rows<T, S, QB>(q, a.query, x.nq, a.d, T(a.scale * 1.4426950408889634074), x.query);
  x.bounded = is_bounded<T, QB>(x.query, x.nq, a.d, a.keys[g.lead]);
  fill<T>(x.shift, QB, T(0));
  fill<T>(x.delta, QB, T(0));
  fill<T>(x.grad_lse, QB, T(0));
  fill<T>(x.query_rows, QB * ldq, T(0));
  fill<T>(x.grad_rows, QB * ldg, T(0));
  fill<T>(x.grad_query, a.d * QB, T(0));
  fill<T>(x.grad, a.dv * QB, T(0));
  for (int64_t i = 0; i < x.nq; ++i) {
    for (int64_t c = 0; c < a.d; ++c) {
      x.query_rows[i * ldq + c] = widen(q[i * a.query.row_stride + c * a.query.column_stride]) * T(a.scale);
    }
    const T sum = stats[2 * i + 1];
    if (sum == T(0)) continue;  // nothing to attend to: no gradient, whatever comes in
    x.shift[i] = stats[2 * i];
    T dot = 0;
    for (int64_t c = 0; c < a.dv; ++c) {
      const T y = widen(grad[i * g.grad_out.row_stride + c * g.grad_out.column_stride]);
      dot = fma(y, T(widen(out[i * a.dv + c])), dot);  // as the tiles sum g . v
      x.grad_rows[i * ldg + c] = x.grad[c * QB + i] = y / sum;
    }
    x.delta[i] = dot / sum;
    if (grad_lse) x.grad_lse[i] = grad_lse[i] / sum;
  }
}

template <class T> void add_row_sums(const T* ds, int64_t count, int64_t active, const KeySet& keys, int64_t first, T* to) {
  constexpr int QB = Shape<T>::QB, L = lanes<T>;
  for (int64_t j = 0; j < count; ++j) {
    Vec<T> s = load(ds + j * QB);
    for (int64_t i = L; i < active; i += L) s += load(ds + j * QB + i);
    T sum = 0;
    CO_UNROLL
    for (int l = 0; l < L; ++l) sum += s[l];
    to[key_place(keys, first + j)] += sum;
  }
}

template <class T, class S> void backward(const AttentionProblem& a, const AttentionGradients& g, void* scratch) {
  using Sh = Shape<T>;
  constexpr int QB = Sh::QB, L = Sh::L;
  const int64_t ldq = padded(a.d, L), ldg = padded(a.dv, L), lead = g.lead;
  const bool dropout = a.dropout_p > 0;
  Arena arena{static_cast<char*>(scratch)};
  T* key_buffer = arena.take<T>(KB * a.d);
  T* value_buffer = arena.take<T>(KB * a.dv);
  T* factors = arena.take<T>(KB * QB);
  auto* mask = arena.take<typename LaneInt<T>::type>(KB * QB);
  T* p = arena.take<T>((KB + PAD) * QB);
  T* ds = arena.take<T>((KB + PAD) * QB);
  if (dropout) fill<T>(factors, KB * QB, T(0));
  BackwardBlock<T> strip[STRIP];
  for (BackwardBlock<T>& x : strip) {
    x.query = arena.take<T>(a.d * QB);
    x.grad = arena.take<T>(a.dv * QB);
    x.query_rows = arena.take<T>(QB * ldq);
    x.grad_rows = arena.take<T>(QB * ldg);
    x.shift = arena.take<T>(QB);
    x.delta = arena.take<T>(QB);
    x.grad_lse = arena.take<T>(QB);
    x.grad_query = arena.take<T>(a.d * QB);
  }

  const KeySet& keys = a.keys[lead];
  T* grad_key = static_cast<T*>(g.grad_key);
  T* grad_value = static_cast<T*>(g.grad_value);
  T* grad_bias = static_cast<T*>(g.grad_bias);
  for (int64_t begin = g.query_begin; begin < g.query_end; begin += STRIP * QB) {
    const int64_t blocks = smaller<int64_t>(STRIP, (g.query_end - begin + QB - 1) / QB);
    for (int64_t t = 0; t < blocks; ++t) {
      BackwardBlock<T>& x = strip[t];
      x.i0 = begin + t * QB;
      x.nq = smaller<int64_t>(QB, g.query_end - x.i0);
      x.active = active_lanes(x.nq, Sh::C * L);
      load_backward_block<T, S>(a, g, ldq, ldg, x);
    }
    for (int64_t first = g.key_begin; first < g.key_end; first += KB) {
      const int64_t count = smaller<int64_t>(KB, g.key_end - first);
      KeyBlock<T> b{};
      for (int64_t t = 0; t < blocks; ++t) {
        const BackwardBlock<T>& x = strip[t];
        const Kept kept = block_mask<T, QB>(a, lead, x.i0, x.nq, first, count, mask);
        if (kept == Kept::none) continue;
        if (b.count == 0) b = load_keys<T, S>(a, lead, first, count, key_buffer, value_buffer);
        auto scores = [&](auto run) { run(b, x.query, a.d, x.grad, a.dv, x.shift, x.delta, x.grad_lse, x.active, mask, factors, p, ds); };
        if (dropout) {  // one general form serves it: the random numbers cost more than the rest
          dropout_factors<T, QB>(a, lead, x.i0, x.nq, first, count, factors);
          if (kept == Kept::all) fill<typename LaneInt<T>::type>(mask, KB * QB, -1);
          scores(backward_scores<T, false, true, true>);
        } else if (kept == Kept::some) {
          x.bounded ? scores(backward_scores<T, true, true, false>) : scores(backward_scores<T, false, true, false>);
        } else {
          x.bounded ? scores(backward_scores<T, true, false, false>) : scores(backward_scores<T, false, false, false>);
        }
        // Tiles of the outer products overhang the block by up to PAD rows.
        fill<T>(p + count * QB, PAD * QB, T(0));
        fill<T>(ds + count * QB, PAD * QB, T(0));
        outer<T>(p, count, x.grad_rows, ldg, x.nq, keys, first, grad_value, a.dv);
        outer<T>(ds, count, x.query_rows, ldq, x.nq, keys, first, grad_key, a.d);
        mix<T>(b.key, b.ldk, a.d, ds, count, x.active, x.grad_query);
        if (grad_bias) add_row_sums<T>(ds, count, x.active, keys, first, grad_bias);
      }
    }
    for (int64_t t = 0; t < blocks; ++t) {
      const BackwardBlock<T>& x = strip[t];
      T* to = static_cast<T*>(g.grad_query) + (x.i0 - g.query_begin) * a.d;
      for (int64_t i = 0; i < x.nq; ++i) {
        for (int64_t c = 0; c < a.d; ++c) to[i * a.d + c] = x.grad_query[c * QB + i] * T(a.scale);
      }
    }
  }
}

// ---- dispatch by dtype ---------------------------------------------------------------------------------------------------
template <class T> struct Tag { using type = T; };
template <class F> CO_INLINE auto by_dtype(DType t, F f) {
  switch (t) {
    case DType::float64: return f(Tag<double>{}, Tag<double>{});
    case DType::bfloat16: return f(Tag<float>{}, Tag<bfloat16>{});
    case DType::float16: return f(Tag<float>{}, Tag<float16>{});
    default: return f(Tag<float>{}, Tag<float>{});
  }
}

template <class T> size_t scratch_for(const AttentionProblem& a, bool backward) {
  constexpr int64_t QB = Shape<T>::QB, L = lanes<T>;
  int64_t count = 2 * KB * QB + KB * (a.d + a.dv);  // factors, mask, key and value buffers
  count += backward ? 2 * (KB + PAD) * QB + STRIP * QB * (2 * a.d + a.dv + padded(a.d, L) + padded(a.dv, L) + 3)
                    : KB * QB + STRIP * QB * (a.d + 2 * a.dv + 3);
  return size_t(count) * sizeof(T) + (8 + 8 * STRIP) * 64;  // each piece starts on a cache line
}

size_t scratch_bytes(const AttentionProblem& a, bool backward) {
  return a.dtype == DType::float64 ? scratch_for<double>(a, backward) : scratch_for<float>(a, backward);
}

double max_norm(const AttentionProblem& a, int64_t lead, const KeySet& keys) {
  return by_dtype(a.dtype, [&](auto t, auto s) { return max_norm_of<typename decltype(t)::type, typename decltype(s)::type>(a, lead, keys); });
}

void forward_any(const AttentionProblem& a, const AttentionOutput& o, int64_t lead, int64_t block_begin, int64_t block_end, void* scratch) {
  by_dtype(a.dtype, [&](auto t, auto s) {
    forward<typename decltype(t)::type, typename decltype(s)::type>(a, o, lead, block_begin, block_end, scratch);
  });
}

void backward_any(const AttentionProblem& a, const AttentionGradients& g, void* scratch) {
  by_dtype(a.dtype, [&](auto t, auto s) { backward<typename decltype(t)::type, typename decltype(s)::type>(a, g, scratch); });
}

#define CO_STRING_(x) #x
#define CO_STRING(x) CO_STRING_(x)
}  // namespace

extern const ContinuumAttentionKernels continuum_attention = {
    CO_STRING(CO_ISA), Shape<float>::QB, Shape<double>::QB, KB, STRIP, scratch_bytes, max_norm, forward_any, backward_any};

}  // namespace continuum_ops::CO_ISA
