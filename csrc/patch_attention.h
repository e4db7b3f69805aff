// What the torch side of patch_attention hands to the kernels. Free of torch.
//
// Two kinds of products make up the forward and the backward pass, both read from the grid layout in place:
//   scores  c[h, p, j] = sum over points x and channels of a patch of  row_p(x) . column_j(x)
//   mix     to_p(x)    = sum over j of  matrix[h, p, j] from_j(x)
#pragma once

#include "continuum_attention.h"  // DType

namespace continuum_ops {

// A tensor (B, *grid, H, C) by patches: patch p, point x of it and channel c of sample b and head h lie at
// data[b * batch + h * head + patch[p] + point[x] + c * channel]; strides count elements.
struct PatchOperand {
  void* data = nullptr;
  int64_t channels = 0, batch = 0, head = 0, channel = 0;
  const int64_t *patch = nullptr, *point = nullptr;
};

struct PatchScores {
  DType dtype;
  int64_t keys;   // patches of the column side
  int64_t padded; // elements of a row of c
  int64_t points; // of a patch
  PatchOperand row, column;
  PatchOperand weights;  // of the row side, accumulation type, no heads and channels; data is null without
  bool hide;             // a weight is 0: what is not finite in columns does not meet rows of weight 0
};

// What a call of scores sums: heads, rows (at most ROW_BLOCK), points.
struct PatchPart {
  int64_t head_begin, head_end, row_begin, row_end, point_begin, point_end;
  int64_t head_stride;  // of the scores
};

struct PatchMix {
  DType dtype;
  int64_t depth;         // patches of from
  int64_t points;
  const void* matrix;    // accumulation type; row p of head h of sample b at ((b - first) * heads + h) * head_stride + p * depth
  int64_t first, heads, head_stride;
  PatchOperand from, to;
  bool wide;             // `to` has the accumulation type, else from's
  bool add;              // to what is there
  bool stream;           // `to` is more than caches hold: past them
  bool hide;             // rows of from that are not finite count as 0
  PatchOperand from_weights;  // multiply from; data is null without
  // Multiply `to`, and the gradient of the weights: sum over heads and channels of (mixed before weights) . query.
  PatchOperand to_weights, query, weights_gradient;
};

// Rows of a matrix of scores: softmax, or its derivative. T: accumulation type.
struct PatchRows {
  int64_t keys, padded;
  const void* parts;  // T: sums of scores in `count` parts, part_stride apart; rows padded apart
  int64_t count, part_stride;
  double scale;
  void* p;    // T, rows `keys` apart: the probabilities
  void* lse;  // T, one a row; forward only
  // backward only
  const void* grad_lse;  // T, one a row; may be null
  void *grad;            // T, as p: the gradient of the scores times scale
  void *p_transposed, *grad_transposed;  // T, element (j, row) at j * transposed_stride + row
  int64_t transposed_stride;
};

struct PatchAttentionKernels {
  int64_t (*padded)(DType, int64_t keys);
  int64_t (*chunk_points)(int64_t channels);  // points that are worked on together
  size_t (*scores_scratch)(DType);
  size_t (*mix_scratch)(DType);
  // The sums over the points of a part of sample b, head h and row p at c[h * head_stride + (p - row_begin) * padded].
  void (*scores)(const PatchScores&, int64_t b, const PatchPart&, void* c, void* scratch);
  void (*softmax)(DType, const PatchRows&, int64_t row_begin, int64_t row_end);
  void (*softmax_backward)(DType, const PatchRows&, int64_t row_begin, int64_t row_end);
  // Rows [row_begin, row_end), at most ROW_BLOCK, of the matrix, which are the patches row_offset + row of `to`, for points that are at
  // most MIX_RUN chunks.
  void (*mix)(const PatchMix&, int64_t b, int64_t row_offset, int64_t row_begin, int64_t row_end, int64_t point_begin, int64_t point_end,
              void* scratch);
};

constexpr int64_t ROW_BLOCK = 192, MIX_RUN = 4;

namespace avx512 { extern const PatchAttentionKernels patch_attention; }
namespace avx2 { extern const PatchAttentionKernels patch_attention; }
namespace generic { extern const PatchAttentionKernels patch_attention; }

}  // namespace continuum_ops
