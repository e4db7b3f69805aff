// The truncated Fourier transform of one patch on one core for one instruction set: compiled once per CO_ISA_*.
#include "patch_dft.h"
#include "simd.h"

namespace continuum_ops::CO_ISA {
namespace {

// A product of a table (rows, depth) and b (depth, columns).
template <class T> struct Term {
  const T *table, *b;
};

// out = the sum of the products of TERMS terms, R rows and C vectors of it.
template <class T, int TERMS, int R, int C>
CO_INLINE void tile(const Term<T> (&terms)[TERMS], int64_t depth, ptrdiff_t ldb, T* out, ptrdiff_t ldo) {
  Vec<T> acc[R][C] = {};
  for (int t = 0; t < TERMS; ++t) {
    const T *table = terms[t].table, *b = terms[t].b;
    for (int64_t x = 0; x < depth; ++x) {
      Vec<T> bv[C];
      CO_UNROLL
      for (int c = 0; c < C; ++c) bv[c] = load_unaligned(b + x * ldb + c * lanes<T>);
      CO_UNROLL
      for (int r = 0; r < R; ++r) {
        const Vec<T> s = broadcast(table[r * depth + x]);
        CO_UNROLL
        for (int c = 0; c < C; ++c) acc[r][c] = fma(s, bv[c], acc[r][c]);
      }
    }
  }
  CO_UNROLL
  for (int r = 0; r < R; ++r) {
    CO_UNROLL
    for (int c = 0; c < C; ++c) store_unaligned(out + r * ldo + c * lanes<T>, acc[r][c]);
  }
}

template <class T, int TERMS, int C>
void panel(Term<T> (&terms)[TERMS], int64_t rows, int64_t depth, ptrdiff_t ldb, T* out, ptrdiff_t ldo) {
  Term<T> at[TERMS];
  auto from = [&](int64_t row) -> Term<T>(&)[TERMS] {
    for (int t = 0; t < TERMS; ++t) at[t] = {terms[t].table + row * depth, terms[t].b};
    return at;
  };
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) tile<T, TERMS, 6, C>(from(r), depth, ldb, out + r * ldo, ldo);
  for (; r + 2 <= rows; r += 2) tile<T, TERMS, 2, C>(from(r), depth, ldb, out + r * ldo, ldo);
  if (r < rows) tile<T, TERMS, 1, C>(from(r), depth, ldb, out + r * ldo, ldo);
}

// columns: a multiple of the lanes
template <class T, int TERMS>
void product(Term<T> (&&terms)[TERMS], int64_t rows, int64_t depth, int64_t columns, ptrdiff_t ldb, T* out, ptrdiff_t ldo) {
  int64_t done = 0;
  auto advance = [&](int64_t by) {
    for (Term<T>& t : terms) t.b += by;
    done += by;
  };
  for (; done + 2 * lanes<T> <= columns; advance(2 * lanes<T>)) panel<T, TERMS, 2>(terms, rows, depth, ldb, out + done, ldo);
  for (; done < columns; advance(lanes<T>)) panel<T, TERMS, 1>(terms, rows, depth, ldb, out + done, ldo);
}

template <class T> int64_t padded(const PatchTransform& p) { return (p.channels + lanes<T> - 1) / lanes<T> * lanes<T>; }

template <class T> struct Buffers {
  T *line, *from, *to;
  size_t bytes;

  Buffers(const PatchTransform& p, void* scratch) {
    int64_t most = 2 * p.modes();
    for (int i = 1; i < p.d; ++i) {
      const int64_t stage = p.count(p.points, 0, i) * 2 * p.count(p.rows, i, p.d);
      most = stage > most ? stage : most;
    }
    const int64_t columns = padded<T>(p), size = most * columns, first = (p.points[p.d - 1] * columns + 15) / 16 * 16;
    line = static_cast<T*>(scratch), from = line + first, to = from + size;
    bytes = (first + 2 * size) * sizeof(T);
  }
  void swap() {
    T* t = from;
    from = to, to = t;
  }
};

// f(line, its place in the grid) for every line of the patch along the last axis
template <class F> CO_INLINE void for_each_line(const PatchTransform& p, int64_t patch, F f) {
  const int last = p.d - 1;
  int64_t stride[3], origin = 0, rest = patch, points = p.channels;
  for (int i = last; i >= 0; --i) {
    stride[i] = points;
    origin += rest % p.patches[i] * p.points[i] * stride[i];
    rest /= p.patches[i];
    points *= p.patches[i] * p.points[i];
  }
  origin += rest * points;
  const int64_t lines = p.count(p.points, 0, last);
  for (int64_t l = 0; l < lines; ++l) {
    int64_t at = origin, left = l;
    for (int i = last - 1; i >= 0; --i) {
      at += left % p.points[i] * stride[i];
      left /= p.points[i];
    }
    f(l, at);
  }
}

template <class T> CO_INLINE void copy_rows(const T* from, ptrdiff_t ld_from, T* to, ptrdiff_t ld_to, int64_t rows, int64_t columns,
                                            int64_t zeros) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) to[r * ld_to + c] = from[r * ld_from + c];
    for (int64_t c = columns; c < columns + zeros; ++c) to[r * ld_to + c] = 0;
  }
}

