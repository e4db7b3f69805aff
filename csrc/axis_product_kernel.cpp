// Products along one axis on one core for one instruction set: compiled once per CO_ISA_*. The field is packed into panels of two
// vectors of columns, which the caches hold while every row of the matrix is multiplied with them, R rows x 2 vectors in registers.
// Sums are cut into DEPTH terms: always in the same order, and with less rounding than one long sum.
#include "axis_product.h"
#include "simd.h"

namespace continuum_ops::CO_ISA {
namespace {

constexpr int64_t DEPTH = 192;          // terms of a sum in registers: a panel of them fits the first cache
constexpr int64_t PANELS = 4;           // packed together: rows of the field are read in runs of as many
constexpr int64_t SPACING = DEPTH + 16;  // of rows packed for a contraction: no multiple of a page's fraction
constexpr int64_t BLOCK = 256;          // rows and columns of a contraction that are summed together

template <class T> struct Tiles {
#if defined(CO_ISA_avx512)
  static constexpr int R = 12;
#else
  static constexpr int R = 6;
#endif
  static constexpr int64_t L = lanes<T>, PANEL = 2 * L;
};

CO_INLINE int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// Columns [begin, end) in runs that lie within one of `before`: f(its place, its first column, how many, behind how many of the range)
template <class F> CO_INLINE void for_each_run(const AxisProduct& p, int64_t begin, int64_t end, F f) {
  int64_t b = begin / p.columns, c = begin % p.columns;
  for (int64_t done = 0; done < end - begin; ++b, c = 0) {
    const int64_t count = smaller(p.columns - c, end - begin - done);
    f(b, c, count, done);
    done += count;
  }
}

// Asks for rows of a field that are read next, a few lines at a time while others are multiplied: all at once would wait for memory.
class Ahead {
 public:
  Ahead() = default;
  template <class T> Ahead(const T* from, int64_t rows, int64_t stride, int64_t columns)
      : row_(reinterpret_cast<const char*>(from)), at_(row_), stride_(stride * int64_t(sizeof(T))), bytes_(columns * int64_t(sizeof(T))),
        rows_(columns > 0 ? rows : 0) {}
  int64_t lines() const { return rows_ * ((bytes_ + 63) / 64); }
  __attribute__((always_inline)) void ask(int64_t count) {
    for (; count > 0 && rows_ > 0; --count) {
      __builtin_prefetch(at_, 0, 2);
      at_ += 64;
      if (at_ - row_ >= bytes_) row_ += stride_, at_ = row_, --rows_;
    }
  }

