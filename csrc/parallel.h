// Independent tasks on torch's threads. Tasks are taken in order by whoever is free: their results must not depend on that.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

namespace continuum_ops {

using Scratch = std::unique_ptr<void, decltype(&std::free)>;

inline Scratch make_scratch(size_t bytes) {
  void* p = std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
  if (!p) throw std::bad_alloc();
  return {p, &std::free};
}

// f(task, scratch); `work` estimates the multiplications of all tasks: small jobs are not worth waking threads for.
template <class F> void run_tasks(int64_t tasks, double work, size_t scratch_bytes, F f) {
  if (tasks <= 0) return;
  const int64_t threads = work < 2e5 ? 1 : std::min<int64_t>(torch::stable::get_num_threads(), tasks);
  std::atomic<int64_t> next{0};
  auto worker = [&] {
    const Scratch scratch = make_scratch(scratch_bytes);
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) f(t, scratch.get());
  };
  if (threads == 1) {
    worker();
  } else {
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { worker(); });
  }
}

}  // namespace continuum_ops
