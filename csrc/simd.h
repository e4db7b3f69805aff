// Vectors of float or double for one instruction set. A file that includes this header is compiled once per
// instruction set, with CO_ISA naming the namespace, so that no two copies of a function can be mixed up by the linker.
// For the same reason kernels use nothing from the standard library that the linker could share.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(CO_ISA_avx512) || defined(CO_ISA_avx2)
#include <immintrin.h>
#endif

#if defined(CO_ISA_avx512)
#define CO_ISA avx512
#define CO_VECTOR_BYTES 64
#elif defined(CO_ISA_avx2)
#define CO_ISA avx2
#define CO_VECTOR_BYTES 32
#else
#define CO_ISA generic
#define CO_VECTOR_BYTES 16
#endif

#define CO_INLINE static inline __attribute__((always_inline))
#define CO_UNROLL _Pragma("GCC unroll 16")

namespace continuum_ops::CO_ISA {

template <class T> struct VectorTypes;
template <> struct VectorTypes<float> {
  typedef float Value __attribute__((vector_size(CO_VECTOR_BYTES), may_alias));
  typedef float Unaligned __attribute__((vector_size(CO_VECTOR_BYTES), may_alias, aligned(4)));
  typedef int32_t Mask __attribute__((vector_size(CO_VECTOR_BYTES), may_alias));
};
template <> struct VectorTypes<double> {
  typedef double Value __attribute__((vector_size(CO_VECTOR_BYTES), may_alias));
  typedef double Unaligned __attribute__((vector_size(CO_VECTOR_BYTES), may_alias, aligned(8)));
  typedef int64_t Mask __attribute__((vector_size(CO_VECTOR_BYTES), may_alias));
};
template <class T> using Vec = typename VectorTypes<T>::Value;
template <class T> using MaskVec = typename VectorTypes<T>::Mask;  // per lane all ones (true) or zero
template <class T> struct LaneInt;
template <> struct LaneInt<float> { using type = int32_t; };
template <> struct LaneInt<double> { using type = int64_t; };
template <class T> inline constexpr int lanes = CO_VECTOR_BYTES / sizeof(T);

template <class T> CO_INLINE Vec<T> load(const T* p) { return *reinterpret_cast<const Vec<T>*>(p); }   // aligned
template <class T> CO_INLINE void store(T* p, Vec<T> x) { *reinterpret_cast<Vec<T>*>(p) = x; }         // aligned
template <class T> CO_INLINE Vec<T> load_unaligned(const T* p) {
  return *reinterpret_cast<const typename VectorTypes<T>::Unaligned*>(p);
}
template <class T> CO_INLINE void store_unaligned(T* p, Vec<T> x) {
  *reinterpret_cast<typename VectorTypes<T>::Unaligned*>(p) = x;
}
template <class T> CO_INLINE Vec<T> broadcast(T x) { return x - Vec<T>{}; }
// Aligned stores past the caches: others see them after finish_streams().
#if defined(CO_ISA_avx512)
CO_INLINE void stream(float* p, Vec<float> x) { _mm512_stream_ps(p, x); }
CO_INLINE void stream(double* p, Vec<double> x) { _mm512_stream_pd(p, x); }
CO_INLINE void finish_streams() { _mm_sfence(); }
#elif defined(CO_ISA_avx2)
CO_INLINE void stream(float* p, Vec<float> x) { _mm256_stream_ps(p, x); }
CO_INLINE void stream(double* p, Vec<double> x) { _mm256_stream_pd(p, x); }
CO_INLINE void finish_streams() { _mm_sfence(); }
#else
template <class T> CO_INLINE void stream(T* p, Vec<T> x) { store(p, x); }
CO_INLINE void finish_streams() {}
#endif
template <class To, class From> CO_INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}

