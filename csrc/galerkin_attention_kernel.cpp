// Galerkin attention of small problems on one core for one instruction set: compiled once per CO_ISA_*. The products of one lead fit
// the cache; what they read by rows is packed into rows of whole vectors, with the rows of dead keys cleared.
#include "galerkin_attention.h"

#include "simd.h"

namespace continuum_ops::CO_ISA {
namespace {

template <class T> int64_t padded(int64_t columns) { return (columns + lanes<T> - 1) / lanes<T> * lanes<T>; }

template <class T> struct Pieces {
  T* next;
  T* take(int64_t rows, int64_t padded_columns) {
    T* piece = next;
    next += rows * padded_columns;
    return piece;
  }
};

template <class T, int R, int C>
CO_INLINE void tile(int64_t depth, int64_t width, const T* const (&a)[R], int64_t a_step, const T* b, T* const (&c)[R]) {
  Vec<T> sum[R][C] = {};
  for (int64_t l = 0; l < depth; ++l) {
    CO_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec<T> x = broadcast(a[r][l * a_step]);
      CO_UNROLL
      for (int j = 0; j < C; ++j) sum[r][j] = fma(x, load(b + l * width + j * lanes<T>), sum[r][j]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < C; ++j) store(c[r] + j * lanes<T>, sum[r][j]);
  }
}

// c (rows, width) = a (rows, depth) b (depth, width); b and c packed, a strided.
template <class T>
void product(int64_t rows, int64_t depth, int64_t width, const T* a, int64_t a_row, int64_t a_step, const T* b, T* c) {
  constexpr int R = 4, L = lanes<T>;
  for (int64_t i = 0; i < rows; i += R) {
    const T* from[R];
    for (int r = 0; r < R; ++r) from[r] = a + (i + r < rows ? i + r : rows - 1) * a_row;  // rows past the end repeat the last one
    for (int64_t j = 0; j < width;) {
      T* to[R];
      for (int r = 0; r < R; ++r) to[r] = c + (i + r < rows ? i + r : rows - 1) * width + j;
      if (width - j >= 2 * L) {
        tile<T, R, 2>(depth, width, from, a_step, b + j, to);
        j += 2 * L;
      } else {
        tile<T, R, 1>(depth, width, from, a_step, b + j, to);
        j += L;
      }
    }
  }
}

// The weight of key k; 0: the key does not exist, whatever is in its rows.
template <class T> T weight(const GalerkinProblem& p, const GalerkinLead& x, int64_t k) {
  return x.weights ? static_cast<const T*>(x.weights)[k * x.weights_stride] : T(1) / T(p.m);
}

// to (rows, padded columns) = factor(row) * from, rows of factor 0 cleared whatever they hold.
template <class T, class F> void pack(const GalerkinMatrix& from, int64_t rows, int64_t columns, T* to, F factor) {
  const int64_t width = padded<T>(columns);
  for (int64_t i = 0; i < rows; ++i, to += width) {
    const T f = factor(i);
    const T* row = static_cast<const T*>(from.data) + i * from.row_stride;
    if (f == T(0)) {
      for (int64_t j = 0; j < width; ++j) to[j] = T(0);
      continue;
    }
    if (from.column_stride == 1) {
      for (int64_t j = 0; j < columns; ++j) to[j] = row[j] * f;
    } else {
      for (int64_t j = 0; j < columns; ++j) to[j] = row[j * from.column_stride] * f;
    }
    for (int64_t j = columns; j < width; ++j) to[j] = T(0);
  }
}

template <class T, class F> void unpack(const T* from, int64_t rows, int64_t columns, void* destination, F factor) {
  const int64_t width = padded<T>(columns);
  T* to = static_cast<T*>(destination);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) to[i * columns + j] = from[i * width + j] * factor(i);
  }
}

template <class T> size_t scratch_of(const GalerkinProblem& p) {
  const int64_t dk = padded<T>(p.d), dv = padded<T>(p.dv);
  return size_t((p.m * 3 + p.n * 2 + p.dv * 2) * dk + (p.m * 2 + p.n * 2 + p.d) * dv) * sizeof(T);
}

