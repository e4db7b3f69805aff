// The backward pass over a range of lane blocks of keys and a range of tiles of queries.
//
// With p the probability, g the gradient of out (all columns of a row), D_i = g_i . out_i and t = -rate d^2 the score:
//   dt_ik = p_ik (g_i . v_k - D_i + grad_lse_i),  dv_k = sum_i p_ik g_i,  d/dlog w_k = sum_i dt_ik,  d/drate = -sum dt_ik d2_ik,
//   dx_i = sum_k -2 rate dt_ik (x_i - y_k),  dy_k = -(the same terms, summed over i)
#pragma once

#include "position_attention_tiles.h"

namespace continuum_ops::CO_ISA {
namespace {

constexpr int64_t DEPTH = 256;  // columns of values that meet the gradient's while they are in the first cache

// to[j, i] (+)= sum_c g[j, c] v[c, i] for `count` rows j and `keys` lanes i, over `panels` panels of WIDTH columns each
template <class T, int WIDTH>
void product_panels(const T* g, int64_t rows, int64_t panels, const T* v, int64_t columns, int64_t valid, int64_t count, int64_t keys,
                    bool add, T* to) {
  constexpr int G = Tiles<T>::G, L = lanes<T>;
  constexpr int64_t KEYS = Tiles<T>::KEYS;
  for (int64_t i = 0; i < keys; i += KEYS, v += columns * KEYS) {
    for (int64_t j = 0; j < count; j += G) {
      Vec<T> acc[G][V] = {};
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t depth = smaller<int64_t>(WIDTH, valid - panel * WIDTH);
        multiply_spaced_rows<T, G, V, WIDTH>(acc, g + panel * WIDTH * rows + j * WIDTH, v + panel * WIDTH * KEYS, KEYS, depth);
      }
      CO_UNROLL
      for (int r = 0; r < G; ++r) {
        CO_UNROLL
        for (int c = 0; c < V; ++c) {
          T* t = to + (j + r) * LB + i + c * L;
          store(t, add ? load(t) + acc[r][c] : acc[r][c]);
        }
      }
    }
  }
}

// to[j, i] = g_j . v_i for rows first.. of the panels of g
template <class T>
void product(const PositionProblem& a, const T* g, int64_t rows, int64_t first, int64_t count, const T* v, int64_t keys, T* to) {
  constexpr int64_t PANEL = Tiles<T>::PANEL, STEP = DEPTH / PANEL, KEYS = Tiles<T>::KEYS;
  constexpr int L = lanes<T>;
  const int64_t columns = a.columns(), whole = padded_columns_of<T>(a) / PANEL;
  if (columns == 0) fill<T>(to, DT * LB, T(0));
  for (int64_t panel = 0; panel < whole; panel += STEP) {
    const T* from = g + panel * PANEL * rows + first * PANEL;
    product_panels<T, PANEL>(from, rows, smaller(STEP, whole - panel), v + panel * PANEL * KEYS, columns, columns - panel * PANEL, count,
                             keys, panel > 0, to);
  }
  const int64_t done = whole * PANEL, left = columns - done;
  if (left <= 0) return;
  auto rest = [&](auto run, int64_t width) {
    run(g + done * rows + first * width, rows, 1, v + done * KEYS, columns, left, count, keys, whole > 0, to);
  };
  switch ((left + L - 1) / L) {
    case 1: rest(product_panels<T, L>, L); break;
    case 2: rest(product_panels<T, 2 * L>, 2 * L); break;
    default: rest(product_panels<T, 3 * L>, 3 * L);
  }
}

template <class T> struct QueryRow {  // arrays over the queries of a tile
  const T *nearest, *shift, *inverse_sum, *delta, *reach;
};

// p and, with SCORES, dt as ds; adds to sums over the tile: of dt d2 (returned), of dt per key (bias_sum), rate dt per pair (moment).
template <class T, bool REACH, bool SCORES>
double score_gradients(const T* d2, const T* dot, int64_t count, int64_t active, T rate, const QueryRow<T>& q, const T* bias, bool first,
                       T* p, T* bias_sum, T* moment) {
  constexpr int L = lanes<T>;
  const Vec<T> f = broadcast(T(-rate * LOG2E)), scale = broadcast(rate);
  double total = 0;
  for (int64_t i = 0; i < active; i += V * L) {
    Vec<T> log_w[V], of_bias[V], of_rate[V];
    CO_UNROLL
    for (int v = 0; v < V; ++v) log_w[v] = load(bias + i + v * L), of_bias[v] = Vec<T>{}, of_rate[v] = Vec<T>{};
    for (int64_t j = 0; j < count; ++j) {
      const Vec<T> near = broadcast(q.nearest[j]), less = broadcast(q.shift[j]), inverse = broadcast(q.inverse_sum[j]);
      const Vec<T> row = broadcast(q.delta[j]), end = REACH ? broadcast(q.reach[j]) : Vec<T>{};
      CO_UNROLL
      for (int v = 0; v < V; ++v) {
        const int64_t at = j * LB + i + v * L;
        const Vec<T> x = load(d2 + at);
        Vec<T> e = exp2<true>(fma(x - near, f, log_w[v]) - less) * inverse;
        if constexpr (REACH) e = x > end ? Vec<T>{} : e;
        store(p + at, e);
        if constexpr (SCORES) {
          const Vec<T> ds = e * (load(dot + at) - row);
          of_bias[v] += ds;
          of_rate[v] = fma(ds, x, of_rate[v]);
          const Vec<T> m = ds * scale;
          store(moment + at, first ? m : load(moment + at) + m);
        }
      }
    }
    if constexpr (SCORES) {
      CO_UNROLL
      for (int v = 0; v < V; ++v) {
        store(bias_sum + i + v * L, load(bias_sum + i + v * L) + of_bias[v]);
        for (int l = 0; l < L; ++l) total += double(of_rate[v][l]);
      }
    }
  }
  return total;
}

// key[t][i] += sum_j -2 m (y_i - x_j),  query[t * DT + j] += sum_i 2 m (y_i - x_j)
template <class T, bool PERIODIC, bool SPLIT>
void position_gradients(const PositionProblem& a, Coordinates<T> y, Coordinates<T> x, const T* moment, int64_t count, int64_t active,
                        T* key, T* query) {
  constexpr int L = lanes<T>;
  for (int64_t t = 0; t < a.d; ++t) {
    const Axis<T> axis = axis_of<T>(a, t);
    Vec<T> row[DT];
    for (int64_t j = 0; j < count; ++j) row[j] = Vec<T>{};
    for (int64_t i = 0; i < active; i += L) {
      const Vec<T> yh = load_unaligned(y.high + t * y.stride + i), yl = SPLIT ? load_unaligned(y.low + t * y.stride + i) : Vec<T>{};
      Vec<T> sum{};
      for (int64_t j = 0; j < count; ++j) {
        const Vec<T> xh = broadcast(x.high[t * x.stride + j]), xl = SPLIT ? broadcast(x.low[t * x.stride + j]) : Vec<T>{};
        const Vec<T> z = difference<T, PERIODIC, SPLIT>(yh, yl, xh, xl, axis), m = load(moment + j * LB + i) * z;
        sum += m;
        row[j] += m;
      }
      store(key + t * LB + i, fma(sum, broadcast(T(-2)), load(key + t * LB + i)));
    }
    for (int64_t j = 0; j < count; ++j) {
      T sum = 0;
      CO_UNROLL
      for (int l = 0; l < L; ++l) sum += row[j][l];
      query[t * DT + j] = 2 * sum;
    }
  }
}

template <class T> struct BackwardScratch {
  uintptr_t end;
  T *d2, *p, *dot, *moment, *bias, *bias_sum, *key, *query, *row, *value;
  BackwardScratch(void* scratch, const PositionProblem& a) {
    Arena arena{reinterpret_cast<uintptr_t>(scratch)};
    d2 = arena.take<T>(DT * LB), p = arena.take<T>(DT * LB), dot = arena.take<T>(DT * LB), moment = arena.take<T>(DT * LB);
    bias = arena.take<T>(LB), bias_sum = arena.take<T>(LB), key = arena.take<T>(a.d * LB), query = arena.take<T>(a.d * DT);
    const int64_t padded = padded_columns_of<T>(a);
    row = arena.take<T>(padded), value = arena.take<T>(a.value_heads * padded * LB);
    end = arena.at;
  }
};

// Is the share of this pair of a block and a tile in every gradient of this head too small to matter? Measured against the nearest keys
// that are not at the place of their query: the others do not count in the gradients of rate and positions.
template <class T> bool negligible(const PositionProblem& a, const PositionGroup& g, int64_t head, double box, int64_t tile) {
  const double margin = Tiles<T>::BITS + __builtin_log2(double(g.key.count) + 1) - g.min_bias;
  const double beyond = a.rate[head] * LOG2E * (box - g.tile_far[tile]);
  return beyond > margin && beyond > margin + __builtin_log2(box / g.tile_near[tile]);
}

template <class T> void add_block(const T* from, int64_t stride, int64_t count, int64_t width, const int64_t* place, T* to) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t t = 0; t < width; ++t) to[place[i] * width + t] = from[t * stride + i];
  }
}

