// Patch attention on CUDA, backward: see patch_attention.cu. Blocks of query patches give the gradients of query and weights. Where a
// block does not hold all scores of a group, blocks of key patches follow for those of key and value: no block adds to another's result.
#include "patch_attention_launch.cuh"

namespace continuum_ops {
namespace cuda {
namespace {

template <class T, bool TF32> class Backward {
  using A = typename Tile<T, TF32>::Acc;

 public:
  Backward(const PatchProblem& p, const PatchGradients& g, void* memory, void* stream)
      : p_(p), g_(g), scratch_(memory), w_(p, &g, g.probabilities != nullptr, scratch_), launch_(stream) {
    grad_out_ = patches_of<const T>(p, g.grad_out.data, g.grad_out.strides, p.query_counts, p.value_channels);
    grad_lse_ = {static_cast<const A*>(g.grad_lse), g.grad_lse_strides[0], g.grad_lse_strides[1], g.grad_lse_strides[2], w_.query.heads};
    by_rows_ = g.grad_query || g.grad_weights;
  }

  int run() {
    pack_weights(launch_, p_, w_);
    for (int64_t group = 0; group < w_.groups; group += w_.chunk[0]) {
      const int64_t groups = std::min(w_.chunk[0], w_.groups - group);
      const Block all{group, groups, 0, w_.query_patches, 0, w_.key_patches};
      if (w_.whole) {
        const A* p = g_.probabilities ? static_cast<const A*>(g_.probabilities) + group * w_.query_patches * w_.key_patches : probabilities(all, false);
        if (by_rows_ || g_.grad_key) gradients(all, p, false);
        if (by_rows_) mix_rows(all);
        mix_columns(all, p);
        continue;
      }
      for (int64_t row = 0; row < w_.query_patches; row += w_.chunk[1]) {
        Block block = all;
        block.row = row, block.rows = std::min(w_.chunk[1], w_.query_patches - row);
        const A* p = probabilities(block, false);
        if (by_rows_ || g_.grad_key) gradients(block, p, false);
        if (by_rows_) mix_rows(block);
      }
      for (int64_t column = 0; column < w_.key_patches && (g_.grad_key || g_.grad_value); column += w_.chunk[2]) {
        Block block = all;
        block.column = column, block.columns = std::min(w_.chunk[2], w_.key_patches - column);
        const A* p = probabilities(block, true);
        if (g_.grad_key) gradients(block, p, true);
        mix_columns(block, p);
      }
    }
    if (g_.grad_weights) {
      launch_(reduce_patch_weights<A>, (w_.weights.entries * w_.weights.patches * w_.weights.points + TRANSPOSE_THREADS - 1) / TRANSPOSE_THREADS, TRANSPOSE_THREADS, 0,
              contiguous_patches<A>(p_, g_.grad_weights, p_.query_counts, 1, 1), w_.weights, static_cast<const A*>(w_.sums), w_.slots, MIX_TILE<T>, p_.channels, p_.batch);
    }
    return launch_.status();
  }

 private:
  // After the blocks of rows, the rows' shifts and sums are known.
  const A* probabilities(const Block& block, bool known) {
    SoftmaxOutput<T, A> o{};
    o.matrix = w_.matrix, o.normalised = true, o.stats = w_.stats, o.from_stats = known, o.patches = w_.query_patches;
    softmax_of_products<T, TF32>(launch_, w_, block, o);
    return w_.matrix;
  }

  void gradients(const Block& block, const A* p, bool known) {
    launch_products<T, TF32, A>(launch_, grad_out_, w_.value, {}, block, w_.gradient_splits, w_.partial);
    ScoreGradients<T, A> o{p, grad_lse_, w_.gradients, w_.delta, known, {}, w_.query_patches};
    if (by_rows_ && !known) o.coefficients = w_.coefficients_of(w_.key_patches);
    launch_(patch_score_gradients<T, A>, block.groups * block.rows, ROW_THREADS, 0, static_cast<const A*>(w_.partial), w_.gradient_splits.count, block, o);
  }

  void mix_rows(const Block& block) {
    MixOutput<T, A> o{};
    o.out = contiguous_patches<T>(p_, g_.grad_query, p_.query_counts, p_.heads, p_.channels);
    o.weights = w_.weights, o.alpha = w_.factor, o.row = block.row, o.rows = block.rows;
    o.query = w_.query, o.sums = w_.sums, o.slots = w_.slots;
    launch_mix<T, TF32, A>(launch_, w_.coefficients_of(w_.key_patches), w_.key, {}, block.group, block.groups, w_.key_patches, o);
  }

  void mix_columns(const Block& block, const A* p) {
    auto mix = [&](const A* matrix, const PatchWeights<A>& weights, const Patches<const T>& x, void* to, int64_t channels, A alpha) {
      const Coefficients<T, A> coefficients = w_.coefficients_of(w_.query_patches);
      launch_(transpose_coefficients<T, A>, block.groups * ((block.columns + TRANSPOSE - 1) / TRANSPOSE), TRANSPOSE_THREADS, 0, matrix, block, weights, coefficients);
      MixOutput<T, A> o{};
      o.out = contiguous_patches<T>(p_, to, p_.key_counts, p_.heads, channels);
      o.alpha = alpha, o.row = block.column, o.rows = block.columns;
      launch_mix<T, TF32, A>(launch_, coefficients, x, weights, block.group, block.groups, w_.query_patches, o);
    };
    if (g_.grad_key) mix(w_.gradients, w_.weights, w_.query, g_.grad_key, p_.channels, w_.factor);
    if (g_.grad_value) mix(p, {}, grad_out_, g_.grad_value, p_.value_channels, A(1));
  }

  const PatchProblem& p_;
  const PatchGradients& g_;
  Scratch scratch_;
  Work<T, A> w_;
  Launcher launch_;
  Patches<const T> grad_out_;
  RowTerm<A> grad_lse_;
  bool by_rows_;
};

}  // namespace
}  // namespace cuda

int patch_attention_backward_cuda(const PatchProblem& p, const PatchGradients& gradients, void* scratch, void* stream) {
  switch (p.dtype) {
    case DType::float64: return cuda::Backward<double, false>(p, gradients, scratch, stream).run();
    case DType::bfloat16: return cuda::Backward<cuda::bf16, false>(p, gradients, scratch, stream).run();
    case DType::float16: return cuda::Backward<cuda::f16, false>(p, gradients, scratch, stream).run();
    default:
      return p.tf32 ? cuda::Backward<float, true>(p, gradients, scratch, stream).run() : cuda::Backward<float, false>(p, gradients, scratch, stream).run();
  }
}

}  // namespace continuum_ops
