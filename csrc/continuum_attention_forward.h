// The forward pass over a strip of query blocks.
#pragma once

#include "continuum_attention_distance.h"

namespace continuum_ops::CO_ISA {
namespace {

template <class T> struct ForwardState {
  T *shift, *sum, *sum_total;  // (QB)
  T *out, *out_total;          // (dv, QB)
  T* p;                        // (KB, QB)
  int64_t dv;                  // 0 until values are mixed into out
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

// C vectors of queries, from query q of the block.
template <class T, int C, bool BOUNDED, bool MASKED, bool DISTANCE>
CO_INLINE void forward_columns(const KeyBlock<T>& b, const T* query, int64_t d, int64_t q, const typename LaneInt<T>::type* mask,
                               const ForwardState<T>& st, const T* d2, T rate) {
  using Sh = Shape<T>;
  constexpr int R = Sh::R, L = Sh::L, QB = Sh::QB;
  T* const sums = st.sum;  // locals: the compiler cannot know that stores of T leave st alone
  T* const shifts = st.shift;
  T* const probabilities = st.p;
  const Vec<T> tolerance = broadcast(st.tolerance);
  for (int64_t j = 0; j < b.count; j += R) {
    Vec<T> acc[R][C];
    score_tile<T, R, C, QB, DISTANCE>(acc, b, j, query + q, d, d2 + q, rate);
    const int64_t live = b.count - j;
    if constexpr (MASKED) {
      for (int r = 0; r < R; ++r) {  // with the rows past the block: they repeat its last one, mask and all
        const auto* row = mask + smaller<int64_t>(j + r, b.count - 1) * QB + q;
        for (int c = 0; c < C; ++c) {
          const auto keep = *reinterpret_cast<const MaskVec<T>*>(row + c * L);
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

template <class T, bool BOUNDED, bool MASKED, bool DISTANCE>
void forward_scores(const KeyBlock<T>& b, const T* query, int64_t d, int64_t active, const typename LaneInt<T>::type* mask,
                    const ForwardState<T>& st, const T* d2, T rate) {
  constexpr int C = Shape<T>::C, L = Shape<T>::L;
  int64_t q = 0;
  for (; q + C * L <= active; q += C * L) forward_columns<T, C, BOUNDED, MASKED, DISTANCE>(b, query, d, q, mask, st, d2, rate);
  for (; q < active; q += L) forward_columns<T, 1, BOUNDED, MASKED, DISTANCE>(b, query, d, q, mask, st, d2, rate);
}

// Rows of QB numbers, of which the first `active` are used: n numbers, one after the other where all are.
template <int QB, class F> CO_INLINE void for_used(int64_t rows, int64_t active, F f) {
  if (active == QB) return f(0, rows * QB);
  for (int64_t r = 0; r < rows; ++r) f(r * QB, active);
}

template <class T> CO_INLINE void add_into(T* total, T* part, int64_t n) {
  for (int64_t i = 0; i < n; i += lanes<T>) {
    store(total + i, load(total + i) + load(part + i));
    store(part + i, Vec<T>{});
  }
}

// One block of queries and what is being summed for it.
template <class T> struct ForwardBlock {
  int64_t i0, nq, active;
  bool bounded;
  T* query;
  QueryPlaces<T> places;
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
  const bool distance = a.distance.given;
  T* d2 = distance ? arena.take<T>(KB * QB) : p;  // without distances it is not read
  T* position_buffer = distance ? arena.take<T>(KB * a.distance.dims) : nullptr;
  const T rate = rate_of<T>(a.distance, lead) * T(1.4426950408889634074);

  const KeySet& keys = a.keys[lead];
  ForwardBlock<T> strip[STRIP];
  const int64_t blocks = block_end - block_begin;
  for (int64_t t = 0; t < blocks; ++t) {
    ForwardBlock<T>& x = strip[t];
    x.i0 = (block_begin + t) * QB;
    x.nq = smaller<int64_t>(QB, a.n - x.i0);
    x.active = round_up(x.nq, Sh::L);
    x.query = arena.take<T>(a.d * QB);
    x.st = {arena.take<T>(QB), arena.take<T>(QB), arena.take<T>(QB), arena.take<T>(a.dv * QB), arena.take<T>(a.dv * QB), p, 0,
            T(keys.count <= FEW_KEYS ? 0 : TOLERANCE)};
    transpose_rows<T, S, QB>(lead_base<S>(a.query, lead) + x.i0 * a.query.row_stride, a.query, x.nq, a.d,
                             T(a.scale * 1.4426950408889634074), x.query);
    x.places = take_places<T>(a.distance, arena);
    load_places<T>(a.distance, lead, x.i0, x.nq, x.places);
    x.bounded = is_bounded<T, QB>(a, x.query, x.nq, keys);
    fill<T>(x.st.shift, QB, x.bounded ? T(0) : NO_SHIFT);
    fill<T>(x.st.sum, QB, T(0));
    fill<T>(x.st.sum_total, QB, T(0));
    for_used<QB>(a.dv, x.active, [&](int64_t i, int64_t n) { fill<T>(x.st.out + i, n, T(0)), fill<T>(x.st.out_total + i, n, T(0)); });
  }
  auto join_totals = [&] {
    for (int64_t t = 0; t < blocks; ++t) {
      add_into<T>(strip[t].st.sum_total, strip[t].st.sum, QB);
      for_used<QB>(a.dv, strip[t].active,
                   [&](int64_t i, int64_t n) { add_into<T>(strip[t].st.out_total + i, strip[t].st.out + i, n); });
    }
  };

  for (int64_t first = 0, run = 1; first < keys.count; first += KB, ++run) {
    const int64_t count = smaller<int64_t>(KB, keys.count - first);
    KeyBlock<T> b{};
    for (int64_t t = 0; t < blocks; ++t) {
      ForwardBlock<T>& x = strip[t];
      Kept kept = block_mask<T, QB>(a, lead, x.i0, x.nq, first, count, mask);
      if (kept == Kept::none) continue;
      if (b.count == 0) b = load_keys<T, S>(a, lead, first, count, key_buffer, value_buffer, position_buffer);
      if (distance) {
        kept = distance_tile<T>(a.distance, x.places, b.position, b.ldp, count, kept, mask, d2);
        if (kept == Kept::none) continue;
      }
      auto scores = [&](auto run) { run(b, x.query, a.d, x.active, mask, x.st, d2, rate); };
      if (a.distance.rate) {
        kept == Kept::all ? scores(forward_scores<T, false, false, true>) : scores(forward_scores<T, false, true, true>);
      } else if (kept == Kept::all) {
        x.bounded ? scores(forward_scores<T, true, false, false>) : scores(forward_scores<T, false, false, false>);
      } else {
        x.bounded ? scores(forward_scores<T, true, true, false>) : scores(forward_scores<T, false, true, false>);
      }
      if (a.dropout_p > 0) {
        dropout_factors<T, QB>(a, lead, x.i0, x.nq, first, count, factors);
        for (int64_t j = 0; j < count; ++j) {
          for (int64_t i = 0; i < x.nq; ++i) p[j * QB + i] *= factors[j * QB + i];
        }
      }
      mix<T>(b.value, b.ldv, a.dv, p, count, x.active, x.st.out);
      x.st.dv = a.dv;
    }
    if (run % RUN == 0) join_totals();
  }
  join_totals();

  for (int64_t t = 0; t < blocks; ++t) {
    const ForwardBlock<T>& x = strip[t];
    const int64_t row0 = lead * a.n + x.i0;
    S* out = static_cast<S*>(o.out) + row0 * a.dv;
    T* lse = o.lse ? static_cast<T*>(o.lse) + row0 : nullptr;
    T* stats = o.stats ? static_cast<T*>(o.stats) + 2 * row0 : nullptr;
    for (int64_t c = 0; c < a.dv; ++c) {  // where the sum is 0 the quotient is not used
      T* column = x.st.out_total + c * QB;
      for (int64_t i = 0; i < x.active; i += lanes<T>) store(column + i, load(column + i) / load(x.st.sum_total + i));
    }
    for (int64_t i = 0; i < x.nq; ++i) {
      // No score above -inf (and none NaN): nothing to attend to.
      const bool nothing = x.st.shift[i] == NO_SHIFT && x.st.sum_total[i] == x.st.sum_total[i];
      const T sum = nothing ? T(0) : x.st.sum_total[i];
      const bool empty = sum == T(0);
      const T shift = empty ? T(0) : x.st.shift[i];
      if (stats) stats[2 * i] = shift, stats[2 * i + 1] = sum;
      if (lse) {
        lse[i] = empty ? T(-__builtin_inf())
                       : T((double(shift) + keys.log2_max_weight + __builtin_log2(double(sum))) * 0.69314718055994530942);
      }
      for (int64_t c = 0; c < a.dv; ++c) {
        narrow(empty ? T(0) : x.st.out_total[c * QB + i], out + i * a.dv + c);
      }
    }
  }
}

}  // namespace
}  // namespace continuum_ops::CO_ISA
