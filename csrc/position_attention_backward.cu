// Position attention on CUDA, backward: see position_attention.cu.
#include "position_attention_launch.cuh"
#include "position_attention_reductions.cuh"
#include "position_attention_scores.cuh"

namespace continuum_ops {
namespace cuda {
namespace {

template <class T, bool TF32, bool TRANSPOSED, class A>
void launch_score_sums(Launcher& launch, const PositionProblem& p, const Geometry<A>& geo, const Columns<T>& grad_out, const Columns<T>& value,
                       A* sums, bool positions) {
  if (!sums) return;
  using S = SideShape<Tile<T, TF32>>;
  constexpr int AXES = AXES_OF_LAUNCH<A>;
  const int64_t tiles = (TRANSPOSED ? geo.key.pad : geo.query.pad) / ROWS;
  for (int axis = 0; axis == 0 || (positions && axis < p.d); axis += AXES) {
    const ScoreSums<A> o{sums, TRANSPOSED ? p.m : p.n, TRANSPOSED ? p.n : p.m, p.columns(), int(p.value_heads), axis,
                         positions ? int(std::min<int64_t>(AXES, p.d - axis)) : 0};
    launch(score_sums<T, TF32, TRANSPOSED>, geo.geometries * p.heads * tiles, SUM_THREADS, 2 * size_t(ROWS) * S::PITCH * sizeof(T), geo, grad_out, value, o);
  }
}

template <class T, bool TF32> int backward(const PositionProblem& p, const PositionGradients& grads, void* memory, void* stream) {
  using A = typename Tile<T, TF32>::Acc;
  Scratch scratch(memory);
  Pieces<A> pieces(p, &grads, scratch);
  Geometry<A>& geo = pieces.geo;
  Launcher launch(stream);
  pack(launch, p, pieces);
  const Columns<T> grad_out = columns_of<T>(p, grads.grad_out, grads.grad_out_strides), value = columns_of<T>(p, p.value, p.value_strides);
  const Strided3<A> grad_lse{static_cast<const A*>(grads.grad_lse), {grads.grad_lse_strides[0], grads.grad_lse_strides[1], grads.grad_lse_strides[2]}};
  launch(pack_rows<T, A>, geo.drop.entries * geo.drop.pad / PACK_ROWS, 32 * PACK_ROWS, 0, geo, grad_out, static_cast<const T*>(grads.forward.out),
         static_cast<const A*>(grads.forward.stats), grad_lse, p.batch, p.channels);
  launch(find_tops<A>, geo.nearest.entries * geo.nearest.pad / POINTS, POINTS, 0, geo.nearest);
  launch(find_tops<A>, geo.drop.entries * geo.drop.pad / POINTS, POINTS, 0, geo.drop);
  if (grads.grad_value) {
    const SumOutput<T, A> o{static_cast<T*>(grads.grad_value), nullptr, nullptr, p.m, p.n, p.columns(), int(p.value_heads), int(p.heads)};
    launch_sum<T, TF32, true>(launch, geo, grad_out, o);
  }
  launch_score_sums<T, TF32, false>(launch, p, geo, grad_out, value, pieces.query_sums, grads.grad_query_pos != nullptr);
  launch_score_sums<T, TF32, true>(launch, p, geo, grad_out, value, pieces.key_sums, grads.grad_key_pos != nullptr);
  auto positions = [&](void* to, const A* sums, int64_t entries, int64_t rows, A sign) {
    if (to) launch(reduce_positions<A>, (entries * rows * p.d + REDUCE_THREADS - 1) / REDUCE_THREADS, REDUCE_THREADS, 0, geo, static_cast<A*>(to), sums, entries, rows, sign);
  };
  positions(grads.grad_query_pos, pieces.query_sums, p.query_entries, p.n, A(-2));
  positions(grads.grad_key_pos, pieces.key_sums, p.key_entries, p.m, A(2));
  if (grads.grad_weights) {
    const Strided2<A> weights{static_cast<const A*>(p.weights), {p.weights_strides[0], p.weights_strides[1]}};
    launch(reduce_weights<A>, (p.weight_entries * p.m + REDUCE_THREADS - 1) / REDUCE_THREADS, REDUCE_THREADS, 0, geo, static_cast<A*>(grads.grad_weights),
           pieces.key_sums, weights, p.weight_entries, p.m);
  }
  if (grads.grad_rate) {
    const bool from_queries = pieces.query_sums != nullptr;
    launch(reduce_rate<A>, p.heads, REDUCE_THREADS, 0, geo, static_cast<A*>(grads.grad_rate), from_queries ? pieces.query_sums : pieces.key_sums,
           from_queries ? p.n : p.m);
  }
  return launch.status();
}

}  // namespace
}  // namespace cuda

int position_attention_backward_cuda(const PositionProblem& p, const PositionGradients& gradients, void* scratch, void* stream) {
  switch (p.dtype) {
    case DType::float64: return cuda::backward<double, false>(p, gradients, scratch, stream);
    case DType::bfloat16: return cuda::backward<cuda::bf16, false>(p, gradients, scratch, stream);
    case DType::float16: return cuda::backward<cuda::f16, false>(p, gradients, scratch, stream);
    default: return p.tf32 ? cuda::backward<float, true>(p, gradients, scratch, stream) : cuda::backward<float, false>(p, gradients, scratch, stream);
  }
}

}  // namespace continuum_ops
