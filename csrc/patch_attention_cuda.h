// What the torch side of patch attention hands to the CUDA launchers. Neither torch nor CUDA headers: the binding compiles without
// nvcc, and the kernels without torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "continuum_attention.h"  // DType

namespace continuum_ops {

// A tensor (batch, *grid, heads, channels). Sizes and strides count elements; grids of fewer than three axes have ones in front.
struct PatchGrid {
  const void* data;
  int64_t strides[6];  // batch, three axes of the grid, heads, channels
};

struct PatchProblem {
  DType dtype;  // of query, key, value, out and their gradients
  bool tf32;    // one TF32 product for float32 instead of three
  int64_t batch, heads, channels, value_channels;
  int64_t patch[3], query_counts[3], key_counts[3];  // points of a patch, patches of the grids, by axis
  double scale;
  PatchGrid query, key, value;
  const void* weights;  // (weight_entries, *query grid) in the accumulation type (float64 for float64, float32 for the others), or null
  int64_t weight_entries;     // 1 or batch
  int64_t weight_strides[4];  // entries, three axes

  int64_t groups() const { return batch * heads; }
  int64_t points() const { return patch[0] * patch[1] * patch[2]; }
  int64_t query_patches() const { return query_counts[0] * query_counts[1] * query_counts[2]; }
  int64_t key_patches() const { return key_counts[0] * key_counts[1] * key_counts[2]; }
  // Whether the probabilities (batch, heads, query patches, key patches) are kept for the backward: not more than query has elements.
  bool keeps() const { return groups() * query_patches() * key_patches() <= groups() * query_patches() * points() * channels; }
};

struct PatchOutput {  // contiguous
  void* out;            // dtype (batch, *query grid, heads, value_channels)
  void* lse;            // accumulation type (batch, heads, query patches)
  void* probabilities;  // accumulation type (batch, heads, query patches, key patches), or null: not kept
};

struct PatchGradients {
  PatchGrid grad_out;
  const void* grad_lse;  // accumulation type (batch, heads, query patches), or null
  int64_t grad_lse_strides[3];
  const void* probabilities;  // as the forward pass kept them, or null: computed again
  // Results, contiguous, null where not wanted: grad_weights in the accumulation type, the others in dtype.
  void *grad_query, *grad_key, *grad_value, *grad_weights;
};

// Device memory that a call needs beside its outputs, 256-byte aligned.
size_t patch_attention_scratch_bytes(const PatchProblem&, const PatchGradients*);
// 0 or a cudaError_t; stream is a cudaStream_t.
int patch_attention_forward_cuda(const PatchProblem&, const PatchOutput&, void* scratch, void* stream);
int patch_attention_backward_cuda(const PatchProblem&, const PatchGradients&, void* scratch, void* stream);

}  // namespace continuum_ops