 private:
  const char *row_ = nullptr, *at_ = nullptr;
  int64_t stride_ = 0, bytes_ = 0, rows_ = 0;
};

// `count` columns from `begin` on of the first `depth` of `rows` rows of a field; of longer rows only what lies in one piece.
template <class T> Ahead ahead(const AxisProduct& p, const T* field, int64_t rows, int64_t depth, int64_t begin, int64_t count) {
  count = smaller(count, p.all_columns() - begin);
  if (count <= 0) return {};
  const int64_t c = begin % p.columns;
  const T* from = field + begin / p.columns * rows * p.columns;
  if (c + count > p.columns && p.columns <= count) return {from, 1, 0, (c + count) / p.columns * rows * p.columns};
  return {from + c, depth, p.columns, smaller(count, p.columns - c)};
}

template <class T> size_t packed_of(const AxisProduct& p) { return size_t(round_up(p.m, Tiles<T>::R) * p.n) * sizeof(T); }

// Strips of R rows, (strip, k, R)
template <class T> void pack_of(const AxisProduct& p, const T* matrix, int64_t row, int64_t column, T* to) {
  constexpr int R = Tiles<T>::R;
  for (int64_t i = 0; i < p.m; i += R) {
    for (int64_t k = 0; k < p.n; ++k, to += R) {
      for (int64_t r = 0; r < R; ++r) to[r] = i + r < p.m ? matrix[(i + r) * row + k * column] : T(0);
    }
  }
}

// Columns [begin, end) of rows [k, k + depth) of x, in panels (panel, row, PANEL); zeros past the end
template <class T> void pack_panels(const AxisProduct& p, const T* x, int64_t k, int64_t depth, int64_t begin, int64_t end, T* to) {
  constexpr int64_t L = lanes<T>, P = Tiles<T>::PANEL;
  if (begin / p.columns == (end - 1) / p.columns && (end - begin) % P == 0) {
    const T* from = x + (begin / p.columns * p.n + k) * p.columns + begin % p.columns;
    for (int64_t r = 0; r < depth; ++r, from += p.columns) {
      for (int64_t c = 0; c < end - begin; c += L) store(to + c / P * depth * P + r * P + c % P, load_unaligned(from + c));
    }
    return;
  }
  if (p.columns % P == 0) {  // and so is begin
    for (int64_t c = begin; c < end; c += P, to += depth * P) {
      const T* from = x + (c / p.columns * p.n + k) * p.columns + c % p.columns;
      for (int64_t r = 0; r < depth; ++r, from += p.columns) {
        store(to + r * P, load_unaligned(from));
        store(to + r * P + L, load_unaligned(from + L));
      }
    }
    return;
  }
  for_each_run(p, begin, end, [&](int64_t b, int64_t c, int64_t count, int64_t done) {
    const T* from = x + (b * p.n + k) * p.columns + c;
    for (int64_t r = 0; r < depth; ++r, from += p.columns) {
      for (int64_t i = 0; i < count; ++i) to[(done + i) / P * depth * P + r * P + (done + i) % P] = from[i];
    }
  });
  for (int64_t i = end - begin; i % P != 0; ++i) {
    for (int64_t r = 0; r < depth; ++r) to[i / P * depth * P + r * P + i % P] = 0;
  }
}

// rows (at most R of them) of out at columns [begin, end), of one panel, (+)= tile
template <class T> void put(const AxisProduct& p, const T* tile, int64_t row, int64_t rows, int64_t begin, int64_t end, bool add, T* out) {
  for_each_run(p, begin, end, [&](int64_t b, int64_t c, int64_t count, int64_t done) {
    for (int64_t r = 0; r < rows; ++r) {
      T* to = out + (b * p.m + row + r) * p.columns + c;
      const T* from = tile + r * Tiles<T>::PANEL + done;
      for (int64_t i = 0; i < count; ++i) to[i] = add ? to[i] + from[i] : from[i];
    }
  });
}

template <class T> size_t apply_scratch_of() {
  return size_t(PANELS * DEPTH + Tiles<T>::R) * Tiles<T>::PANEL * sizeof(T);
}

template <class T> void apply_of(const AxisProduct& p, const T* packed, const T* x, T* out, int64_t begin, T* scratch) {
  constexpr int R = Tiles<T>::R;
  constexpr int64_t L = lanes<T>, P = Tiles<T>::PANEL;
  const int64_t end = smaller(begin + PANELS * P, p.all_columns());
  const int64_t chunks = larger<int64_t>((p.n + DEPTH - 1) / DEPTH, 1), step = (p.n + chunks - 1) / chunks;
  T *panels = scratch, *spare = scratch + PANELS * DEPTH * P;
  for (int64_t k = 0; k == 0 || k < p.n; k += step) {
    const int64_t depth = smaller(step, p.n - k);
    pack_panels(p, x, k, depth, begin, end, panels);
    Ahead next = k + step < p.n ? Ahead() : ahead(p, x, p.n, smaller(step, p.n), end, PANELS * P);
    const int64_t tiles = (p.m + R - 1) / R * ((end - begin + P - 1) / P), share = next.lines() / tiles + 1;
    for (int64_t i = 0; i < p.m; i += R) {
      const T* rows = packed + i * p.n + k * R;
      for (int64_t c = begin; c < end; c += P) {
        const int64_t at = c % p.columns, last = smaller(c + P, end);
        const bool whole = last - c == P && at + P <= p.columns && i + R <= p.m;
        T* to = out + (c / p.columns * p.m + i) * p.columns + at;
        if (whole) {
          for (int r = 0; r < R; ++r) __builtin_prefetch(to + r * p.columns, 1, 3), __builtin_prefetch(to + r * p.columns + P - 1, 1, 3);
        }
        next.ask(share);
        Vec<T> acc[R][2] = {};
        multiply_columns<T, R, 2>(acc, rows, R, panels + (c - begin) * depth, P, depth);
        if (whole) {
          CO_UNROLL
          for (int r = 0; r < R; ++r, to += p.columns) {
            CO_UNROLL
            for (int v = 0; v < 2; ++v) store_unaligned(to + v * L, k > 0 ? load_unaligned(to + v * L) + acc[r][v] : acc[r][v]);
          }
        } else {
          CO_UNROLL
          for (int r = 0; r < R; ++r) {
            CO_UNROLL
            for (int v = 0; v < 2; ++v) store(spare + r * P + v * L, acc[r][v]);
          }
          put(p, spare, i, smaller<int64_t>(R, p.m - i), c, last, k > 0, out);
        }
      }
    }
    if (p.n == 0) break;
  }
}

template <class T> size_t contract_scratch_of() {
  constexpr int64_t P = Tiles<T>::PANEL, ROWS = BLOCK + 2 * Tiles<T>::R;
  return size_t(ROWS * SPACING + P * SPACING + (BLOCK + P) * DEPTH + ROWS * (BLOCK + P)) * sizeof(T);
}

// Row k of x at columns [begin, end): to[0 .. end - begin)
template <class T> CO_INLINE void pack_row(const AxisProduct& p, const T* x, int64_t size, int64_t k, int64_t begin, int64_t end, T* to) {
  for_each_run(p, begin, end, [&](int64_t b, int64_t c, int64_t count, int64_t done) {
    const T* from = x + (b * size + k) * p.columns + c;
    for (int64_t i = 0; i < count; ++i) to[done + i] = from[i];
  });
}

template <class T> void contract_of(const AxisProduct& p, const T* grad, const T* x, int64_t begin, int64_t end, T* sum, T* scratch) {
  constexpr int R = Tiles<T>::R;
  constexpr int64_t L = lanes<T>, P = Tiles<T>::PANEL, ROWS = (BLOCK + R - 1) / R * R, LDS = BLOCK + P;
  T *rows = scratch, *strip = rows + (BLOCK + 2 * R) * SPACING, *panels = strip + P * SPACING, *sums = panels + (BLOCK + P) * DEPTH;
  for (int64_t i0 = 0; i0 < p.m; i0 += BLOCK) {
    for (int64_t k0 = 0; k0 < p.n; k0 += BLOCK) {
      const int64_t m = smaller(BLOCK, p.m - i0), n = smaller(BLOCK, p.n - k0);
      for (int64_t j = begin; j < end; j += DEPTH) {
        const int64_t last = smaller(j + DEPTH, end), depth = last - j;
        for (int64_t i = 0; i < round_up(m, R) && i < ROWS; ++i) {
          T* row = rows + i * SPACING;
          if (i < m) pack_row(p, grad, p.m, i0 + i, j, last, row);
          else for (int64_t c = 0; c < depth; ++c) row[c] = 0;
        }
        for (int64_t k = 0; k < n; k += P) {
          for (int64_t l = 0; l < P; ++l) {
            T* row = strip + l * SPACING;
            if (k + l < n) pack_row(p, x, p.n, k0 + k + l, j, last, row);
            else for (int64_t c = 0; c < depth; ++c) row[c] = 0;
          }
          transpose<P>(strip, SPACING, depth, panels + k * DEPTH);
        }
        Ahead next_rows = ahead(p, grad, p.m, p.m, last, smaller(DEPTH, end - last));
        Ahead next_panels = ahead(p, x, p.n, p.n, last, smaller(DEPTH, end - last));
        const int64_t tiles = (m + R - 1) / R * ((n + P - 1) / P), share = larger(next_rows.lines(), next_panels.lines()) / tiles + 1;
        for (int64_t k = 0; k < n; k += P) {
          for (int64_t i = 0; i < m; i += R) {
            next_rows.ask(share);
            next_panels.ask(share);
            Vec<T> acc[R][2] = {};
            multiply_spaced_rows<T, R, 2, int(SPACING)>(acc, rows + i * SPACING, panels + k * DEPTH, P, depth);
            CO_UNROLL
            for (int r = 0; r < R; ++r) {
              CO_UNROLL
              for (int v = 0; v < 2; ++v) {
                T* to = sums + (i + r) * LDS + k + v * L;
                store(to, j > begin ? load(to) + acc[r][v] : acc[r][v]);
              }
            }
          }
        }
      }
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t k = 0; k < n; ++k) sum[(i0 + i) * p.n + k0 + k] = begin < end ? sums[i * LDS + k] : T(0);
      }
    }
  }
}

