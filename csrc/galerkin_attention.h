// What the torch side of galerkin_attention hands to its kernels for small problems. Free of torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace continuum_ops {

struct GalerkinMatrix {  // strides count elements
  const void* data = nullptr;
  int64_t row_stride = 0, column_stride = 0;
};

struct GalerkinProblem {  // all leads alike; float64 or float32
  bool wide;
  int64_t n, m, d, dv;
};

struct GalerkinLead {
  GalerkinMatrix query, key, value, grad_out;
  const void* weights = nullptr;  // (m); null: 1 / m
  int64_t weights_stride = 0;
  // Contiguous destinations. forward writes out (n, dv), backward the gradients; grad_weights may be null.
  void *out = nullptr, *grad_query = nullptr, *grad_key = nullptr, *grad_value = nullptr, *grad_weights = nullptr;
};

struct GalerkinAttentionKernels {
  size_t (*scratch_bytes)(const GalerkinProblem&);
  void (*forward)(const GalerkinProblem&, const GalerkinLead&, void* scratch);
  void (*backward)(const GalerkinProblem&, const GalerkinLead&, void* scratch);
};

namespace avx512 { extern const GalerkinAttentionKernels galerkin_attention; }
namespace avx2 { extern const GalerkinAttentionKernels galerkin_attention; }
namespace generic { extern const GalerkinAttentionKernels galerkin_attention; }

}  // namespace continuum_ops
