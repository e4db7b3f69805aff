// What the torch side of every CUDA operator needs: the device and stream of a tensor, dtypes, errors.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "continuum_attention.h"  // DType

namespace continuum_ops {

const char* cuda_error_string(int);  // of a cudaError_t

#ifdef CONTINUUM_OPS_CUDA_ON_CPU  // tests: the kernels are compiled for the CPU and take its tensors
#define CO_DEVICE CPU
struct Device {
  explicit Device(const torch::stable::Tensor&) {}
  void* stream() const { return nullptr; }
};
#else
#define CO_DEVICE CUDA
// The device of a tensor is current while this lives.
class Device {
 public:
  explicit Device(const torch::stable::Tensor& t) : index_(t.get_device_index()), guard_(index_) {}

  void* stream() const {
    // In libtorch_cuda.so, which a machine that only builds has not got: looked up in the library that is loaded.
    using Function = int32_t (*)(int32_t, void**);
    static const Function function = [] {
      void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
      return library ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
    }();
    STD_TORCH_CHECK(function != nullptr, "torch's CUDA library is not loaded");
    void* stream = nullptr;
    STD_TORCH_CHECK(function(index_, &stream) == 0, "no current CUDA stream");
    return stream;
  }

 private:
  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
};
#endif

inline DType dtype_of(const torch::stable::Tensor& t) {
  switch (t.scalar_type()) {
    case torch::headeronly::ScalarType::Float: return DType::float32;
    case torch::headeronly::ScalarType::Double: return DType::float64;
    case torch::headeronly::ScalarType::BFloat16: return DType::bfloat16;
    case torch::headeronly::ScalarType::Half: return DType::float16;
    default: STD_TORCH_CHECK(false, "the dtype must be float64, float32, bfloat16 or float16"); return DType::float32;
  }
}

inline void check_success(const char* op, int error) { STD_TORCH_CHECK(error == 0, op, ": ", cuda_error_string(error)); }

template <int N> void copy_strides(const torch::stable::Tensor& t, int64_t (&strides)[N]) {
  for (int i = 0; i < N; ++i) strides[i] = t.size(i) == 1 ? 0 : t.stride(i);
}

}  // namespace continuum_ops