template <class T> void backward(const PositionProblem& a, const PositionGroup& g, const PositionGradients& out, void* scratch) {
  const BackwardScratch<T> s(scratch, a);
  const int64_t padded = padded_columns_of<T>(a), panels = panels_of<T>(a), columns = a.columns(), queries = g.query.count;
  const DistanceTile<T> distance = distance_of<T>(a);
  const T* gradient = static_cast<const T*>(g.grad_out);
  const T* reach = static_cast<const T*>(g.reach);
  for (int64_t block = out.block_begin; block < out.block_end; ++block) {
    const Lanes<T> k = lane_block<T>(a, g.key, block);
    for (int64_t i = 0; i < LB; ++i) {  // lanes past the block: keys that do not exist
      s.bias[i] = i >= k.count ? T(-__builtin_inf()) : g.bias ? static_cast<const T*>(g.bias)[k.first + i] : T(0);
    }
    fill<T>(s.bias_sum, LB, T(0));
    fill<T>(s.key, a.d * LB, T(0));
    if (out.value) fill<T>(s.value, a.value_heads * padded * LB, T(0));
    const T* transposed = static_cast<const T*>(g.value_transposed) + block * a.value_heads * columns * LB;
    for (int64_t tile = out.tile_begin; tile < out.tile_end; ++tile) {
      const double box = box_distance<T>(a, g.key.block_box + block * 2 * a.d, g.query.tile_box + tile * 2 * a.d);
      if (g.tile_reach && box > g.tile_reach[tile]) continue;
      const bool special = g.special_block[block] || g.special_tile[tile];
      const int64_t first = tile * DT, count = smaller<int64_t>(DT, queries - first);
      const Coordinates<T> x = coordinates<T>(a, g.query, first);
      bool measured = false;
      for (int64_t h = 0; h < a.heads; ++h) {
        if ((g.skip && g.skip[h]) || (!special && negligible<T>(a, g, h, box, tile))) continue;
        if (!measured) distance(a, k.x, x, count, k.active, s.d2);
        const int64_t at = h * g.query.padded + first, value_head = a.value_heads > 1 ? h : 0;
        const QueryRow<T> q{static_cast<const T*>(g.nearest) + first,   static_cast<const T*>(g.shift) + at,
                            static_cast<const T*>(g.inverse_sum) + at, static_cast<const T*>(g.delta) + at,
                            reach ? reach + first : nullptr};
        const T* g_out = gradient + h * queries * padded;
        if (out.scores) product<T>(a, g_out, queries, first, count, transposed + value_head * columns * LB, k.active, s.dot);
        const auto run = reach ? (out.scores ? score_gradients<T, true, true> : score_gradients<T, true, false>)
                               : (out.scores ? score_gradients<T, false, true> : score_gradients<T, false, false>);
        const double of_rate = run(s.d2, s.dot, count, k.active, T(a.rate[h]), q, s.bias, !measured, s.p, s.bias_sum, s.moment);
        if (out.scores) out.grad_rate[h] -= of_rate;
        if (out.value) mix<T>(a, s.p, g_out, queries, first, count, k.count, 0, panels, s.value + value_head * padded * LB);
        measured = true;
      }
      if (!measured || !out.scores) continue;
      auto positions = [&](auto run) { run(a, k.x, x, s.moment, count, k.active, s.key, s.query); };
      if (a.split) a.period ? positions(position_gradients<T, true, true>) : positions(position_gradients<T, false, true>);
      else a.period ? positions(position_gradients<T, true, false>) : positions(position_gradients<T, false, false>);
      T* to = static_cast<T*>(out.grad_query_pos) + first * a.d;
      for (int64_t j = 0; j < count; ++j) {
        for (int64_t t = 0; t < a.d; ++t) to[j * a.d + t] += s.query[t * DT + j];
      }
    }
    const int64_t* place = g.key.place + k.first;
    if (out.scores) {
      add_block(s.key, LB, k.count, a.d, place, static_cast<T*>(out.grad_key_pos));
      add_block(s.bias_sum, LB, k.count, int64_t(1), place, static_cast<T*>(out.grad_bias));
    }
    if (!out.value) continue;
    for (int64_t h = 0; h < a.value_heads; ++h) {
      for (int64_t i = 0; i < k.count; ++i) {
        for (int64_t panel = 0; panel < panels; ++panel) {
          const int64_t c = panel * Tiles<T>::PANEL, width = panel_width<T>(a, panel);
          const T* from = s.value + (h * padded + c) * LB + i * width;
          for (int64_t v = 0; v < width; ++v) s.row[c + v] = from[v];
        }
        for (int64_t e = 0; e < a.entries; ++e) {
          T* to = static_cast<T*>(out.grad_value) + ((e * a.value_heads + h) * a.m + place[i]) * a.c;
          for (int64_t c = 0; c < a.c; ++c) to[c] = s.row[e * a.c + c];
        }
      }
    }
  }
}

}  // namespace
}  // namespace continuum_ops::CO_ISA
