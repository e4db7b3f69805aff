// Sums of position attention over points and the nodes of their cells, on one core for one instruction set: compiled once per CO_ISA_*.
// Layouts are in position_transform.h.
#include "position_transform.h"
#include "simd.h"

namespace continuum_ops::CO_ISA {
namespace {

constexpr int L = lanes<float>, R = 6;
#if defined(CO_ISA_avx512)
constexpr int C = 4;
#else
constexpr int C = 2;
#endif
constexpr int64_t W = TRANSFORM_COLUMNS, ROWS = TRANSFORM_ROWS;
constexpr int64_t DEPTH = 64;  // points whose sum is collected in registers
constexpr int64_t NODES = 48;  // nodes, likewise
static_assert(W % (C * L) == 0 && ROWS % R == 0);

CO_INLINE int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
CO_INLINE int64_t spacing_of(int64_t nodes) { return round_up(nodes, 16) + 16; }  // no power of two

struct Scratch {
  float *basis, *values;
  double* sums;  // in the same place
  Scratch(void* p, int64_t nodes) : basis(static_cast<float*>(p)), values(basis + (ROWS + R) * spacing_of(nodes)),
                                      sums(reinterpret_cast<double*>(values)) {}
  static size_t bytes(int64_t nodes) { 
    return size_t((ROWS + R) * spacing_of(nodes)) * sizeof(float) + size_t(round_up(nodes, R) * W) * sizeof(double);
  }
};

// to[(i - first) * spacing + node] = basis of point i at each node of its cell
void basis_rows(const TransformSide& s, int64_t first, int64_t last, bool mass, float* to) {
  const int64_t p = s.points[0], q = s.points[1], r = s.points[2], spacing = spacing_of(s.cell_nodes());
  const int64_t factors = p + (s.d > 1 ? q : 0) + (s.d > 2 ? r : 0);
  for (int64_t i = first; i < last; ++i, to += spacing) {
    const float *x = s.basis + i * factors, *y = x + p, *z = y + q, m = mass && s.mass ? s.mass[i] : 1.0f;
    float* at = to;
    for (int64_t a = 0; a < p; ++a) {
      const float u = x[a] * m;
      if (s.d == 1) {
        *at++ = u;
        continue;
      }
      for (int64_t b = 0; b < q; ++b) {
        const float v = u * y[b];
        if (s.d == 2) {
          *at++ = v;
        } else {
          for (int64_t c = 0; c < r; ++c) *at++ = v * z[c];
        }
      }
    }
    for (; at < to + spacing; ++at) *at = 0;
  }
}

// f(node, its row in the grid) for the nodes of a cell
template <class F> CO_INLINE void for_each_node(const TransformSide& s, int64_t cell, F f) {
  const int64_t z = cell % s.cells[2], y = cell / s.cells[2] % s.cells[1], x = cell / s.cells[2] / s.cells[1];
  int64_t node = 0;
  for (int64_t a = 0; a < s.points[0]; ++a) {
    for (int64_t b = 0; b < s.points[1]; ++b) {
      const int64_t row = ((x * s.points[0] + a) * s.nodes(1) + y * s.points[1] + b) * s.nodes(2) + z * s.points[2];
      for (int64_t c = 0; c < s.points[2]; ++c) f(node++, row + c);
    }
  }
}

template <int N> struct Vectors { static constexpr int value = N; };

// f(vectors, c) for pieces of at most C vectors that cover the columns
template <class F> CO_INLINE void for_each_width(int64_t columns, F f) {
  for (int64_t c = 0; c < columns; c += C * L) {
    switch (smaller<int64_t>((columns - c + L - 1) / L, C)) {
      case 1: f(Vectors<1>{}, c); break;
      case 2: f(Vectors<2>{}, c); break;
      case 3: f(Vectors<smaller(3, C)>{}, c); break;
      default: f(Vectors<C>{}, c);
    }
  }
}

// sums[node, c] += sum over points of basis[point, node] rows[point, c]; what a tile of points adds up to is float32
template <int N>
void spread_columns(const float* basis, int64_t spacing, int64_t nodes, const float* rows, int64_t depth, double* sums) {
  for (int64_t n = 0; n < nodes; n += R) {
    Vec<float> acc[R][N] = {};
    multiply_columns<float, R, N>(acc, basis + n, spacing, rows, W, depth);
    CO_UNROLL
    for (int r = 0; r < R; ++r) {
      CO_UNROLL
      for (int v = 0; v < N; ++v) {
        double* to = sums + (n + r) * W + v * L;
        for (int l = 0; l < L; ++l) to[l] += double(acc[r][v][l]);
      }
    }
  }
}

// y[point, c] (+)= sum over nodes of basis[point, node] values[node, c]
template <int N>
void gather_columns(const float* basis, int64_t spacing, int64_t count, const float* values, int64_t depth, bool add, float* y) {
  for (int64_t i = 0; i < count; i += R) {
    const float* rows[R];
    for (int r = 0; r < R; ++r) rows[r] = basis + (i + r) * spacing;  // past the last: what is there, and not used
    Vec<float> acc[R][N] = {};
    multiply_rows<float, R, N>(acc, rows, values, W, depth);
    CO_UNROLL
    for (int r = 0; r < R; ++r) {
      CO_UNROLL
      for (int v = 0; v < N; ++v) {
        float* to = y + (i + r) * W + v * L;
        store(to, add ? load(to) + acc[r][v] : acc[r][v]);
      }
    }
  }
}

size_t scratch(int64_t nodes) { return Scratch::bytes(nodes); }

template <class S>
bool pack_of(const TransformField& f, int64_t begin, int64_t columns, const int64_t* place, const float* scale, const float* centre,
             int64_t first, int64_t last, float* to) {
  constexpr uint32_t exponent = 0x7f800000;
  const S* data = static_cast<const S*>(f.data);
  uint32_t special = 0;
  for (int64_t i = first; i < last; ++i, to += W) {
    const float factor = scale ? scale[i] : 1.0f;
    if (factor == 0.0f) {
      for (int64_t c = 0; c < W; ++c) to[c] = 0;
      continue;
    }
    for (int64_t c = 0; c < columns;) {
      const int64_t e = (begin + c) / f.channels, k = (begin + c) % f.channels, run = smaller(f.channels - k, columns - c);
      const S* from = data + e * f.batch + place[i] * f.row + k * f.column;
      if (f.column == 1) {
        for (int64_t j = 0; j < run; ++j) to[c + j] = widen(from[j]);
      } else {
        for (int64_t j = 0; j < run; ++j) to[c + j] = widen(from[j * f.column]);
      }
      c += run;
    }
    for (int64_t c = columns; c < W; ++c) to[c] = 0;
    for (int64_t c = 0; c < W; ++c) {
      const uint32_t word = bits<uint32_t>(to[c]) & exponent;
      special |= word == exponent ? ~0u : 0u;
    }
    if (centre) {
      for (int64_t c = 0; c < columns; ++c) to[c] -= centre[c];
    }
    if (scale) {
      for (int64_t c = 0; c < W; ++c) to[c] *= factor;
    }
  }
  return special == 0;
}

bool pack(const TransformField& f, int64_t begin, int64_t columns, const int64_t* place, const float* scale, const float* centre,
          int64_t first, int64_t last, float* to) {
  switch (f.dtype) {
    case DType::bfloat16: return pack_of<bfloat16>(f, begin, columns, place, scale, centre, first, last, to);
    case DType::float16: return pack_of<float16>(f, begin, columns, place, scale, centre, first, last, to);
    default: return pack_of<float>(f, begin, columns, place, scale, centre, first, last, to);
  }
}

void spread(const TransformSide& s, int64_t cell, bool mass, const float* rows, int64_t columns, double* grid, void* memory) {
  const int64_t nodes = s.cell_nodes(), spacing = spacing_of(nodes);
  const Scratch t(memory, nodes);
  for (int64_t i = 0; i < round_up(nodes, R) * W; ++i) t.sums[i] = 0;
  for (int64_t first = s.begin[cell]; first < s.begin[cell + 1]; first += DEPTH) {
    const int64_t depth = smaller(DEPTH, s.begin[cell + 1] - first);
    basis_rows(s, first, first + depth, mass, t.basis);
    for_each_width(columns, [&](auto vectors, int64_t c) {
      spread_columns<decltype(vectors)::value>(t.basis, spacing, nodes, rows + first * W + c, depth, t.sums + c);
    });
  }
  for_each_node(s, cell, [&](int64_t node, int64_t row) {
    for (int64_t c = 0; c < columns; ++c) grid[row * columns + c] = t.sums[node * W + c];
  });
}

void spread_numbers(const TransformSide& s, int64_t cell, bool mass, const double* x, double* sums, double* sizes, void* memory) {
  const int64_t nodes = s.cell_nodes(), spacing = spacing_of(nodes);
  const Scratch t(memory, nodes);
  double *sum = t.sums, *size = t.sums + nodes;
  for (int64_t n = 0; n < 2 * nodes; ++n) sum[n] = 0;
  for (int64_t first = s.begin[cell]; first < s.begin[cell + 1]; first += DEPTH) {
    const int64_t depth = smaller(DEPTH, s.begin[cell + 1] - first);
    basis_rows(s, first, first + depth, mass, t.basis);
    for (int64_t i = 0; i < depth; ++i) {
      const double factor = x ? x[first + i] : 1.0;
      const float* row = t.basis + i * spacing;
      for (int64_t n = 0; n < nodes; ++n) {
        const double term = double(row[n]) * factor;
        sum[n] += term;
        size[n] += __builtin_fabs(term);
      }
    }
  }
  for_each_node(s, cell, [&](int64_t node, int64_t row) {
    if (sums) sums[row] = sum[node];
    if (sizes) sizes[row] = size[node];
  });
}

void gather(const TransformSide& s, int64_t cell, int64_t first, int64_t last, const double* grid, int64_t columns, const double* ones,
            const double* total, bool divide, float* y, void* memory) {
  const int64_t nodes = s.cell_nodes(), spacing = spacing_of(nodes), count = last - first;
  const Scratch t(memory, nodes);
  basis_rows(s, first, last, false, t.basis);
  // the constant: the ratio at the node where ones is largest
  double constant[W];
  double most = 0;
  int64_t at = -1, any = 0;
  for_each_node(s, cell, [&](int64_t, int64_t row) {
    const double one = ones ? ones[row] : 1.0;
    if (one > most) most = one, at = row;
    any = row;
  });
  if (!ones) at = any;
  for (int64_t c = 0; c < columns; ++c) {
    constant[c] = at < 0 ? 0.0 : grid[at * columns + c] / (ones ? ones[at] : 1.0);
    if (!(constant[c] - constant[c] == 0.0)) constant[c] = 0.0;
  }
  for_each_node(s, cell, [&](int64_t node, int64_t row) {
    const double one = ones ? ones[row] : 1.0;
    float* to = t.values + node * W;
    for (int64_t c = 0; c < columns; ++c) to[c] = float(grid[row * columns + c] - one * constant[c]);
    for (int64_t c = columns; c < W; ++c) to[c] = 0;
  });
  for (int64_t n = 0; n < nodes; n += NODES) {
    const int64_t depth = smaller(NODES, nodes - n);
    for_each_width(columns, [&](auto vectors, int64_t c) {
      gather_columns<decltype(vectors)::value>(t.basis + n, spacing, count, t.values + n * W + c, depth, n > 0, y + c);
    });
  }
  for (int64_t i = 0; i < count; ++i) {
    double sum = 0;
    if (total) {
      sum = total[first + i];
    } else {
      const float* row = t.basis + i * spacing;
      for (int64_t n = 0; n < nodes; ++n) sum += double(row[n]);
    }
    float* row = y + i * W;
    if (divide) {
      const double inverse = 1 / sum;
      for (int64_t c = 0; c < columns; ++c) row[c] = float(constant[c] + double(row[c]) * inverse);
    } else {
      for (int64_t c = 0; c < columns; ++c) row[c] = float(constant[c] * sum + double(row[c]));
    }
    for (int64_t c = columns; c < W; ++c) row[c] = 0;
  }
}

void gather_numbers(const TransformSide& s, int64_t cell, int64_t first, int64_t last, const double* grid, bool sizes, double* y,
                    void* memory) {
  const int64_t nodes = s.cell_nodes(), spacing = spacing_of(nodes);
  const Scratch t(memory, nodes);
  basis_rows(s, first, last, false, t.basis);
  for_each_node(s, cell, [&](int64_t node, int64_t row) { t.sums[node] = grid[row]; });
  for (int64_t i = 0; i < last - first; ++i) {
    const float* row = t.basis + i * spacing;
    double sum = 0;
    if (sizes) {
      for (int64_t n = 0; n < nodes; ++n) sum += __builtin_fabs(double(row[n])) * t.sums[n];
    } else {
      for (int64_t n = 0; n < nodes; ++n) sum += double(row[n]) * t.sums[n];
    }
    y[i] = sum;
  }
}

template <class S>
void put_of(const TransformField& f, int64_t begin, int64_t columns, const int64_t* place, const float* scale, int64_t first, int64_t last,
            const float* y) {
  S* data = static_cast<S*>(f.data);
  for (int64_t i = first; i < last; ++i, y += W) {
    for (int64_t c = 0; c < columns;) {
      const int64_t e = (begin + c) / f.channels, k = (begin + c) % f.channels, run = smaller(f.channels - k, columns - c);
      S* to = data + e * f.batch + place[i] * f.row + k * f.column;
      if constexpr (sizeof(S) == 4) {
        if (scale) {
          for (int64_t j = 0; j < run; ++j) to[j] += y[c + j] * scale[i];
          c += run;
          continue;
        }
      }
      for (int64_t j = 0; j < run; ++j) narrow(y[c + j], to + j);
      c += run;
    }
  }
}

// f.column is 1: out and gradients are contiguous
void put(const TransformField& f, int64_t begin, int64_t columns, const int64_t* place, const float* scale, int64_t first, int64_t last,
         const float* y) {
  switch (f.dtype) {
    case DType::bfloat16: return put_of<bfloat16>(f, begin, columns, place, scale, first, last, y);
    case DType::float16: return put_of<float16>(f, begin, columns, place, scale, first, last, y);
    default: return put_of<float>(f, begin, columns, place, scale, first, last, y);
  }
}

void dot(const float* x, const float* y, int64_t rows, double* sums) {
  for (int64_t i = 0; i < rows; ++i, x += W, y += W) {
    Vec<float> sum[2] = {};
    for (int64_t c = 0; c < W; c += 2 * L) {
      sum[0] = fma(load(x + c), load(y + c), sum[0]);
      sum[1] = fma(load(x + c + L), load(y + c + L), sum[1]);
    }
    sums[i] += double(sum_of_lanes<float>(sum[0] + sum[1]));
  }
}

}  // namespace

extern const PositionTransformKernels position_transform = {pack, scratch, spread, spread_numbers, gather, gather_numbers, put, dot};

}  // namespace continuum_ops::CO_ISA