// Where the table of an axis begins; `points` and `rows` of the axes before it are behind.
template <class T> CO_INLINE const T* table_of(const PatchTransform& p, int axis) {
  const T* table = static_cast<const T*>(p.tables);
  for (int i = 0; i < axis; ++i) table += 3 * p.points[i] * p.rows[i];
  return table;
}

template <class T> void analyze_of(const PatchTransform& p, const T* grid, T* modes, int64_t patch, void* scratch) {
  Buffers<T> buffers(p, scratch);
  const int last = p.d - 1;
  const int64_t c = p.channels, columns = padded<T>(p), n = p.points[last], m = 2 * p.rows[last];
  const T* table = table_of<T>(p, last);
  for_each_line(p, patch, [&](int64_t l, int64_t at) {
    const T* line = grid + at;
    if (columns != c) {
      copy_rows(line, c, buffers.line, columns, n, c, columns - c);
      line = buffers.line;
    }
    product<T, 1>({{table, line}}, m, n, columns, columns, buffers.from + l * m * columns, columns);
  });
  for (int i = last - 1; i >= 0; --i) {
    // (before, n, 2, rest) -> (before, 2, rows, rest)
    const int64_t before = p.count(p.points, 0, i), depth = p.points[i], rows = p.rows[i];
    const int64_t rest = p.count(p.rows, i + 1, p.d) * columns;
    const T *cos = table_of<T>(p, i), *sin = cos + rows * depth, *minus_sin = sin + rows * depth;
    for (int64_t b = 0; b < before; ++b) {
      const T *re = buffers.from + b * depth * 2 * rest, *im = re + rest;
      T* out = buffers.to + b * 2 * rows * rest;
      product<T, 2>({{cos, re}, {sin, im}}, rows, depth, rest, 2 * rest, out, rest);
      product<T, 2>({{cos, im}, {minus_sin, re}}, rows, depth, rest, 2 * rest, out + rows * rest, rest);
    }
    buffers.swap();
  }
  const int64_t kept = p.modes(), stride = p.batch * p.patch_count() * c;
  for (int part = 0; part < 2; ++part) {
    copy_rows(buffers.from + part * kept * columns, columns, modes + part * stride + patch * c, 2 * stride, kept, c, 0);
  }
}

template <class T> void synthesize_of(const PatchTransform& p, const T* modes, T* grid, int64_t patch, void* scratch) {
  Buffers<T> buffers(p, scratch);
  const int last = p.d - 1;
  const int64_t c = p.channels, columns = padded<T>(p), n = p.points[last], m = 2 * p.rows[last];
  const int64_t kept = p.modes(), stride = p.batch * p.patch_count() * c;
  for (int part = 0; part < 2; ++part) {
    copy_rows(modes + part * stride + patch * c, 2 * stride, buffers.from + part * kept * columns, columns, kept, c, columns - c);
  }
  for (int i = 0; i < last; ++i) {
    // (before, 2, rows, rest) -> (before, n, 2, rest)
    const int64_t before = p.count(p.points, 0, i), depth = p.rows[i], rows = p.points[i];
    const int64_t rest = p.count(p.rows, i + 1, p.d) * columns;
    const T *cos = table_of<T>(p, i), *sin = cos + rows * depth, *minus_sin = sin + rows * depth;
    for (int64_t b = 0; b < before; ++b) {
      const T *re = buffers.from + b * 2 * depth * rest, *im = re + depth * rest;
      T* out = buffers.to + b * rows * 2 * rest;
      product<T, 2>({{cos, re}, {minus_sin, im}}, rows, depth, rest, rest, out, 2 * rest);
      product<T, 2>({{cos, im}, {sin, re}}, rows, depth, rest, rest, out + rest, 2 * rest);
    }
    buffers.swap();
  }
  const T* table = table_of<T>(p, last);
  for_each_line(p, patch, [&](int64_t l, int64_t at) {
    T* line = columns == c ? grid + at : buffers.line;
    product<T, 1>({{table, buffers.from + l * m * columns}}, n, m, columns, columns, line, columns);
    if (columns != c) copy_rows(line, columns, grid + at, c, n, c, 0);
  });
}

size_t scratch(const PatchTransform& p) {
  return p.wide ? Buffers<double>(p, nullptr).bytes : Buffers<float>(p, nullptr).bytes;
}
void analyze(const PatchTransform& p, const void* grid, void* modes, int64_t patch, void* scratch) {
  if (p.wide) return analyze_of(p, static_cast<const double*>(grid), static_cast<double*>(modes), patch, scratch);
  analyze_of(p, static_cast<const float*>(grid), static_cast<float*>(modes), patch, scratch);
}
void synthesize(const PatchTransform& p, const void* modes, void* grid, int64_t patch, void* scratch) {
  if (p.wide) return synthesize_of(p, static_cast<const double*>(modes), static_cast<double*>(grid), patch, scratch);
  synthesize_of(p, static_cast<const float*>(modes), static_cast<float*>(grid), patch, scratch);
}

}  // namespace

extern const PatchTransformKernels patch_dft = {scratch, analyze, synthesize};

}  // namespace continuum_ops::CO_ISA