#if defined(CO_ISA_avx512)
CO_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return _mm512_fmadd_ps(a, b, c); }
CO_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return _mm512_fmadd_pd(a, b, c); }
CO_INLINE Vec<float> max(Vec<float> a, Vec<float> b) { return _mm512_max_ps(a, b); }
CO_INLINE Vec<double> max(Vec<double> a, Vec<double> b) { return _mm512_max_pd(a, b); }
CO_INLINE uint32_t greater(Vec<float> a, Vec<float> b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
CO_INLINE uint32_t greater(Vec<double> a, Vec<double> b) { return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ); }
CO_INLINE bool any(uint32_t m) { return m != 0; }
#elif defined(CO_ISA_avx2)
CO_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return _mm256_fmadd_ps(a, b, c); }
CO_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return _mm256_fmadd_pd(a, b, c); }
CO_INLINE Vec<float> max(Vec<float> a, Vec<float> b) { return _mm256_max_ps(a, b); }
CO_INLINE Vec<double> max(Vec<double> a, Vec<double> b) { return _mm256_max_pd(a, b); }
CO_INLINE Vec<float> greater(Vec<float> a, Vec<float> b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
CO_INLINE Vec<float> greater(Vec<double> a, Vec<double> b) { return _mm256_castpd_ps(_mm256_cmp_pd(a, b, _CMP_GT_OQ)); }
CO_INLINE bool any(Vec<float> m) { return _mm256_movemask_ps(m) != 0; }
#else
template <class V> CO_INLINE V fma(V a, V b, V c) { return a * b + c; }
template <class V> CO_INLINE V max(V a, V b) { return a > b ? a : b; }
CO_INLINE MaskVec<float> greater(Vec<float> a, Vec<float> b) { return a > b; }
CO_INLINE MaskVec<float> greater(Vec<double> a, Vec<double> b) { return bits<MaskVec<float>>(a > b); }
CO_INLINE bool any(MaskVec<float> m) {
  const auto words = bits<MaskVec<double>>(m);
  int64_t all = 0;
  CO_UNROLL
  for (int i = 0; i < lanes<double>; ++i) all |= words[i];
  return all != 0;
}
#endif
#if defined(CO_ISA_avx512)
CO_INLINE uint32_t either(uint32_t a, uint32_t b) { return a | b; }
#elif defined(CO_ISA_avx2)
CO_INLINE Vec<float> either(Vec<float> a, Vec<float> b) { return _mm256_or_ps(a, b); }
#else
CO_INLINE MaskVec<float> either(MaskVec<float> a, MaskVec<float> b) { return a | b; }
#endif

template <class T> CO_INLINE T sum_of_lanes(Vec<T> x) {
  T sum = 0;
  CO_UNROLL
  for (int l = 0; l < lanes<T>; ++l) sum += x[l];
  return sum;
}

// max whose result is NaN where x is NaN (x86's max returns its second operand then; the portable form does as well).
template <class V> CO_INLINE V clamp_below(V x, V low) { return max(low, x); }

// 2^t by a polynomial on [-1/2, 1/2] of least relative error among those with 2^0 = 1: degree 5, 9.2e-8 (float); degree 11,
// 3e-18 (double; the constant term rounds to 1).
// CLAMP = false asks for t in [-125, 127] (double: [-1021, 1023]); with CLAMP smaller t, -inf too, gives 0 or a subnormal.
// NaN in, NaN out.
template <bool CLAMP> CO_INLINE Vec<float> exp2(Vec<float> t) {
#if defined(CO_ISA_avx512)
  if constexpr (CLAMP) t = clamp_below(t, broadcast(-151.0f));  // rounds to 0
  const Vec<float> n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  if constexpr (CLAMP) t = clamp_below(t, broadcast(-127.0f));  // exponent field 0: the factor below is 0
  const Vec<float> magic = broadcast(12582912.0f + 127.0f);  // 1.5 * 2^23 + exponent bias: rounds t to an integer
  const Vec<float> z = t + magic, n = z - magic;
#endif
  const Vec<float> r = t - n;
  Vec<float> p = broadcast(0.0013264727139778863f);
  p = fma(p, r, broadcast(0.00967151263995832f));
  p = fma(p, r, broadcast(0.05550733743471263f));
  p = fma(p, r, broadcast(0.24022242085376683f));
  p = fma(p, r, broadcast(0.693146977598991f));
  p = fma(p, r, broadcast(1.0f));
#if defined(CO_ISA_avx512)
  return _mm512_scalef_ps(p, n);
#else
  // A product with 2^n, not an addition to the exponent: a NaN must stay a NaN.
  return p * bits<Vec<float>>(bits<MaskVec<float>>(z) << 23);
#endif
}

template <bool CLAMP> CO_INLINE Vec<double> exp2(Vec<double> t) {
  if constexpr (CLAMP) t = clamp_below(t, broadcast(-1023.0));
  const Vec<double> magic = broadcast(6755399441055744.0 + 1023.0);  // 1.5 * 2^52 + exponent bias
  const Vec<double> z = t + magic, n = z - magic, r = t - n;
  constexpr double c[] = {0.9999999999999999971,    0.69314718055994533046,    0.24022650695910156205,
                          0.055504108664819921483,  0.0096181291075883350833,  0.0013333558146789950323,
                          0.00015403530462514613026, 0.0000152527334899608046, 1.3215433089594629037e-6,
                          1.0178198033328527662e-7, 7.0741056262456593708e-9,  4.4352809446103361611e-10};
  Vec<double> p = broadcast(c[11]);
  CO_UNROLL
  for (int i = 10; i >= 0; --i) p = fma(p, r, broadcast(c[i]));
  return p * bits<Vec<double>>(bits<MaskVec<double>>(z) << 52);
}

// ---- products of small matrices: R x C vectors of accumulators stay in registers -----------------------------------
// acc[r][c] += sum_x rows[r][x] * b[x * ldb + c * lanes]: rows are read as scalars and spread over the lanes.
template <class T, int R, int C>
CO_INLINE void multiply_rows(Vec<T> (&acc)[R][C], const T* const (&rows)[R], const T* b, ptrdiff_t ldb, int64_t depth) {
#pragma GCC unroll 2
  for (int64_t x = 0; x < depth; ++x) {
    Vec<T> bv[C];
    CO_UNROLL
    for (int c = 0; c < C; ++c) bv[c] = load(b + x * ldb + c * lanes<T>);
    CO_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec<T> s = broadcast(rows[r][x]);
      CO_UNROLL
      for (int c = 0; c < C; ++c) acc[r][c] = fma(s, bv[c], acc[r][c]);
    }
  }
}

