// What the torch side of position_attention hands to the kernels. Free of torch.
//
// Two sides meet: the points of one lie in the lanes of vectors, LANE_BLOCK at a time; those of the other come one by one, in tiles
// of DEPTH_TILE. Forward: queries in lanes, keys in tiles. Backward: keys in lanes, queries in tiles. Either way the lane side
// collects  to[lane point, column] += sum over the tile of p[point, lane point] x[point, column],  columns = batch entries x channels.
#pragma once

#include "continuum_attention.h"  // DType

namespace continuum_ops {

constexpr int64_t LANE_BLOCK = 96, DEPTH_TILE = 64;

// A strided tensor (batch, heads, rows, columns); strides count elements.
struct BatchedOperand {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, column = 0;
};

// The points of one side in the order in which they are visited. T is the accumulation type.
struct PointSet {
  int64_t count = 0, padded = 0;      // padded: a multiple of LANE_BLOCK; points past count repeat the last one
  const int64_t* place = nullptr;     // their rows in the tensors
  const void* coordinate = nullptr;   // T (d, padded); with split positions (2 d, padded): the rounding remainders follow
  const double* block_box = nullptr;  // per lane block: d lower, d upper bounds; infinite if a coordinate is not finite
  const double* tile_box = nullptr;   // the same per depth tile
};

// What shares one geometry: the whole batch or one entry of it.
struct PositionGroup {
  int64_t first_entry = 0;  // its entries of the batch: first_entry .. first_entry + entries - 1
  PointSet query, key;
  const uint8_t* skip = nullptr;  // heads that are not wanted here; null: all are
  const void* bias = nullptr;  // T (key.padded): log2(w_k / max w); null if it is 0 for every key
  double log2_max_weight = 0, min_bias = 0;
  const void* reach = nullptr;         // T (query.padded): r^2 (1 + 8 eps); null without a radius
  const double* tile_reach = nullptr;  // its largest value per depth tile of queries
  const double* block_reach = nullptr;

  // forward: values by column panels, one set per value head; per key tile, whether a value is not finite
  const void* value = nullptr;
  const uint8_t* special_value = nullptr;

  // backward: values transposed per lane block of keys; grad_out by column panels, one set per head
  const void* value_transposed = nullptr;
  const void* grad_out = nullptr;
  const uint8_t *special_block = nullptr, *special_tile = nullptr;
  // of the queries, T (heads, query.padded), but nearest: (query.padded)
  const void *nearest = nullptr, *shift = nullptr, *inverse_sum = nullptr, *delta = nullptr;
  // the largest and smallest distance^2 of a query of the tile to its nearest key that is not at its place
  const double *tile_far = nullptr, *tile_near = nullptr;
};

struct PositionProblem {
  DType dtype;  // of value and out
  bool split;   // positions are float64, T is float32
  int64_t entries, heads, value_heads, n, m, d, c;
  const double* rate;    // (heads)
  const double* period;  // (d), infinite where not periodic; null if nowhere
  BatchedOperand value;

  int64_t columns() const { return entries * c; }
};

struct PositionOutput {  // contiguous
  void* out;    // dtype (batch, heads, n, c)
  void* lse;    // T (groups, heads, n); null if not wanted
  void* stats;  // null if not wanted, else T (groups, heads, n, 2): d^2 to the nearest key, and sum_k w_k / max w 2^(t_ik - shift_i)
};

struct PositionGradients {
  bool value, scores;  // what is wanted: the gradient of value; those of positions, rate or weights
  int64_t block_begin, block_end;  // lane blocks of keys
  int64_t tile_begin, tile_end;    // depth tiles of queries
  // Destinations, T, of one group. Rows are those of the tensors but grad_query_pos's, which are in visiting order.
  void* grad_value;      // (entries, value_heads, m, c), written
  void* grad_key_pos;    // (m, d), written
  void* grad_bias;       // (m), written: d / d log w
  void* grad_query_pos;  // (query.count, d), added to
  double* grad_rate;     // (heads), added to
};

struct PositionAttentionKernels {
  int64_t (*padded_columns)(const PositionProblem&);  // elements of a row of values in panels
  int64_t (*panels)(const PositionProblem&);
  size_t (*forward_scratch)(const PositionProblem&, const PositionGroup&, int64_t panels);
  size_t (*backward_scratch)(const PositionProblem&);
  // Rows row_begin .. row_end of the visiting order into panels of `rows` rows; returns whether one is not finite.
  bool (*pack_panels)(const PositionProblem&, const BatchedOperand&, int64_t first_entry, int64_t head, const PointSet&, int64_t row_begin,
                      int64_t row_end, void* to, void* scratch);
  bool (*pack_transposed)(const PositionProblem&, const PositionGroup&, int64_t value_head, int64_t block, void* to, void* scratch);
  // As pack_panels, for grad_out; rows without a key become 0. delta_i = grad_out_i . out_i over all columns.
  bool (*pack_gradient)(const PositionProblem&, const BatchedOperand& grad_out, const void* out, const PositionGroup&, int64_t head,
                        int64_t row_begin, int64_t row_end, void* to, void* delta, void* scratch);
  // Of the queries of a lane block: distance^2 to the nearest key and to the nearest not at their place, T (LANE_BLOCK), the first where
  // it is wanted; and, if the weights are so uneven that it matters, the shift of their exponents per head, T (heads, query.padded).
  void (*near_keys)(const PositionProblem&, const PositionGroup&, int64_t block, void* nearest, void* apart, void* shift, void* scratch);
  void (*forward)(const PositionProblem&, const PositionGroup&, const PositionOutput&, int64_t group, int64_t block, int64_t panel_begin,
                  int64_t panel_end, void* scratch);
  void (*backward)(const PositionProblem&, const PositionGroup&, const PositionGradients&, void* scratch);
};

namespace avx512 { extern const PositionAttentionKernels position_attention; }
namespace avx2 { extern const PositionAttentionKernels position_attention; }
namespace generic { extern const PositionAttentionKernels position_attention; }

}  // namespace continuum_ops
