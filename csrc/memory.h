// Memory: large pages, and what is thrown where there is none, how much it was and what needs less.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace continuum_ops {

class OutOfMemory : public std::runtime_error {
 public:
  const double bytes;
  explicit OutOfMemory(double bytes) : std::runtime_error(text(bytes)), bytes(bytes) {}

 private:
  static std::string text(double bytes) {
    char size[64] = "memory";  // of a size that is not known
    if (bytes > 0) std::snprintf(size, sizeof size, "%.3f GiB (%.0f bytes)", bytes / double(1 << 30), bytes);
    return std::string("continuum_ops: ") + size +
           " cannot be allocated; fewer batch entries, heads or queries in a call, or a narrower dtype, need less (docs/memory.md)";
  }
};

// Pages of 2 MiB for large new memory, where the system grants them on request: fresh pages of 4 KiB can cost as much time as what is
// computed into them.
inline void ask_for_large_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = uintptr_t(1) << 21;
  if (bytes < int64_t(2 * page)) return;
  const uintptr_t at = reinterpret_cast<uintptr_t>(data), begin = (at + page - 1) / page * page, end = (at + uintptr_t(bytes)) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // refused: things stay as they are
#endif
}

// A vector of zeros.
template <class T> std::vector<T> zeros_of(int64_t count) {
  try {
    return std::vector<T>(count);
  } catch (const std::bad_alloc&) {
    throw OutOfMemory(double(count) * sizeof(T));
  }
}

// make(), which allocates so many bytes and has no message of its own.
template <class F> auto allocating(double bytes, F make) {
  try {
    return make();
  } catch (const std::exception&) {
    throw OutOfMemory(bytes);
  }
}

// Memory on cache lines. Of small pieces a thread keeps some for its next calls: taking them from the heap, a dozen in a call, costs more
// than a small problem. Under AddressSanitizer nothing is kept, so that every overrun is seen.
class Pieces {
 public:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t SIZE = 0;
#else
  static constexpr size_t SIZE = size_t(16) << 10;
#endif

  static void* take(size_t bytes) {
    Pieces& kept = own();
    if (bytes <= SIZE && kept.count_ > 0) return kept.pieces_[--kept.count_];
    return std::aligned_alloc(64, bytes <= SIZE ? SIZE : (bytes + 63) / 64 * 64);
  }
  static void give(void* piece, size_t bytes) {
    Pieces& kept = own();
    if (bytes <= SIZE && kept.count_ < MOST) kept.pieces_[kept.count_++] = piece; else std::free(piece);
  }

 private:
  static constexpr int MOST = 16;
  void* pieces_[MOST];
  int count_ = 0;

  ~Pieces() {
    while (count_ > 0) std::free(pieces_[--count_]);
  }
  static Pieces& own() {
    static thread_local Pieces kept;
    return kept;
  }
};

}  // namespace continuum_ops