// acc[r][c] += sum_x a[r * SPACING + x] * b[x * ldb + c * lanes]: one address with constant distances serves all rows.
template <class T, int R, int C, int SPACING>
CO_INLINE void multiply_spaced_rows(Vec<T> (&acc)[R][C], const T* a, const T* b, ptrdiff_t ldb, int64_t depth) {
#pragma GCC unroll 2
  for (int64_t x = 0; x < depth; ++x) {
    Vec<T> bv[C];
    CO_UNROLL
    for (int c = 0; c < C; ++c) bv[c] = load(b + x * ldb + c * lanes<T>);
    CO_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec<T> s = broadcast(a[x + r * SPACING]);
      CO_UNROLL
      for (int c = 0; c < C; ++c) acc[r][c] = fma(s, bv[c], acc[r][c]);
    }
  }
}

// acc[r][c] += sum_x a[x * lda + r] * b[x * ldb + c * lanes]
template <class T, int R, int C>
CO_INLINE void multiply_columns(Vec<T> (&acc)[R][C], const T* a, ptrdiff_t lda, const T* b, ptrdiff_t ldb, int64_t depth) {
#pragma GCC unroll 2
  for (int64_t x = 0; x < depth; ++x) {
    Vec<T> bv[C];
    CO_UNROLL
    for (int c = 0; c < C; ++c) bv[c] = load(b + x * ldb + c * lanes<T>);
    CO_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec<T> s = broadcast(a[x * lda + r]);
      CO_UNROLL
      for (int c = 0; c < C; ++c) acc[r][c] = fma(s, bv[c], acc[r][c]);
    }
  }
}

