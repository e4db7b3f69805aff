// Position attention on CUDA, forward. Two kernels do the work, each for rows of queries and, transposed, for rows of keys:
//   weighted_sum  rows x columns = P x: the output (rows are queries, x the values), grad_value (rows are keys, x is grad_out)
//   score_sums    sums of the scores' gradient along the rows: gradients of rate, positions and weights (position_attention_backward.cu)
// Every sum has one owner and a fixed order: no atomics, the same bits every time.
#include "position_attention_launch.cuh"

namespace continuum_ops {
namespace cuda {
namespace {

template <class T, bool TF32> int forward(const PositionProblem& p, const PositionOutput& output, void* memory, void* stream) {
  using A = typename Tile<T, TF32>::Acc;
  Scratch scratch(memory);
  Pieces<A> pieces(p, nullptr, scratch);
  Geometry<A>& geo = pieces.geo;
  Launcher launch(stream);
  pack(launch, p, pieces);
  launch(find_shifts<A>, geo.geometries * geo.query.pad / (PACK_THREADS / 8), PACK_THREADS, 0, geo);
  launch(find_tops<A>, geo.nearest.entries * geo.nearest.pad / POINTS, POINTS, 0, geo.nearest);
  launch(find_tops<A>, geo.drop.entries * geo.drop.pad / POINTS, POINTS, 0, geo.drop);
  const SumOutput<T, A> o{static_cast<T*>(output.out), static_cast<A*>(output.lse), static_cast<A*>(output.stats), p.n, p.m, p.columns(),
                          int(p.heads), int(p.value_heads)};
  launch_sum<T, TF32, false>(launch, geo, columns_of<T>(p, p.value, p.value_strides), o);
  return launch.status();
}

}  // namespace
}  // namespace cuda

size_t position_attention_scratch_bytes(const PositionProblem& p, const PositionGradients* gradients) {
  cuda::Scratch scratch(nullptr);
  if (p.dtype == DType::float64) cuda::Pieces<double>(p, gradients, scratch);
  else cuda::Pieces<float>(p, gradients, scratch);
  return scratch.size();
}

int position_attention_forward_cuda(const PositionProblem& p, const PositionOutput& output, void* scratch, void* stream) {
  switch (p.dtype) {
    case DType::float64: return cuda::forward<double, false>(p, output, scratch, stream);
    case DType::bfloat16: return cuda::forward<cuda::bf16, false>(p, output, scratch, stream);
    case DType::float16: return cuda::forward<cuda::f16, false>(p, output, scratch, stream);
    default: return p.tf32 ? cuda::forward<float, true>(p, output, scratch, stream) : cuda::forward<float, false>(p, output, scratch, stream);
  }
}

const char* cuda_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace continuum_ops
