// What the launchers of both passes share: the inputs in the kernels' form, scratch memory, and the sizes of what is computed at once.
#pragma once

#include <algorithm>

#include "cuda_launch.h"
#include "patch_attention_cuda.h"
#include "patch_attention_mix.cuh"
#include "patch_attention_rows.cuh"

namespace continuum_ops {
namespace cuda {

#ifdef __CUDACC__
constexpr int64_t CHUNK_SCORES = int64_t(1) << 22;  // held at a time at least; more where query is larger
#else
constexpr int64_t CHUNK_SCORES = 1 << 12;  // tests: chunks at sizes that the CPU can do
#endif

template <class T> constexpr int MIX_TILE = 128;

// The products and mixing products, in files of their own (patch_attention_products.cu, patch_attention_mix.cu). a is weighted.
template <class T, bool TF32, class A>
void launch_products(Launcher& launch, const Patches<const T>& a, const Patches<const T>& b, const PatchWeights<A>& weights, const Block& block, const Splits& splits, A* partial);
template <class T> Splits split_products(const Block& block, int64_t columns, int64_t limit);
template <class T, bool TF32, class A>
void launch_mix(Launcher& launch, const Coefficients<T, A>& coefficients, const Patches<const T>& x, const PatchWeights<A>& x_weights, int64_t group, int64_t groups,
                int64_t sources, const MixOutput<T, A>& o);

struct Limits {
  int64_t multiprocessors;
  size_t shared;  // bytes of dynamic shared memory that a block may have
};
// Of the current device. Tiles are chosen by it.
inline Limits device_limits() {
#ifdef __CUDACC__
  int device = 0, multiprocessors = 1, shared = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return {multiprocessors, size_t(shared)};
#else
  return {4, 227 * 1024};
#endif
}

template <class T> int64_t pitch_of(int64_t sources) {
  constexpr int64_t step = STEP<Tile<T, false>>;
  return (sources + step - 1) / step * step;
}

template <class T> Patches<T> patches_of(const PatchProblem& p, const void* data, const int64_t (&strides)[6], const int64_t (&counts)[3], int64_t channels) {
  using Plain = std::remove_const_t<T>;
  constexpr int64_t V = 16 / sizeof(Plain);
  Patches<T> x{};
  x.data = const_cast<T*>(static_cast<const Plain*>(data));
  x.batch_stride = strides[0], x.head_stride = strides[4], x.channel_stride = strides[5];
  x.vectors = strides[5] == 1 && channels % V == 0 && strides[0] % V == 0 && strides[4] % V == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (int i = 0; i < 3; ++i) {
    x.strides[i] = strides[1 + i], x.counts[i] = Divisor(uint32_t(std::max<int64_t>(counts[i], 1))), x.points[i] = Divisor(uint32_t(p.patch[i]));
    x.vectors = x.vectors && strides[1 + i] % V == 0;
  }
  x.heads = uint32_t(std::max<int64_t>(p.heads, 1)), x.channels = Divisor(uint32_t(std::max<int64_t>(channels, 1)));
  x.columns = uint32_t(p.points() * channels);
  return x;
}

// The same of a contiguous result.
template <class T> Patches<T> contiguous_patches(const PatchProblem& p, void* data, const int64_t (&counts)[3], int64_t heads, int64_t channels) {
  int64_t strides[6] = {0, 0, 0, 0, channels, 1}, step = heads * channels;
  for (int i = 2; i >= 0; --i) strides[1 + i] = step, step *= counts[i] * p.patch[i];
  strides[0] = step;
  return patches_of<T>(p, data, strides, counts, channels);
}

template <class T, class A> struct Work {
  Patches<const T> query, key, value;
  PatchWeights<A> weights{};
  A factor;
  int64_t query_patches, key_patches, groups, limit;
  bool whole;               // all scores of a group are held at once
  int64_t chunk[3];         // groups, rows, columns of a block
  Splits score_splits, gradient_splits;
  A *partial = nullptr, *matrix = nullptr, *gradients = nullptr, *stats = nullptr, *delta = nullptr, *sums = nullptr;
  Coefficients<T, A> coefficients{};
  int slots = 1;

  Work(const PatchProblem& p, const PatchGradients* g, bool keeps, Scratch& scratch) {
    query = patches_of<const T>(p, p.query.data, p.query.strides, p.query_counts, p.channels);
    key = patches_of<const T>(p, p.key.data, p.key.strides, p.key_counts, p.channels);
    value = patches_of<const T>(p, p.value.data, p.value.strides, p.key_counts, p.value_channels);
    factor = A(p.scale);
    query_patches = p.query_patches(), key_patches = p.key_patches(), groups = p.groups();
    limit = std::max(CHUNK_SCORES, groups * query_patches * p.points() * p.channels);
    const int64_t scores = query_patches * key_patches;
    whole = scores <= limit;
    auto part = [&](int64_t all, int64_t others) { return std::min(all, std::max<int64_t>(SMALL, limit / others / SMALL * SMALL)); };
    chunk[0] = whole ? std::min(groups, limit / std::max<int64_t>(scores, 1)) : std::min<int64_t>(groups, 1);
    chunk[1] = whole ? query_patches : part(query_patches, key_patches);
    chunk[2] = whole ? key_patches : part(key_patches, query_patches);
    const Block rows{0, chunk[0], 0, chunk[1], 0, key_patches}, columns{0, chunk[0], 0, query_patches, 0, chunk[2]};
    const Block& larger = rows.size() >= columns.size() ? rows : columns;
    score_splits = split_products<T>(larger, p.points() * p.channels, limit);
    gradient_splits = split_products<T>(larger, p.points() * p.value_channels, limit);
    partial = scratch.take<A>(larger.size() * (g ? std::max(score_splits.count, gradient_splits.count) : score_splits.count));
    if (!keeps) matrix = scratch.take<A>(larger.size());
    const int64_t by_rows = chunk[1] * pitch_of<T>(key_patches), by_columns = g ? chunk[2] * pitch_of<T>(query_patches) : 0;
    coefficients.data = scratch.take<T>(chunk[0] * std::max(by_rows, by_columns));
    coefficients.scale = scratch.take<A>(chunk[0] * std::max(chunk[1], chunk[2]));
    if (p.weights) {
      weights.entries = p.weight_entries, weights.patches = query_patches, weights.heads = query.heads, weights.points = uint32_t(p.points());
      weights.scaled = scratch.take<A>(weights.entries * query_patches * p.points());
      weights.scale = scratch.take<A>(weights.entries * query_patches);
    }
    if (!g) return;
    gradients = scratch.take<A>(larger.size());
    stats = scratch.take<A>(chunk[0] * query_patches * 2);
    delta = scratch.take<A>(chunk[0] * query_patches);
    slots = slots_of(p.channels, MIX_TILE<T>);
    if (g->grad_weights) sums = scratch.take<A>(groups * query_patches * p.points() * slots);
  }

  Coefficients<T, A> coefficients_of(int64_t sources) const { return {coefficients.data, coefficients.scale, pitch_of<T>(sources)}; }
};

template <class T, class A> void pack_weights(Launcher& launch, const PatchProblem& p, const Work<T, A>& w) {
  if (!p.weights) return;
  const int64_t strides[6] = {p.weight_strides[0], p.weight_strides[1], p.weight_strides[2], p.weight_strides[3], 0, 1};
  const Patches<const A> from = patches_of<const A>(p, p.weights, strides, p.query_counts, 1);
  launch(pack_patch_weights<A>, w.weights.entries * w.weights.patches, ROW_THREADS, 0, w.weights, from);
}

// Scores of a block, and what `o` wants of their softmax.
template <class T, bool TF32, class A> void softmax_of_products(Launcher& launch, const Work<T, A>& w, const Block& block, const SoftmaxOutput<T, A>& o) {
  launch_products<T, TF32, A>(launch, w.query, w.key, w.weights, block, w.score_splits, w.partial);
  launch(patch_softmax<T, A>, block.groups * block.rows, ROW_THREADS, 0, w.partial, w.score_splits.count, block, w.factor, w.weights, o);
}

}  // namespace cuda
}  // namespace continuum_ops