// ---- transposition -----------------------------------------------------------------------------------------------------
#if defined(CO_ISA_avx512) || defined(CO_ISA_avx2)
// to[x * ldt + l] = from[l * ldf + x] for x, l < 8
CO_INLINE void transpose_8x8(const float* from, int64_t ldf, float* to, int64_t ldt) {
  __m256 r[8], s[8];
  CO_UNROLL
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * ldf);
  CO_UNROLL
  for (int i = 0; i < 8; i += 2) s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  CO_UNROLL
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44), r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44), r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
  }
  CO_UNROLL
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * ldt, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * ldt, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
#endif

// to[x * LDT + l] = from[l * spacing + x] for l < WIDTH, which is a multiple of 8 or small
template <int64_t WIDTH, int64_t LDT = WIDTH, class T> CO_INLINE void transpose(const T* from, int64_t spacing, int64_t depth, T* to) {
  int64_t x = 0;
#if defined(CO_ISA_avx512) || defined(CO_ISA_avx2)
  if constexpr (sizeof(T) == 4) {
    for (; x + 8 <= depth; x += 8) {
      for (int64_t l = 0; l < WIDTH; l += 8) transpose_8x8(from + l * spacing + x, spacing, to + x * LDT + l, LDT);
    }
  }
#endif
  for (; x < depth; ++x) {
    CO_UNROLL
    for (int64_t l = 0; l < WIDTH; ++l) to[x * LDT + l] = from[l * spacing + x];
  }
}

// ---- storage types ---------------------------------------------------------------------------------------------------
struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };

CO_INLINE float to_float(uint32_t u) { return bits<float>(u); }
CO_INLINE double widen(double x) { return x; }
CO_INLINE float widen(float x) { return x; }
CO_INLINE float widen(bfloat16 x) { return to_float(uint32_t(x.bits) << 16); }
CO_INLINE float widen(float16 x) {
  // Exponent and mantissa are moved into place and rebased by a product, which also normalises subnormals.
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, magnitude = uint32_t(x.bits & 0x7fffu) << 13;
  const float finite = to_float(magnitude) * 0x1p112f;
  const float special = to_float(magnitude | 0x7f800000u);
  return to_float(bits<uint32_t>((x.bits & 0x7c00u) == 0x7c00u ? special : finite) | sign);
}

CO_INLINE void narrow(double x, double* y) { *y = x; }
CO_INLINE void narrow(float x, float* y) { *y = x; }
CO_INLINE void narrow(float x, bfloat16* y) {
  const uint32_t u = bits<uint32_t>(x);
  y->bits = x != x ? uint16_t((u >> 16) | 0x40u) : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);  // nearest even
}
CO_INLINE void narrow(float x, float16* y) {
  const uint32_t u = bits<uint32_t>(x), sign = (u >> 16) & 0x8000u;
  const float magnitude = to_float(u & 0x7fffffffu);
  uint32_t h;
  if (x != x) {
    h = 0x7e00u;
  } else if (magnitude >= 65520.0f) {
    h = 0x7c00u;
  } else if (magnitude < 0x1p-14f) {
    h = bits<uint32_t>(magnitude + 0.5f) - bits<uint32_t>(0.5f);  // the addition rounds to a multiple of 2^-24
  } else {
    const uint32_t m = (u & 0x7fffffffu) - (112u << 23);
    h = (m + 0xfffu + ((m >> 13) & 1u)) >> 13;
  }
  y->bits = uint16_t(h | sign);
}

CO_INLINE float fma(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
CO_INLINE double fma(double a, double b, double c) {
#if defined(__FMA__)
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

template <class T> CO_INLINE constexpr T smaller(T a, T b) { return a < b ? a : b; }
template <class T> CO_INLINE constexpr T larger(T a, T b) { return a > b ? a : b; }

}  // namespace continuum_ops::CO_ISA
