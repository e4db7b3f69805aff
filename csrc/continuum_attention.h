// What the torch side of continuum_attention hands to the kernels. Free of torch, so that the kernels compile in a second.
#pragma once

#include <cstddef>
#include <cstdint>

namespace continuum_ops {

enum class DType : int { float32, float64, bfloat16, float16 };

// Up to so many keys every row is shifted by its exact maximum: what cancels in the gradient of a nearly one-hot row then cancels to
// the last bit.
constexpr int64_t FEW_KEYS = 512;

// A strided tensor (*leads, rows, columns); offsets and strides count elements.
struct Operand {
  const void* data = nullptr;
  const int64_t* lead_offset = nullptr;
  int64_t row_stride = 0, column_stride = 0;
};

// The keys of one lead that exist: those of positive weight that a key padding mask keeps.
struct KeySet {
  int64_t count = 0;
  const int64_t* index = nullptr;  // their places in 0..m-1; null if all keys exist
  const void* bias = nullptr;      // log2(w_k / max w) in the accumulation type; null if it is 0 for every key
  double log2_max_weight = 0;
  double min_bias = 0;
  double max_norm = 0;  // of the key rows, in the 2-norm; infinite if it is not read or a row is not finite
};

// The term -rate |x_i - y_k|^2 and the radius beyond which a key does not count, all in the accumulation type.
struct DistanceTerm {
  bool given = false;
  int64_t dims = 0;
  Operand query_pos, key_pos;  // (*leads, n, dims), (*leads, m, dims)
  const void* rate = nullptr;  // null: 0
  const int64_t* rate_offset = nullptr;  // of each lead
  Operand radius;              // (*leads, n), its rows being scalars; data is null without a radius
  const double* period = nullptr;  // dims lengths, 0 for an axis that is not periodic; null if none is
};

struct AttentionProblem {
  DType dtype;
  int64_t leads, n, m, d, dv;
  Operand query, key, value;
  Operand mask;  // uint8, (*leads, n, m), nonzero: keep; data is null without a mask that depends on the query
  const KeySet* keys;  // one per lead
  DistanceTerm distance;
  double scale;
  bool is_causal;
  double dropout_p;
  uint64_t seed;
  // Places of the queries and keys in the whole of which these are a part, by which scores are dropped; null: 0, 1, 2, ...
  const int64_t *query_places, *key_places;
};

struct AttentionOutput {  // contiguous
  void* out;    // dtype (leads, n, dv)
  void* lse;    // accumulation type (leads, n); null if not wanted
  void* stats;  // null if not wanted, else accumulation type (leads, n, 2): the shift m of the exponents (base 2) and sum_k w_k/max w 2^(s_ik - m)
};

struct AttentionGradients {
  Operand grad_out;
  const void* grad_lse;  // accumulation type, contiguous; may be null
  const void* out;
  const void* stats;
  // Sums over the keys [key_begin, key_end) of the key set, for the queries [query_begin, query_end):
  int64_t lead, key_begin, key_end, query_begin, query_end;
  // Destinations in the accumulation type, contiguous. grad_query (query_end - query_begin, d) is written; the others, indexed by the
  // key's place in 0..m-1, are added to. grad_bias: d / d log w_k; null if not wanted.
  void *grad_query, *grad_key, *grad_value, *grad_bias;
  // Null if not wanted. grad_query_pos (query_end - query_begin, dims) is written, grad_key_pos and grad_rate are added to.
  void *grad_query_pos, *grad_key_pos;
  double* grad_rate;
};

struct ContinuumAttentionKernels {
  const char* isa;
  int64_t query_block_float, query_block_double, key_block;
  int64_t strip;  // most query blocks of one call of forward
  size_t (*scratch_bytes)(const AttentionProblem&, bool backward);
  // max_k |key_k| over the keys of a set
  double (*max_norm)(const AttentionProblem&, int64_t lead, const KeySet&);
  void (*forward)(const AttentionProblem&, const AttentionOutput&, int64_t lead, int64_t block_begin, int64_t block_end, void* scratch);
  void (*backward)(const AttentionProblem&, const AttentionGradients&, void* scratch);
};

namespace avx512 { extern const ContinuumAttentionKernels continuum_attention; }
namespace avx2 { extern const ContinuumAttentionKernels continuum_attention; }
namespace generic { extern const ContinuumAttentionKernels continuum_attention; }

}  // namespace continuum_ops