template <class T> void forward(const GalerkinProblem& p, const GalerkinLead& x, void* scratch) {
  const int64_t dk = padded<T>(p.d), dv = padded<T>(p.dv);
  Pieces<T> pieces{static_cast<T*>(scratch)};
  T *key = pieces.take(p.m, dk), *value = pieces.take(p.m, dv), *gram = pieces.take(p.d, dv), *out = pieces.take(p.n, dv);
  auto w = [&](int64_t k) { return weight<T>(p, x, k); };
  auto one = [](int64_t) { return T(1); };
  pack(x.key, p.m, p.d, key, [&](int64_t k) { return T(w(k) != T(0)); });
  pack(x.value, p.m, p.dv, value, w);
  product(p.d, p.m, dv, key, 1, dk, value, gram);
  product(p.n, p.d, dv, static_cast<const T*>(x.query.data), x.query.row_stride, x.query.column_stride, gram, out);
  unpack(out, p.n, p.dv, x.out, one);
}

template <class T> void backward(const GalerkinProblem& p, const GalerkinLead& x, void* scratch) {
  const int64_t dk = padded<T>(p.d), dv = padded<T>(p.dv);
  Pieces<T> pieces{static_cast<T*>(scratch)};
  T *key = pieces.take(p.m, dk), *weighted = pieces.take(p.m, dk), *value = pieces.take(p.m, dv);
  T *query = pieces.take(p.n, dk), *grad = pieces.take(p.n, dv);
  T *gram = pieces.take(p.dv, dk), *grad_gram = pieces.take(p.dv, dk), *grad_gram_transposed = pieces.take(p.d, dv);
  T *to_query = pieces.take(p.n, dk), *to_key = pieces.take(p.m, dk), *to_value = pieces.take(p.m, dv);
  auto w = [&](int64_t k) { return weight<T>(p, x, k); };
  auto alive = [&](int64_t k) { return T(w(k) != T(0)); };
  auto one = [](int64_t) { return T(1); };
  pack(x.key, p.m, p.d, key, alive);
  pack(x.key, p.m, p.d, weighted, w);
  pack(x.value, p.m, p.dv, value, alive);
  pack(x.query, p.n, p.d, query, one);
  pack(x.grad_out, p.n, p.dv, grad, one);

  product(p.dv, p.m, dk, value, 1, dv, weighted, gram);  // (k^T W v)^T
  product(p.n, p.dv, dk, grad, dv, 1, gram, to_query);
  unpack(to_query, p.n, p.d, x.grad_query, one);

  product(p.dv, p.n, dk, grad, 1, dv, query, grad_gram);  // (q^T g)^T
  product(p.m, p.dv, dk, value, dv, 1, grad_gram, to_key);
  unpack(to_key, p.m, p.d, x.grad_key, w);

  product(p.d, p.n, dv, query, 1, dk, grad, grad_gram_transposed);
  product(p.m, p.d, dv, key, dk, 1, grad_gram_transposed, to_value);
  if (x.grad_weights) {
    for (int64_t k = 0; k < p.m; ++k) {
      T sum = 0;
      for (int64_t j = 0; j < p.dv; ++j) sum += to_value[k * dv + j] * value[k * dv + j];
      static_cast<T*>(x.grad_weights)[k] = w(k) != T(0) ? sum : T(0);
    }
  }
  unpack(to_value, p.m, p.dv, x.grad_value, w);
}

size_t scratch_bytes(const GalerkinProblem& p) { return p.wide ? scratch_of<double>(p) : scratch_of<float>(p); }
void forward_any(const GalerkinProblem& p, const GalerkinLead& x, void* scratch) {
  p.wide ? forward<double>(p, x, scratch) : forward<float>(p, x, scratch);
}
void backward_any(const GalerkinProblem& p, const GalerkinLead& x, void* scratch) {
  p.wide ? backward<double>(p, x, scratch) : backward<float>(p, x, scratch);
}

}  // namespace

extern const GalerkinAttentionKernels galerkin_attention = {scratch_bytes, forward_any, backward_any};

}  // namespace continuum_ops::CO_ISA
