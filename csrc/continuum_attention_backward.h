// The backward pass over a range of queries and a range of keys.
//
// With p = w 2^(s - m) / sum the probability, g the gradient of out and D_i = g_i . out_i:
//   dS = p (g . v - D + grad_lse),  dV = p^T g,  dQ = scale dS K,  dK = scale dS^T Q,  d/dlog w = sum_i dS
// The division by `sum` is folded into the rows of g, D and grad_lse, so that each exponential is used as it comes.
#pragma once

#include "continuum_attention_distance.h"

namespace continuum_ops::CO_ISA {
namespace {

// C vectors of queries, from query q of the block.
template <class T, int C, bool BOUNDED, bool MASKED, bool DROPOUT, bool DISTANCE>
CO_INLINE void backward_columns(const KeyBlock<T>& b, const T* query, int64_t d, const T* grad, int64_t dv, const T* shift, const T* delta,
                                const T* grad_lse, int64_t q, const typename LaneInt<T>::type* mask, const T* factors, const T* d2, T rate,
                                T* p_out, T* ds_out) {
  using Sh = Shape<T>;
  constexpr int R = Sh::R, L = Sh::L, QB = Sh::QB;
  for (int64_t j = 0; j < b.count; j += R) {
    const int64_t live = b.count - j;
    Vec<T> acc[R][C];
    score_tile<T, R, C, QB, DISTANCE>(acc, b, j, query + q, d, d2 + q, rate);
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
    product_tile<T, R, C, QB>(acc, b.value, b.ldv, j, b.count, grad + q, dv);
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

template <class T, bool BOUNDED, bool MASKED, bool DROPOUT, bool DISTANCE>
void backward_scores(const KeyBlock<T>& b, const T* query, int64_t d, const T* grad, int64_t dv, const T* shift, const T* delta,
                     const T* grad_lse, int64_t active, const typename LaneInt<T>::type* mask, const T* factors, const T* d2, T rate,
                     T* p_out, T* ds_out) {
  constexpr int C = Shape<T>::C, L = Shape<T>::L;
  int64_t q = 0;
  for (; q + C * L <= active; q += C * L) {
    backward_columns<T, C, BOUNDED, MASKED, DROPOUT, DISTANCE>(b, query, d, grad, dv, shift, delta, grad_lse, q, mask, factors, d2, rate, p_out, ds_out);
  }
  for (; q < active; q += L) {
    backward_columns<T, 1, BOUNDED, MASKED, DROPOUT, DISTANCE>(b, query, d, grad, dv, shift, delta, grad_lse, q, mask, factors, d2, rate, p_out, ds_out);
  }
}

// to[key j + r, channel c0..] += sum_i p[j + r, i] x[i, c0..]: R keys x C vectors of channels
template <class T, int R, int C>
CO_INLINE void outer_tile(const T* p, int64_t j, int64_t live, const T* x, ptrdiff_t ldx, int64_t nq, const KeySet& keys, int64_t first,
                          T* to, int64_t width, int64_t c0) {
  constexpr int QB = Shape<T>::QB, L = lanes<T>;
  Vec<T> acc[R][C] = {};
  multiply_spaced_rows<T, R, C, QB>(acc, p + j * QB, x + c0, ldx, nq);
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
#elif defined(CO_ISA_avx512)
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

template <class T> struct BackwardBlock {
  int64_t i0, nq, active;
  bool bounded, one_block;    // one_block: all keys of these queries are in the first block
  T *query, *grad;            // scale log2(e) q and g / sum, lanes are queries
  T *query_rows, *grad_rows;  // scale q and g / sum, lanes are channels
  T *shift, *delta, *grad_lse, *grad_query;
  QueryPlaces<T> places;
  T* grad_places;  // (dims, QB), without the factor 2 rate; null if not wanted
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
  x.bounded = is_bounded<T, QB>(a, x.query, x.nq, a.keys[g.lead]);
  load_places<T>(a.distance, g.lead, x.i0, x.nq, x.places);
  if (x.grad_places) fill<T>(x.grad_places, a.distance.dims * QB, T(0));
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
    x.bounded &= x.shift[i] == T(0);  // the forward pass may have cut its blocks elsewhere and shifted this row
    T dot = 0, piece = 0;
    for (int64_t c = 0; c < a.dv; ++c) {
      const T y = widen(grad[i * g.grad_out.row_stride + c * g.grad_out.column_stride]);
      piece = fma(y, T(widen(out[i * a.dv + c])), piece);
      if (c + 1 == a.dv || (a.dv > SHORT_SUM && (c + 1) % PIECE == 0)) {  // in the pieces of product_tile: what cancels against g . v was rounded alike
        dot += piece;
        piece = 0;
      }
      x.grad_rows[i * ldg + c] = x.grad[c * QB + i] = y / sum;
    }
    x.delta[i] = dot / sum;
    if (grad_lse) x.grad_lse[i] = grad_lse[i] / sum;
  }
}

// D from the probabilities at hand, sum_k p_k (g . v_k), where one block holds all keys of these queries. g . out has the rounding
// of out besides, which is all that is left of the gradient of a row of few keys.
template <class T>
void sum_delta(const AttentionProblem& a, const AttentionGradients& g, const BackwardBlock<T>& x, const T* p_times_product, int64_t count) {
  const T* stats = static_cast<const T*>(g.stats) + 2 * (g.lead * a.n + x.i0);
  for (int64_t i = 0; i < x.nq; ++i) {
    T sum = 0;
    for (int64_t j = 0; j < count; ++j) sum += p_times_product[j * Shape<T>::QB + i];
    x.delta[i] = stats[2 * i + 1] == T(0) ? T(0) : sum / stats[2 * i + 1];
  }
}

template <class T> void add_row_sums(const T* ds, int64_t count, int64_t active, const KeySet& keys, int64_t first, T* to) {
  constexpr int QB = Shape<T>::QB, L = lanes<T>;
  for (int64_t j = 0; j < count; ++j) {
    Vec<T> s = load(ds + j * QB);
    for (int64_t i = L; i < active; i += L) s += load(ds + j * QB + i);
    to[key_place(keys, first + j)] += sum_of_lanes<T>(s);
  }
}

template <class T, class S> void backward(const AttentionProblem& a, const AttentionGradients& g, void* scratch) {
  using Sh = Shape<T>;
  constexpr int QB = Sh::QB, L = Sh::L;
  const int64_t ldq = round_up(a.d, L), ldg = round_up(a.dv, L), lead = g.lead;
  const bool dropout = a.dropout_p > 0;
  Arena arena{static_cast<char*>(scratch)};
  T* key_buffer = arena.take<T>(KB * a.d);
  T* value_buffer = arena.take<T>(KB * a.dv);
  T* factors = arena.take<T>(KB * QB);
  auto* mask = arena.take<typename LaneInt<T>::type>(KB * QB);
  T* p = arena.take<T>((KB + PAD) * QB);
  T* ds = arena.take<T>((KB + PAD) * QB);
  const DistanceTerm& term = a.distance;
  T* d2 = term.given ? arena.take<T>(KB * QB) : p;  // without distances it is not read
  T* position_buffer = term.given ? arena.take<T>(KB * term.dims) : nullptr;
  const T rate = rate_of<T>(term, lead), rate2 = rate * T(1.4426950408889634074);
  T* zeros = arena.take<T>(QB);
  fill<T>(zeros, QB, T(0));
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
    x.places = take_places<T>(term, arena);
    x.grad_places = g.grad_query_pos ? arena.take<T>(term.dims * QB) : nullptr;
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
      x.active = round_up(x.nq, L);
      x.one_block = g.key_begin == 0 && g.key_end == keys.count &&
                    (keys.count <= KB || (a.is_causal && key_place(keys, KB) > x.i0 + x.nq - 1));
      load_backward_block<T, S>(a, g, ldq, ldg, x);
    }
    for (int64_t first = g.key_begin; first < g.key_end; first += KB) {
      const int64_t count = smaller<int64_t>(KB, g.key_end - first);
      KeyBlock<T> b{};
      for (int64_t t = 0; t < blocks; ++t) {
        const BackwardBlock<T>& x = strip[t];
        Kept kept = block_mask<T, QB>(a, lead, x.i0, x.nq, first, count, mask);
        if (kept == Kept::none) continue;
        if (b.count == 0) b = load_keys<T, S>(a, lead, first, count, key_buffer, value_buffer, position_buffer);
        if (term.given) {
          kept = distance_tile<T>(term, x.places, b.position, b.ldp, count, kept, mask, d2);
          if (kept == Kept::none) continue;
        }
        auto scores = [&](auto run) {
          if (x.one_block) {
            run(b, x.query, a.d, x.grad, a.dv, x.shift, zeros, zeros, x.active, mask, factors, d2, rate2, p, ds);
            sum_delta<T>(a, g, x, ds, count);
          }
          run(b, x.query, a.d, x.grad, a.dv, x.shift, x.delta, x.grad_lse, x.active, mask, factors, d2, rate2, p, ds);
        };
        if (dropout) {  // one general form serves it: the random numbers cost more than the rest
          dropout_factors<T, QB>(a, lead, x.i0, x.nq, first, count, factors);
          if (kept == Kept::all) fill<typename LaneInt<T>::type>(mask, KB * QB, -1);
          term.rate ? scores(backward_scores<T, false, true, true, true>) : scores(backward_scores<T, false, true, true, false>);
        } else if (term.rate) {
          kept == Kept::some ? scores(backward_scores<T, false, true, false, true>) : scores(backward_scores<T, false, false, false, true>);
        } else if (kept == Kept::some) {
          x.bounded ? scores(backward_scores<T, true, true, false, false>) : scores(backward_scores<T, false, true, false, false>);
        } else {
          x.bounded ? scores(backward_scores<T, true, false, false, false>) : scores(backward_scores<T, false, false, false, false>);
        }
        // Tiles of the outer products overhang the block by up to PAD rows.
        fill<T>(p + count * QB, PAD * QB, T(0));
        fill<T>(ds + count * QB, PAD * QB, T(0));
        outer<T>(p, count, x.grad_rows, ldg, x.nq, keys, first, grad_value, a.dv);
        outer<T>(ds, count, x.query_rows, ldq, x.nq, keys, first, grad_key, a.d);
        mix<T>(b.key, b.ldk, a.d, ds, count, x.active, x.grad_query);
        if (grad_bias) add_row_sums<T>(ds, count, x.active, keys, first, grad_bias);
        if (x.grad_places) {
          position_gradients<T>(term, ds, count, x.active, x.places, b.position, b.ldp, rate, keys, first, x.grad_places,
                                static_cast<T*>(g.grad_key_pos));
        }
        if (g.grad_rate) *g.grad_rate -= rate_gradient<T>(ds, d2, count, x.active);
      }
    }
    for (int64_t t = 0; t < blocks; ++t) {
      const BackwardBlock<T>& x = strip[t];
      T* to = static_cast<T*>(g.grad_query) + (x.i0 - g.query_begin) * a.d;
      for (int64_t i = 0; i < x.nq; ++i) {
        for (int64_t c = 0; c < a.d; ++c) to[i * a.d + c] = x.grad_query[c * QB + i] * T(a.scale);
      }
      if (!x.grad_places) continue;
      T* to_pos = static_cast<T*>(g.grad_query_pos) + (x.i0 - g.query_begin) * term.dims;
      for (int64_t i = 0; i < x.nq; ++i) {
        for (int64_t c = 0; c < term.dims; ++c) to_pos[i * term.dims + c] = x.grad_places[c * QB + i] * 2 * rate;
      }
    }
  }
}

}  // namespace
}  // namespace continuum_ops::CO_ISA
