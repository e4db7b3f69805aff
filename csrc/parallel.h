// Independent tasks on torch's threads. Tasks are taken in order by whoever is free: their results must not depend on that.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#if defined(__SANITIZE_THREAD__)
#include <thread>
#include <vector>
#endif

#include "memory.h"

namespace continuum_ops {

// Scratch of the calling thread. Small pieces are kept for its next call: taking fresh pages costs more than a small
// problem. Under AddressSanitizer nothing is kept, so that every overrun is seen.
class Scratch {
 public:
  explicit Scratch(size_t bytes) {
    if (bytes == 0) return;
    static thread_local Kept kept;
    if (bytes <= KEEP) {
      if (kept.bytes < bytes) {
        std::free(kept.data);
        kept.data = nullptr, kept.bytes = 0;
        kept.data = allocate(bytes), kept.bytes = bytes;
      }
      data_ = kept.data;
    } else {
      data_ = owned_ = allocate(bytes);
    }
  }
  ~Scratch() { std::free(owned_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* get() const { return data_; }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t KEEP = 0;
#else
  static constexpr size_t KEEP = size_t(4) << 20;
#endif
  struct Kept {
    void* data = nullptr;
    size_t bytes = 0;
    ~Kept() { std::free(data); }
  };
  void *data_ = nullptr, *owned_ = nullptr;

  static void* allocate(size_t bytes) {
    void* p = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p) throw OutOfMemory(double(bytes));
    return p;
  }
};

// Whether this thread has had tasks run by several. A forked child has none of them, but torch's pool goes on counting on them.
inline thread_local bool started_threads = false;

// f(task, scratch); `work` estimates the multiplications of all tasks: small jobs are not worth waking threads for. A thread that gets
// no scratch leaves its tasks to the others. Nothing but a lack of memory may be thrown out of a task: torch would lose the message.
template <class F> void run_tasks(int64_t tasks, double work, size_t scratch_bytes, F f) {
  if (tasks <= 0) return;
  const int64_t threads = work < 2e5 ? 1 : std::min<int64_t>(torch::stable::get_num_threads(), tasks);
  std::atomic<int64_t> next{0}, done{0};
  auto worker = [&] {
    const Scratch scratch(scratch_bytes);
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) f(t, scratch.get()), ++done;
  };
  std::atomic<bool> told{false};
  double missing = 0;
  auto guarded = [&] {
    try {
      worker();
    } catch (const OutOfMemory& error) {
      if (!told.exchange(true)) missing = error.bytes;
    } catch (const std::bad_alloc&) {
    }
  };
  if (threads == 1) {
    guarded();
  } else {
    started_threads = true;
#if defined(__SANITIZE_THREAD__)  // which knows these, but not the barriers of an OpenMP that it has not instrumented
    std::vector<std::thread> pool;
    for (int64_t t = 0; t < threads; ++t) pool.emplace_back(guarded);
    for (std::thread& thread : pool) thread.join();
#else
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { guarded(); });
#endif
  }
  if (done != tasks) throw OutOfMemory(missing);
}

}  // namespace continuum_ops
