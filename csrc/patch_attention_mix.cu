// Patch attention on CUDA: patches mixed with coefficients, for the output and the gradients.
#include "patch_attention_launch.cuh"

namespace continuum_ops {
namespace cuda {
namespace {

// Three products of halves hold twice the operands: more registers for fewer threads.
template <class T, bool TF32>
using Large = std::conditional_t<Tile<T, TF32>::arithmetic == Arithmetic::tf32x3, Shape<LARGE, MIX_TILE<T>, 4, 2, 1>, Shape<LARGE, MIX_TILE<T>, 6, 2, 1>>;
template <class T> using Small = Shape<SMALL, MIX_TILE<T>, 2, 4, sizeof(T) == 8 ? 1 : 2>;

template <class T, bool TF32, class S, class A>
void launch_shape(Launcher& launch, const Coefficients<T, A>& coefficients, const Patches<const T>& x, const PatchWeights<A>& x_weights, int64_t group, int64_t groups,
                  int64_t sources, const MixOutput<T, A>& o, const Limits& limits) {
  const int64_t others = (o.rows + S::M - 1) / S::M * groups, tiles = (int64_t(x.columns) + S::N - 1) / S::N;
  if (others * tiles == 0) return;
  // Blocks that walk along several tiles overlap reading and writing; but all places are to be filled.
  const int64_t each = std::clamp<int64_t>(others * tiles / (limits.multiprocessors * S::BLOCKS), 1, 16);
  launch(patch_mix<T, TF32, S>, others * ((tiles + each - 1) / each), S::THREADS, MixShape<T, A, S>::shared(x_weights.scaled != nullptr, o.sums != nullptr), coefficients,
         x, x_weights, MixRange{group, groups, sources, each}, o);
}

}  // namespace

template <class T, bool TF32, class A>
void launch_mix(Launcher& launch, const Coefficients<T, A>& coefficients, const Patches<const T>& x, const PatchWeights<A>& x_weights, int64_t group, int64_t groups,
                int64_t sources, const MixOutput<T, A>& o) {
  const Limits limits = device_limits();
  if constexpr (sizeof(T) <= 4) {
    auto computed = [&](int64_t tile) { return (o.rows + tile - 1) / tile * tile; };
    if (MixShape<T, A, Large<T, TF32>>::shared(true, true) + 8192 <= limits.shared && 2 * computed(SMALL) > computed(LARGE)) {
      return launch_shape<T, TF32, Large<T, TF32>, A>(launch, coefficients, x, x_weights, group, groups, sources, o, limits);
    }
  }
  launch_shape<T, TF32, Small<T>, A>(launch, coefficients, x, x_weights, group, groups, sources, o, limits);
}

#define CO_INSTANTIATE(T, TF32, A)                                                                                                          \
  template void launch_mix<T, TF32, A>(Launcher&, const Coefficients<T, A>&, const Patches<const T>&, const PatchWeights<A>&, int64_t, int64_t, \
                                       int64_t, const MixOutput<T, A>&);
CO_INSTANTIATE(float, false, float)
CO_INSTANTIATE(float, true, float)
CO_INSTANTIATE(bf16, false, float)
CO_INSTANTIATE(f16, false, float)
CO_INSTANTIATE(double, false, double)

}  // namespace cuda
}  // namespace continuum_ops
