// Patch attention on CUDA: the inner products of patches, which are split over their points.
#include "patch_attention_products.cuh"

#include "patch_attention_launch.cuh"

namespace continuum_ops {
namespace cuda {
namespace {

template <class T> constexpr bool HAS_LARGE = sizeof(T) <= 4;  // accumulators of float64 do not fit the registers of so many threads
// Three products of halves hold twice the operands: more registers for fewer threads.
template <class T, bool TF32> using Large = std::conditional_t<Tile<T, TF32>::arithmetic == Arithmetic::tf32x3, Shape<LARGE, LARGE, 4, 2, 1>, Shape<LARGE, LARGE, 4, 3, 1>>;
template <class T> using Small = Shape<SMALL, SMALL, 2, 4, sizeof(T) == 8 ? 1 : 2>;

int64_t ceiling(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Large tiles read less for each product, small ones waste less where there are few patches.
template <class T> bool wants_large(const Block& block, const Limits& limits) {
  auto computed = [&](int64_t tile) { return ceiling(block.rows, tile) * tile * ceiling(block.columns, tile) * tile; };
  return HAS_LARGE<T> && product_shared<T, float, Large<T, true>>(true) + 4096 <= limits.shared && 2 * computed(SMALL) >= computed(LARGE);
}

template <class T, bool TF32, class S, class A>
void launch_shape(Launcher& launch, const Patches<const T>& a, const Patches<const T>& b, const PatchWeights<A>& weights, const Block& block, const Splits& splits, A* partial) {
  const int64_t blocks = ceiling(block.rows, S::M) * ceiling(block.columns, S::N) * block.groups * splits.count;
  launch(patch_products<T, TF32, S>, blocks, S::THREADS, product_shared<T, A, S>(weights.scaled != nullptr), a, b, weights, block, splits, partial);
}

}  // namespace

// As many splits as end soonest: whole waves of blocks, and the fewer partial sums the better.
template <class T> Splits split_products(const Block& block, int64_t columns, int64_t limit) {
  const Limits limits = device_limits();
  const bool large = wants_large<T>(block, limits);
  const int64_t tile = large ? LARGE : SMALL, places = limits.multiprocessors * (large ? Large<T, true>::BLOCKS : Small<T>::BLOCKS);
  const int64_t tiles = ceiling(block.rows, tile) * ceiling(block.columns, tile) * block.groups, steps = ceiling(columns, STEP<Tile<T, false>>);
  if (tiles == 0 || steps == 0) return {1, steps};
  const double partial_cost = 6.0;  // steps that a tile's partial sums take to write, or to read
  const int64_t most = std::min({steps, std::max<int64_t>(1, 4 * places / tiles), std::max<int64_t>(1, limit / std::max<int64_t>(block.size(), 1))});
  Splits best{1, steps};
  double least = 0;
  for (int64_t count = 1; count <= most; ++count) {
    const int64_t each = ceiling(steps, count), used = ceiling(steps, each);
    const double cost = double(ceiling(tiles * used, places)) * (double(each) + partial_cost) + double(tiles * used) * partial_cost / double(places);
    if (count == 1 || cost < least) least = cost, best = {used, each};
  }
  return best;
}

template <class T, bool TF32, class A>
void launch_products(Launcher& launch, const Patches<const T>& a, const Patches<const T>& b, const PatchWeights<A>& weights, const Block& block, const Splits& splits, A* partial) {
  if constexpr (HAS_LARGE<T>) {
    if (wants_large<T>(block, device_limits())) return launch_shape<T, TF32, Large<T, TF32>, A>(launch, a, b, weights, block, splits, partial);
  }
  launch_shape<T, TF32, Small<T>, A>(launch, a, b, weights, block, splits, partial);
}

#define CO_INSTANTIATE(T, TF32, A)                                                                                                            \
  template void launch_products<T, TF32, A>(Launcher&, const Patches<const T>&, const Patches<const T>&, const PatchWeights<A>&, const Block&, \
                                            const Splits&, A*);
CO_INSTANTIATE(float, false, float)
CO_INSTANTIATE(float, true, float)
CO_INSTANTIATE(bf16, false, float)
CO_INSTANTIATE(f16, false, float)
CO_INSTANTIATE(double, false, double)
template Splits split_products<float>(const Block&, int64_t, int64_t);
template Splits split_products<bf16>(const Block&, int64_t, int64_t);
template Splits split_products<f16>(const Block&, int64_t, int64_t);
template Splits split_products<double>(const Block&, int64_t, int64_t);

}  // namespace cuda
}  // namespace continuum_ops
