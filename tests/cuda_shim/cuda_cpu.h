// Test-only: compile a .cu file as plain C++20 with g++/clang++ and run its kernels on the CPU.
//   g++ -std=c++20 -x c++ -include cuda_cpu.h -I<stub dir> kernels.cu
// Every CUDA thread is a fiber (ucontext); a block's fibers run in one OS thread, in a seeded random order that changes at
// every barrier, so a missing __syncthreads shows as a wrong result under some seed. Blocks run one after another.
// Covers what the kernels use: grid/block indices, static and dynamic __shared__, __syncthreads(+_and/_or), __shfl_xor_sync,
// half/bf16 scalars through the toolkit's own headers, <<<>>> via CUDA_LAUNCH.
// Warp-wide instructions in PTX need a host version beside them; gather() is what it is made of.
// An asynchronous copy writes when its thread waits for it, and NaN until then: a missing or early wait shows.
// Not: inline PTX itself, textures, cooperative groups, streams' concurrency, real timing.
#pragma once
#include <csetjmp>
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define CC_ASAN 1
#endif

#include <vector_types.h>       // dim3, float4, ... from the toolkit (host headers only)
#include <vector_functions.h>
#include <driver_types.h>       // cudaError_t, cudaStream_t
#undef __shared__
#undef __global__
#undef __device__
#undef __host__
#undef __forceinline__
#undef __launch_bounds__
#undef __constant__
#define __shared__ static thread_local
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace cuda_cpu {
struct Copy { void* to; char bytes[16]; int count; long group; };
struct Fiber {
  ucontext_t ctx;  // entered once; later switches jump, since swapcontext asks the kernel for the signal mask every time
  jmp_buf jump;
  bool entered = false;
  std::unique_ptr<char[]> stack;
  uint3 tid{};
  int lin = 0;
  bool done = false;
  enum { RUN, BLOCK, WARP } wait = RUN;
  unsigned warp_mask = 0;
  std::vector<Copy> copies;  // asynchronous, not waited for
  long copy_group = 0;
#ifdef CC_ASAN
  void* fake = nullptr;
#endif
};
constexpr int WORDS = 8;
struct Warp { uint64_t slot[2][32]; unsigned parity[32]; uint64_t wide[2][32][WORDS]; unsigned wide_parity[32]; };
constexpr size_t STACK = 256 << 10;
struct Block {
  std::vector<Fiber> f;
  std::vector<Warp> w;
  std::vector<char> dyn;
  dim3 bdim;
  uint3 bid{};
  ucontext_t main;
  jmp_buf jump;
  Fiber* cur = nullptr;
  int count[2] = {0, 0};
  std::function<void()> body;
#ifdef CC_ASAN
  void* fake = nullptr; const void* mstack = nullptr; size_t msize = 0;
#endif
};
inline thread_local Block* B = nullptr;
inline unsigned& seed() { static unsigned s = 1; return s; }

inline void to_main(bool dying = false) {
  Fiber* c = B->cur;
#ifdef CC_ASAN
  __sanitizer_start_switch_fiber(dying ? nullptr : &c->fake, B->mstack, B->msize);
#endif
#ifdef CC_ASAN
  swapcontext(&c->ctx, &B->main);
#else
  if (!_setjmp(c->jump)) _longjmp(B->jump, 1);
#endif
#ifdef CC_ASAN
  __sanitizer_finish_switch_fiber(c->fake, &B->mstack, &B->msize);
#endif
}
inline void entry() {
#ifdef CC_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &B->mstack, &B->msize);
#endif
  B->body();
  B->cur->done = true;
  to_main(true);
}
inline void barrier() { B->cur->wait = Fiber::BLOCK; to_main(); }
inline void copy_async(void* to, const void* from, int count, bool valid) {
  Copy c{to, {}, count, B->cur->copy_group};
  if (valid) memcpy(c.bytes, from, count);
  memset(to, 0xff, count);
  B->cur->copies.push_back(c);
}
inline void end_copy_group() { ++B->cur->copy_group; }
inline void wait_copies(int groups) {  // all but so many of the groups that have ended; -1: all copies
  auto& all = B->cur->copies;
  const long last = B->cur->copy_group - groups;
  std::erase_if(all, [&](const Copy& c) { const bool due = groups < 0 || c.group < last; if (due) memcpy(c.to, c.bytes, c.count); return due; });
}
inline int lane() { return B->cur->lin & 31; }
inline Warp& warp() { return B->w[B->cur->lin >> 5]; }
inline void warp_barrier(unsigned mask) {
  if (!(mask >> lane() & 1)) { fprintf(stderr, "cuda_cpu: lane %d calls *_sync without its bit in mask %08x\n", lane(), mask); abort(); }
  B->cur->warp_mask = mask; B->cur->wait = Fiber::WARP; to_main();
}

inline void run_block(Block& b) {
  B = &b;
  const int n = b.bdim.x * b.bdim.y * b.bdim.z;
  for (int i = 0; i < n; ++i) {
    Fiber& f = b.f[i];
    f.copies.clear();
    f.lin = i; f.done = false; f.entered = false; f.wait = Fiber::RUN;
    f.tid = {i % b.bdim.x, i / b.bdim.x % b.bdim.y, i / (b.bdim.x * b.bdim.y)};
    getcontext(&f.ctx);
    f.ctx.uc_stack.ss_sp = f.stack.get(); f.ctx.uc_stack.ss_size = STACK; f.ctx.uc_link = nullptr;
    makecontext(&f.ctx, entry, 0);
  }
  std::vector<int> order(n);
  for (int i = 0; i < n; ++i) order[i] = i;
  std::mt19937 rng(seed());
  auto run = [&](Fiber& f) {
    b.cur = &f;
#ifdef CC_ASAN
    __sanitizer_start_switch_fiber(&b.fake, f.stack.get(), STACK);
#endif
#ifdef CC_ASAN
    swapcontext(&b.main, &f.ctx);
#else
    if (!_setjmp(b.jump)) {
      if (f.entered) _longjmp(f.jump, 1);
      f.entered = true;
      setcontext(&f.ctx);
    }
#endif
#ifdef CC_ASAN
    __sanitizer_finish_switch_fiber(b.fake, nullptr, nullptr);
#endif
  };
  int left = n;
  while (left) {
    if (seed()) std::shuffle(order.begin(), order.end(), rng);
    bool progress = false;
    for (int i : order) {
      Fiber& f = b.f[i];
      if (f.done || f.wait != Fiber::RUN) continue;
      run(f); progress = true;
      if (f.done) --left;
      if (!f.done && f.wait == Fiber::WARP) {      // release as soon as all lanes of the mask are here
        const int w0 = i & ~31; bool all = true;
        for (int l = 0; l < 32 && all; ++l)
          if (f.warp_mask >> l & 1) { if (w0 + l >= n) continue; Fiber& g = b.f[w0 + l]; if (!g.done && !(g.wait == Fiber::WARP && g.warp_mask == f.warp_mask)) all = false; }
        if (all) for (int l = 0; l < 32; ++l) if ((f.warp_mask >> l & 1) && w0 + l < n) b.f[w0 + l].wait = Fiber::RUN;
      }
    }
    if (progress) continue;
    bool block = left > 0;                          // nobody can run: either a full block barrier, or a deadlock
    for (auto& f : b.f) if (!f.done && f.wait != Fiber::BLOCK) block = false;
    if (!block) { fprintf(stderr, "cuda_cpu: deadlock (divergent barrier or shuffle) in block %u,%u,%u\n", b.bid.x, b.bid.y, b.bid.z); abort(); }
    b.count[0] = b.count[1]; b.count[1] = 0;
    for (auto& f : b.f) f.wait = Fiber::RUN;
  }
}
template <class K, class... A>
void launch(K k, dim3 g, dim3 bl, size_t smem, A... a) {
  static thread_local Block b;                      // stacks are kept between launches
  const int n = bl.x * bl.y * bl.z;
  if (n == 0 || n > 1024 || smem > 232448) { fprintf(stderr, "cuda_cpu: invalid launch\n"); abort(); }
  if ((int)b.f.size() != n) { b.f = std::vector<Fiber>(n); for (auto& f : b.f) f.stack = std::make_unique_for_overwrite<char[]>(STACK); }
  b.w.assign((n + 31) / 32, Warp{});
  b.bdim = bl;
  b.body = [&] { k(a...); };
  for (unsigned z = 0; z < g.z; ++z) for (unsigned y = 0; y < g.y; ++y) for (unsigned x = 0; x < g.x; ++x) {
    b.bid = {x, y, z};
    b.dyn = std::vector<char>(smem, (char)0xff);    // NaN pattern; exact size, so ASan sees an overrun
    run_block(b);
  }
}
template <class T> T exchange(unsigned mask, T v, int src_lane, bool ok) {
  static_assert(sizeof(T) <= 8);
  Warp& w = warp(); const int l = lane();
  auto& s = w.slot[w.parity[l] ^= 1];               // two buffers: one barrier per exchange is enough
  uint64_t u = 0; memcpy(&u, &v, sizeof(T)); s[l] = u;
  warp_barrier(mask);
  if (!ok) return v;
  if (!(mask >> src_lane & 1)) { fprintf(stderr, "cuda_cpu: shuffle reads lane %d outside mask %08x\n", src_lane, mask); abort(); }
  T r; memcpy(&r, &s[src_lane], sizeof(T)); return r;
}
// What every lane of the warp brought, [lane][word]: the host versions of warp-wide instructions (mma, ldmatrix) are made of it.
using Gathered = const uint64_t (*)[WORDS];
template <int N> Gathered gather(const uint64_t (&mine)[N]) {
  static_assert(N <= WORDS);
  Warp& w = warp(); const int l = lane();
  auto& all = w.wide[w.wide_parity[l] ^= 1];
  for (int i = 0; i < N; ++i) all[l][i] = mine[i];
  warp_barrier(0xffffffffu);
  return all;
}
}  // namespace cuda_cpu

#define threadIdx (cuda_cpu::B->cur->tid)
#define blockIdx (cuda_cpu::B->bid)
#define CUDA_DYN_SMEM(T, name) T* name = reinterpret_cast<T*>(cuda_cpu::B->dyn.data())
#define CUDA_LAUNCH(kernel, grid, block, smem, stream, ...) ((void)(stream), cuda_cpu::launch(kernel, grid, block, smem, __VA_ARGS__))
inline void __syncthreads() { cuda_cpu::barrier(); }
inline int __syncthreads_count(int p) { cuda_cpu::B->count[1] += p != 0; cuda_cpu::barrier(); return cuda_cpu::B->count[0]; }
inline int __syncthreads_or(int p) { return __syncthreads_count(p) != 0; }
inline int __syncthreads_and(int p) { return __syncthreads_count(!p) == 0; }
template <class T> T __shfl_xor_sync(unsigned m, T v, int x, int w = 32) { int l = cuda_cpu::lane(), s = l ^ x; return cuda_cpu::exchange(m, v, s, (s & ~(w - 1)) <= (l & ~(w - 1))); }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
