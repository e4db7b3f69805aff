// Continuum attention on one core for one instruction set: compiled once per CO_ISA_*.
//
// Lanes hold queries. A block of queries meets the keys block by block (flash style, O(block) scratch):
//   S^T = K Q^T   rows of K are read as scalars and spread over the lanes, R keys x C vectors of queries in registers
//   P^T = 2^(S^T + log2 w - m)   in the same registers
//   O^T += V^T P^T   R channels x C vectors of queries in registers
// If |q| max|k| bounds every exponent of the block (Cauchy-Schwarz), no running maximum is needed (m = 0). Otherwise m is raised
// lazily: only when a score exceeds it by 2^24, which float32 sums bear without loss. Few keys get the exact maximum: the
// largest term is then exactly 1, and what cancels in the gradient of a nearly one-hot row cancels to the last bit.
#include "continuum_attention_backward.h"
#include "continuum_attention_forward.h"

namespace continuum_ops::CO_ISA {
namespace {

template <class T> struct Tag { using type = T; };
template <class F> CO_INLINE auto by_dtype(DType t, F f) {
  switch (t) {
    case DType::float64: return f(Tag<double>{}, Tag<double>{});
    case DType::bfloat16: return f(Tag<float>{}, Tag<bfloat16>{});
    case DType::float16: return f(Tag<float>{}, Tag<float16>{});
    default: return f(Tag<float>{}, Tag<float>{});
  }
}

template <class T> size_t scratch_for(const AttentionProblem& a, bool backward) {
  constexpr int64_t QB = Shape<T>::QB, L = lanes<T>;
  int64_t count = 2 * KB * QB + KB * (a.d + a.dv);  // factors, mask, key and value buffers
  count += backward ? 2 * (KB + PAD) * QB + STRIP * QB * (2 * a.d + a.dv + round_up(a.d, L) + round_up(a.dv, L) + 3) + QB
                    : KB * QB + STRIP * QB * (a.d + 2 * a.dv + 3);
  if (a.distance.given) count += KB * QB + (KB + 2 * STRIP * QB) * a.distance.dims + STRIP * QB;
  return size_t(count) * sizeof(T) + (9 + 11 * STRIP) * 64;  // each piece starts on a cache line
}

size_t scratch_bytes(const AttentionProblem& a, bool backward) {
  return a.dtype == DType::float64 ? scratch_for<double>(a, backward) : scratch_for<float>(a, backward);
}

double max_norm(const AttentionProblem& a, int64_t lead, const KeySet& keys) {
  return by_dtype(a.dtype, [&](auto t, auto s) { return max_norm_of<typename decltype(t)::type, typename decltype(s)::type>(a, lead, keys); });
}

void forward_any(const AttentionProblem& a, const AttentionOutput& o, int64_t lead, int64_t block_begin, int64_t block_end, void* scratch) {
  by_dtype(a.dtype, [&](auto t, auto s) {
    forward<typename decltype(t)::type, typename decltype(s)::type>(a, o, lead, block_begin, block_end, scratch);
  });
}

void backward_any(const AttentionProblem& a, const AttentionGradients& g, void* scratch) {
  by_dtype(a.dtype, [&](auto t, auto s) { backward<typename decltype(t)::type, typename decltype(s)::type>(a, g, scratch); });
}

#define CO_STRING_(x) #x
#define CO_STRING(x) CO_STRING_(x)
}  // namespace

extern const ContinuumAttentionKernels continuum_attention = {
    CO_STRING(CO_ISA), Shape<float>::QB, Shape<double>::QB, KB, STRIP, scratch_bytes, max_norm, forward_any, backward_any};

}  // namespace continuum_ops::CO_ISA