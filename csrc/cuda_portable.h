// The instructions that C++ has no name for, each with a host version: nvcc compiles the first, the tests (cuda_cpu.h, CUDA threads as
// fibers) execute the second. Everything else in the kernels is plain C++ and is executed as it stands.
#pragma once

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define CUDA_DYN_SMEM(T, name) extern __shared__ __align__(16) unsigned char name##_bytes[]; T* name = reinterpret_cast<T*>(name##_bytes)
#define CUDA_LAUNCH(kernel, grid, block, smem, stream, ...) kernel<<<grid, block, smem, stream>>>(__VA_ARGS__)
#else
#include "cuda_cpu.h"
#endif
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace continuum_ops {
namespace cuda {

using bf16 = __nv_bfloat16;
using f16 = __half;

template <class To> __device__ __forceinline__ To convert(double x) { return To(x); }
template <class To> __device__ __forceinline__ To convert(float x) { return To(x); }
template <> __device__ __forceinline__ bf16 convert<bf16>(float x) { return __float2bfloat16(x); }
template <> __device__ __forceinline__ f16 convert<f16>(float x) { return __float2half(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(f16 x) { return __half2float(x); }

// Constants: nvcc calls no functions of the host's library in device code.
template <class A> constexpr A INFINITE = std::numeric_limits<A>::infinity();
template <class A> constexpr A NOT_A_NUMBER = std::numeric_limits<A>::quiet_NaN();
template <class A> constexpr A EPSILON = std::numeric_limits<A>::epsilon();
template <class A> constexpr A VANISHING = A(std::numeric_limits<A>::min_exponent - 64);  // 2^x is 0 below it

// One rounding on both sides: forward and backward must find the same bits of a score.
__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }
__device__ __forceinline__ float nearest(float x) { return rintf(x); }
__device__ __forceinline__ double nearest(double x) { return rint(x); }
__device__ __forceinline__ float log_2(float x) { return log2f(x); }
__device__ __forceinline__ double log_2(double x) { return log2(x); }
__device__ __forceinline__ double exp_2(double x) { return exp2(x); }
__device__ __forceinline__ float exp_2(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// x, but the compiler does not know: what follows from it is computed again instead of kept in registers.
__device__ __forceinline__ unsigned opaque(unsigned x) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// A NaN wins, as fmax would not have it.
template <class A> __device__ __forceinline__ A max_or_nan(A a, A b) { return b > a || b != b ? b : a; }
template <class A> __device__ __forceinline__ A min_or_nan(A a, A b) { return b < a || b != b ? b : a; }

// BYTES (4, 8 or 16) from global to shared memory, zeros if !valid; complete after copies_arrived().
template <int BYTES> __device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
#ifdef __CUDACC__
  const unsigned to = unsigned(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16)  // past the first cache: every byte of a tile is read once
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid ? 16 : 0) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(global), "r"(valid ? BYTES : 0), "n"(BYTES) : "memory");
#else
  cuda_cpu::copy_async(shared, global, BYTES, valid);
#endif
}
__device__ __forceinline__ void copy_16(void* shared, const void* global, bool valid) { copy_async<16>(shared, global, valid); }
__device__ __forceinline__ void copies_arrived() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_all;" ::: "memory");
#else
  cuda_cpu::wait_copies(-1);
#endif
}
// A thread's copies since the last call are one group; all but its GROUPS youngest groups have arrived after the second.
__device__ __forceinline__ void end_copy_group() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  cuda_cpu::end_copy_group();
#endif
}
template <int GROUPS> __device__ __forceinline__ void copy_groups_arrived() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
#else
  cuda_cpu::wait_copies(GROUPS);
#endif
}

// Four 8 x 8 matrices of 16-bit elements; lane l names the row l % 8 of matrix l / 8 (16 bytes, aligned).
template <bool TRANSPOSE> __device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
#ifdef __CUDACC__
  const unsigned from = unsigned(__cvta_generic_to_shared(row));
  if constexpr (TRANSPOSE)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
#else
  const auto all = cuda_cpu::gather<1>({reinterpret_cast<uint64_t>(row)});
  const int g = cuda_cpu::lane() / 4, t = cuda_cpu::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    auto element = [&](int r, int c) { return uint32_t(reinterpret_cast<const uint16_t*>(all[8 * i + r][0])[c]); };
    r[i] = TRANSPOSE ? element(2 * t, g) | element(2 * t + 1, g) << 16 : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
  }
#endif
}

#ifndef __CUDACC__
// c += a b for one warp: element (row, k) of a is `a_at`, (k, column) of b is `b_at`, each out of what the lanes hold.
template <int K, class AtA, class AtB> void mma_on_host(float (&c)[4], AtA a_at, AtB b_at) {
  const int g = cuda_cpu::lane() / 4, t = cuda_cpu::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    float sum = c[i];
    for (int k = 0; k < K; ++k) sum += a_at(row, k) * b_at(k, column);
    c[i] = sum;
  }
}
#endif

// c (16 x 8, float32) += a (16 x 16) b (16 x 8).
template <class T> __device__ __forceinline__ void mma_16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef __CUDACC__
  if constexpr (std::is_same<T, bf16>::value)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  const auto all = cuda_cpu::gather<6>({a[0], a[1], a[2], a[3], b[0], b[1]});
  auto half = [](uint64_t word, int k) {
    const uint16_t bits = uint16_t(word >> 16 * (k % 2));
    if constexpr (std::is_same<T, bf16>::value) return widen(bf16(__nv_bfloat16_raw{bits}));
    else return widen(f16(__half_raw{bits}));
  };
  mma_on_host<16>(
      c, [&](int row, int k) { return half(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k); },
      [&](int k, int column) { return half(all[column * 4 + k % 8 / 2][4 + k / 8], k); });
#endif
}

__device__ __forceinline__ float to_tf32(float x) {
#ifdef __CUDACC__
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return __uint_as_float(y);
#else
  uint32_t y;
  std::memcpy(&y, &x, 4);
  if ((y & 0x7f800000u) != 0x7f800000u) y = (y + 0x1000u) & ~0x1fffu;
  std::memcpy(&x, &y, 4);
  return x;
#endif
}

// c (16 x 8) += a (16 x 8) b (8 x 8), operands rounded by to_tf32.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
#ifdef __CUDACC__
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
                 "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
#else
  auto bits = [](float x) {
    uint32_t y;
    std::memcpy(&y, &x, 4);
    return uint64_t(y & ~0x1fffu);  // what the unit reads: a forgotten to_tf32 truncates
  };
  const auto all = cuda_cpu::gather<6>({bits(a[0]), bits(a[1]), bits(a[2]), bits(a[3]), bits(b[0]), bits(b[1])});
  auto value = [](uint64_t word) {
    const uint32_t y = uint32_t(word);
    float x;
    std::memcpy(&x, &y, 4);
    return x;
  };
  mma_on_host<8>(
      c, [&](int row, int k) { return value(all[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]); },
      [&](int k, int column) { return value(all[column * 4 + k % 4][4 + k / 4]); });
#endif
}

}  // namespace cuda
}  // namespace continuum_ops