int64_t group_columns(const AxisProduct& p) { return PANELS * (p.wide ? Tiles<double>::PANEL : Tiles<float>::PANEL); }
size_t packed_bytes(const AxisProduct& p) { return p.wide ? packed_of<double>(p) : packed_of<float>(p); }
void pack(const AxisProduct& p, const void* matrix, int64_t row, int64_t column, void* packed) {
  if (p.wide) return pack_of(p, static_cast<const double*>(matrix), row, column, static_cast<double*>(packed));
  pack_of(p, static_cast<const float*>(matrix), row, column, static_cast<float*>(packed));
}
size_t apply_scratch(const AxisProduct& p) { return p.wide ? apply_scratch_of<double>() : apply_scratch_of<float>(); }
void apply(const AxisProduct& p, const void* packed, const void* x, void* out, int64_t begin, void* scratch) {
  if (p.wide) {
    return apply_of(p, static_cast<const double*>(packed), static_cast<const double*>(x), static_cast<double*>(out), begin,
                    static_cast<double*>(scratch));
  }
  apply_of(p, static_cast<const float*>(packed), static_cast<const float*>(x), static_cast<float*>(out), begin, static_cast<float*>(scratch));
}
size_t contract_scratch(const AxisProduct& p) { return p.wide ? contract_scratch_of<double>() : contract_scratch_of<float>(); }
void contract(const AxisProduct& p, const void* grad, const void* x, int64_t begin, int64_t end, void* sum, void* scratch) {
  if (p.wide) {
    return contract_of(p, static_cast<const double*>(grad), static_cast<const double*>(x), begin, end, static_cast<double*>(sum),
                       static_cast<double*>(scratch));
  }
  contract_of(p, static_cast<const float*>(grad), static_cast<const float*>(x), begin, end, static_cast<float*>(sum), static_cast<float*>(scratch));
}

}  // namespace

extern const AxisProductKernels axis_product = {group_columns, packed_bytes, pack, apply_scratch, apply, contract_scratch, contract};

}  // namespace continuum_ops::CO_ISA
