// What is thrown where memory cannot be had: how much it was, and what needs less.
#pragma once

#include <cstdint>
#include <cstdio>
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

}  // namespace continuum_ops
