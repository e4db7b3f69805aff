// Position attention on one core for one instruction set: compiled once per CO_ISA_*.
//
// Scores are direct differences, exponents are relative to the nearest key of each query: the largest term is the weight of that key,
// so that nothing overflows or vanishes whatever the rate. A tile of probabilities is computed once per head and applied to all
// batch entries and channels as one matrix product. Layouts are in position_attention.h.
#include "position_attention_backward.h"
#include "position_attention_forward.h"

namespace continuum_ops::CO_ISA {
namespace {

template <class T> struct Tag { using type = T; };
#define CO_TYPE(t) typename decltype(t)::type
template <class F> CO_INLINE auto by_type(DType t, F f) {
  return t == DType::float64 ? f(Tag<double>{}) : f(Tag<float>{});
}
template <class F> CO_INLINE auto by_dtype(DType t, F f) {
  switch (t) {
    case DType::float64: return f(Tag<double>{}, Tag<double>{});
    case DType::bfloat16: return f(Tag<float>{}, Tag<bfloat16>{});
    case DType::float16: return f(Tag<float>{}, Tag<float16>{});
    default: return f(Tag<float>{}, Tag<float>{});
  }
}

int64_t padded_columns(const PositionProblem& a) {
  return by_type(a.dtype, [&](auto t) { return padded_columns_of<CO_TYPE(t)>(a); });
}
int64_t panels(const PositionProblem& a) {
  return by_type(a.dtype, [&](auto t) { return panels_of<CO_TYPE(t)>(a); });
}
size_t forward_scratch(const PositionProblem& a, const PositionGroup& g, int64_t count) {
  return by_type(a.dtype, [&](auto t) { return forward_scratch_of<CO_TYPE(t)>(a, g, count); });
}
size_t backward_scratch(const PositionProblem& a) {
  return by_type(a.dtype, [&](auto t) { return size_t(BackwardScratch<CO_TYPE(t)>(nullptr, a).end); });
}
bool pack_panels_any(const PositionProblem& a, const BatchedOperand& o, int64_t first_entry, int64_t head, const PointSet& s,
                     int64_t row_begin, int64_t row_end, void* to, void* scratch) {
  return by_dtype(a.dtype, [&](auto t, auto u) {
    return pack_panels<CO_TYPE(t), CO_TYPE(u)>(a, o, first_entry, head, s, row_begin, row_end, to, scratch);
  });
}
bool pack_transposed_any(const PositionProblem& a, const PositionGroup& g, int64_t value_head, int64_t block, void* to, void* scratch) {
  return by_dtype(a.dtype, [&](auto t, auto u) { return pack_transposed<CO_TYPE(t), CO_TYPE(u)>(a, g, value_head, block, to, scratch); });
}
bool pack_gradient_any(const PositionProblem& a, const BatchedOperand& grad_out, const void* out, const PositionGroup& g, int64_t head,
                       int64_t row_begin, int64_t row_end, void* to, void* delta, void* scratch) {
  return by_dtype(a.dtype, [&](auto t, auto u) {
    return pack_gradient<CO_TYPE(t), CO_TYPE(u)>(a, grad_out, out, g, head, row_begin, row_end, to, delta, scratch);
  });
}
void near_keys(const PositionProblem& a, const PositionGroup& g, int64_t block, void* nearest, void* apart, void* shift, void* scratch) {
  by_type(a.dtype, [&](auto t) { near_keys_of<CO_TYPE(t)>(a, g, block, nearest, apart, shift, scratch); });
}
void forward_any(const PositionProblem& a, const PositionGroup& g, const PositionOutput& o, int64_t group, int64_t block,
                 int64_t panel_begin, int64_t panel_end, void* scratch) {
  by_dtype(a.dtype, [&](auto t, auto u) {
    forward<CO_TYPE(t), CO_TYPE(u)>(a, g, o, group, block, panel_begin, panel_end, scratch);
  });
}
void backward_any(const PositionProblem& a, const PositionGroup& g, const PositionGradients& out, void* scratch) {
  by_type(a.dtype, [&](auto t) { backward<CO_TYPE(t)>(a, g, out, scratch); });
}

}  // namespace

extern const PositionAttentionKernels position_attention = {
    padded_columns,      panels,            forward_scratch, backward_scratch, pack_panels_any,
    pack_transposed_any, pack_gradient_any, near_keys,       forward_any,      backward_any};

}  // namespace continuum_ops::CO_ISA
