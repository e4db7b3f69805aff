// What the torch side of position attention hands to the CUDA launchers. Neither torch nor CUDA headers: the binding compiles without
// nvcc, and the kernels without torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "continuum_attention.h"  // DType

namespace continuum_ops {

// Sizes and strides count elements. Positions, rate, weights and radius are in the accumulation type (float64 for float64 values,
// float32 for the others; positions may be wider); a tensor that the batch shares has batch stride 0.
struct PositionProblem {
  DType dtype;  // of value, out, grad_out, grad_value
  bool tf32;    // one TF32 product for float32 instead of three
  int64_t batch, heads, value_heads, n, m, d, channels;
  int64_t query_entries, key_entries, weight_entries, radius_entries;  // 1 (shared) or batch
  bool wide_positions;  // positions are float64 although the accumulation type is float32
  const void *query_pos, *key_pos;  // (entries, points, d)
  int64_t query_pos_strides[3], key_pos_strides[3];
  const void* value;  // (batch, value_heads, m, channels)
  int64_t value_strides[4];
  const void* rate;  // (heads,)
  int64_t rate_stride;
  const void* weights;  // (entries, m), or null: ones
  int64_t weights_strides[2];
  const void* radius;  // (entries, n), or null: infinite
  int64_t radius_strides[2];
  const double* period;  // d numbers on the host, inf: not periodic; or null

  // Batch entries that share their probabilities stand side by side as columns.
  int64_t geometries() const {
    return query_entries == 1 && key_entries == 1 && weight_entries == 1 && radius_entries == 1 ? 1 : batch;
  }
  int64_t columns() const { return geometries() == 1 ? batch * channels : channels; }
};

struct PositionOutput {  // contiguous
  void* out;    // dtype (batch, heads, n, channels)
  void* lse;    // accumulation type (geometries, heads, n)
  void* stats;  // accumulation type (geometries, heads, n, 3): d2 to the nearest key, the shift of the exponents (base 2), their sum
};

struct PositionGradients {
  const void* grad_out;  // dtype (batch, heads, n, channels)
  int64_t grad_out_strides[4];
  const void* grad_lse;  // accumulation type (geometries, heads, n), or null
  int64_t grad_lse_strides[3];
  PositionOutput forward;  // what the forward pass returned
  // Results, contiguous, null where not wanted: grad_value in dtype, the others in the accumulation type.
  void *grad_query_pos, *grad_key_pos, *grad_value, *grad_rate, *grad_weights;
};

// Device memory that a call needs beside its outputs, 256-byte aligned.
size_t position_attention_scratch_bytes(const PositionProblem&, const PositionGradients*);
// 0 or a cudaError_t; stream is a cudaStream_t.
int position_attention_forward_cuda(const PositionProblem&, const PositionOutput&, void* scratch, void* stream);
int position_attention_backward_cuda(const PositionProblem&, const PositionGradients&, void* scratch, void* stream);

}  // namespace continuum_ops
