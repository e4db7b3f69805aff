// Patch attention on CUDA, forward: inner products of patches, split over their points (patch_attention_products.cu), a softmax that
// adds the splits, mixing of values (patch_attention_mix.cu). At the usual sizes, up to 192 patches, each tensor is read once and
// written once. Every sum has one owner and a fixed order: no atomics, the same bits every time.
#include "patch_attention_launch.cuh"

namespace continuum_ops {
namespace cuda {
namespace {

template <class T, bool TF32> int forward(const PatchProblem& p, const PatchOutput& output, void* memory, void* stream) {
  using A = typename Tile<T, TF32>::Acc;
  Scratch scratch(memory);
  const Work<T, A> w(p, nullptr, output.probabilities != nullptr, scratch);
  Launcher launch(stream);
  pack_weights(launch, p, w);
  MixOutput<T, A> mixed{};
  mixed.out = contiguous_patches<T>(p, output.out, p.query_counts, p.heads, p.value_channels);
  mixed.alpha = 1;
  for (int64_t group = 0; group < w.groups; group += w.chunk[0]) {
    for (int64_t row = 0; row < w.query_patches; row += w.chunk[1]) {
      const Block block{group, std::min(w.chunk[0], w.groups - group), row, std::min(w.chunk[1], w.query_patches - row), 0, w.key_patches};
      SoftmaxOutput<T, A> o{};
      // Probabilities are kept where one block holds all of them.
      o.matrix = output.probabilities ? static_cast<A*>(output.probabilities) + group * w.query_patches * w.key_patches : w.matrix;
      o.normalised = output.probabilities != nullptr;
      o.lse = static_cast<A*>(output.lse);
      o.coefficients = w.coefficients_of(w.key_patches);
      o.patches = w.query_patches;
      softmax_of_products<T, TF32>(launch, w, block, o);
      mixed.row = row, mixed.rows = block.rows;
      launch_mix<T, TF32, A>(launch, o.coefficients, w.value, {}, block.group, block.groups, w.key_patches, mixed);
    }
  }
  return launch.status();
}

template <class T> size_t scratch_bytes(const PatchProblem& p, const PatchGradients* g) {
  Scratch scratch(nullptr);
  Work<T, typename Tile<T, false>::Acc>(p, g, g ? g->probabilities != nullptr : p.keeps(), scratch);
  return scratch.size();
}

}  // namespace
}  // namespace cuda

size_t patch_attention_scratch_bytes(const PatchProblem& p, const PatchGradients* gradients) {
  switch (p.dtype) {
    case DType::float64: return cuda::scratch_bytes<double>(p, gradients);
    case DType::bfloat16: return cuda::scratch_bytes<cuda::bf16>(p, gradients);
    case DType::float16: return cuda::scratch_bytes<cuda::f16>(p, gradients);
    default: return cuda::scratch_bytes<float>(p, gradients);
  }
}

int patch_attention_forward_cuda(const PatchProblem& p, const PatchOutput& output, void* scratch, void* stream) {
  switch (p.dtype) {
    case DType::float64: return cuda::forward<double, false>(p, output, scratch, stream);
    case DType::bfloat16: return cuda::forward<cuda::bf16, false>(p, output, scratch, stream);
    case DType::float16: return cuda::forward<cuda::f16, false>(p, output, scratch, stream);
    default: return p.tf32 ? cuda::forward<float, true>(p, output, scratch, stream) : cuda::forward<float, false>(p, output, scratch, stream);
  }
}

}  // namespace continuum_ops
