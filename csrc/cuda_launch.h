// Scratch memory and launches, for the files that launch kernels.
#pragma once

#include <limits>

#include "cuda_portable.h"

namespace continuum_ops {
namespace cuda {

constexpr size_t ALIGNMENT = 256;

// Hands out pieces of the scratch memory; without memory it only counts.
class Scratch {
 public:
  explicit Scratch(void* memory) : memory_(static_cast<char*>(memory)) {}
  size_t size() const { return size_; }
  template <class A> A* take(int64_t count) {
    A* piece = memory_ ? reinterpret_cast<A*>(memory_ + size_) : nullptr;
    size_ += (size_t(count) * sizeof(A) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return piece;
  }

 private:
  char* memory_;
  size_t size_ = 0;
};

class Launcher {
 public:
  explicit Launcher(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}
  int status() const { return int(status_); }

  template <class... P, class... A> void operator()(void (*kernel)(P...), int64_t blocks, int threads, size_t shared, A... arguments) {
    if (status_ != cudaSuccess || blocks == 0) return;
    if (blocks > std::numeric_limits<int32_t>::max()) {
      status_ = cudaErrorInvalidConfiguration;
      return;
    }
#ifdef __CUDACC__
    if (shared > 48 * 1024) {
      status_ = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
      if (status_ != cudaSuccess) return;
    }
#endif
    CUDA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(unsigned(threads)), shared, stream_, arguments...);
    status_ = cudaGetLastError();
  }

 private:
  cudaStream_t stream_;
  cudaError_t status_ = cudaSuccess;
};

}  // namespace cuda
}  // namespace continuum_ops
