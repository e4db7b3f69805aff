// What this machine can do at most: FMA, exp2, memory. Prints one JSON object.
// Built and run by ceilings.py (g++ -O3 -march=native -fopenmp); arguments: the thread counts.
//
// Every figure is the best of several repetitions: a ceiling is what the hardware allows, and other processes can
// only lower a sample. Vectors are GCC vector extensions, so the width is whatever -march=native allows.
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
constexpr const char* ISA = "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int WIDTH = 8;
constexpr const char* ISA = "avx2";
#else
constexpr int WIDTH = 4;
constexpr const char* ISA = "generic";
#endif

#if defined(__x86_64__)
#define OPAQUE(x) asm volatile("" : "+v"(x))
#else
#define OPAQUE(x) asm volatile("" : "+w"(x))
#endif

template <int W> struct Vec {
  typedef float f __attribute__((vector_size(W * 4)));
  typedef int32_t i __attribute__((vector_size(W * 4)));
};

constexpr int REPEATS = 7;

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Twelve independent chains hide the latency of two FMA ports. Returns flops.
template <int W> static double fma_kernel(long iterations) {
  typename Vec<W>::f a[12], b, c;
  for (int j = 0; j < 12; j++) a[j] = typename Vec<W>::f{} + (1.0f + 0.01f * j);
  b = typename Vec<W>::f{} + 0.999999f;
  c = typename Vec<W>::f{} + 1e-7f;
  OPAQUE(b);
  OPAQUE(c);
  for (long k = 0; k < iterations; k++) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; j++) a[j] = a[j] * b + c;
  }
  for (int j = 0; j < 12; j++) OPAQUE(a[j]);
  return iterations * 12.0 * W * 2;
}

// 2^t for t in [-126, 0]: round to an integer, degree-5 polynomial on [-1/2, 1/2], scale by the exponent.
template <int W> static inline typename Vec<W>::f exp2_poly(typename Vec<W>::f t) {
  using F = typename Vec<W>::f;
  using I = typename Vec<W>::i;
  auto polynomial = [](F r) {
    F p = F{} + 0.00132764725f;
    p = p * r + 0.00967554189f;
    p = p * r + 0.0555071309f;
    p = p * r + 0.240221202f;
    p = p * r + 0.693146944f;
    return p * r + 1.0f;  // minimax but for the constant, kept at 1
  };
#ifdef __AVX512F__
  if constexpr (W == 16) {
    F n = _mm512_roundscale_ps(t, 0x08);
    return _mm512_scalef_ps(polynomial(t - n), n);
  }
#endif
  const F magic = F{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low mantissa bits
  F shifted = t + magic;
  F p = polynomial(t - (shifted - magic));
  return (F)((I)p + ((I)shifted << 23));
}

constexpr int COUNT = 2048;  // floats: input and output stay in L1

static double exp2_kernel(long iterations) {
  using F = Vec<WIDTH>::f;
  alignas(64) float x[COUNT], y[COUNT];
  for (int i = 0; i < COUNT; i++) x[i] = -0.37f * (i % 64);
  for (long k = 0; k < iterations; k++) {
    float* source = x;
    asm volatile("" : "+r"(source)::"memory");
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i += WIDTH) *(F*)(y + i) = exp2_poly<WIDTH>(*(const F*)(source + i));
    asm volatile("" ::"r"(y) : "memory");
  }
  return iterations * double(COUNT);
}

static double exp2_error() {
  double worst = 0;
  for (float t = -100.0f; t <= 0.0f; t += 0.0137f) {
    double exact = std::exp2(double(t));
    worst = std::max(worst, std::fabs(exp2_poly<WIDTH>(Vec<WIDTH>::f{} + t)[0] - exact) / exact);
  }
  return worst;
}

// Work per second with all threads started together; in units of 1e9.
template <class Kernel> static double rate(Kernel kernel, long iterations, int threads) {
  double best = 0;
  for (int r = 0; r < REPEATS; r++) {
    double total = 0, start = 0, stop = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
      kernel(iterations / 20 + 1);
#pragma omp barrier
#pragma omp master
      start = now();
#pragma omp barrier
      total += kernel(iterations);
#pragma omp barrier
#pragma omp master
      stop = now();
    }
    best = std::max(best, total / (stop - start) * 1e-9);
  }
  return best;
}

static float* map_floats(size_t n) {
  void* p = mmap(nullptr, n * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  return static_cast<float*>(p);
}

// Triad c = a + s b: bytes counted as two reads and one write, GB/s.
static double triad(int threads) {
  const long n = 32L << 20;
  float *a = map_floats(n), *b = map_floats(n), *c = map_floats(n);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < n; i++) a[i] = 1, b[i] = 2, c[i] = 3;
  double best = 0;
  for (int r = 0; r < REPEATS; r++) {
    double start = now();
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < n; i++) c[i] = a[i] + 1.5f * b[i];
    best = std::max(best, 12.0 * n / (now() - start) * 1e-9);
  }
  munmap(a, n * 4), munmap(b, n * 4), munmap(c, n * 4);
  return best;
}

// First touch of fresh 4 KiB pages, GB/s: what a tensor costs that the allocator had given back to the system.
static double first_touch(int threads) {
  const long bytes = 256L << 20;
  double best = 0;
  for (int r = 0; r < 3; r++) {
    char* p = reinterpret_cast<char*>(map_floats(bytes / 4));
    madvise(p, bytes, MADV_NOHUGEPAGE);
    double start = now();
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < bytes; i += 4096) p[i] = 1;
    best = std::max(best, bytes / (now() - start) * 1e-9);
    munmap(p, bytes);
  }
  return best;
}

int main(int argc, char** argv) {
  std::printf("{\"isa\": \"%s\", \"exp2_error\": %.3e, \"threads\": {", ISA, exp2_error());
  for (int k = 1; k < argc; k++) {
    int threads = std::atoi(argv[k]);
    std::printf("%s\"%d\": {\"fma_gflops\": %.1f, ", k > 1 ? ", " : "", threads,
                rate(fma_kernel<WIDTH>, 8000000, threads));
    if (WIDTH > 8) std::printf("\"fma_avx2_gflops\": %.1f, ", rate(fma_kernel<8>, 8000000, threads));
    std::printf("\"exp2_giga_per_s\": %.2f, \"triad_gb_per_s\": %.1f, \"first_touch_gb_per_s\": %.2f}",
                rate(exp2_kernel, 400000 / COUNT * WIDTH * 4, threads), triad(threads), first_touch(threads));
  }
  std::printf("}}\n");
}
