// Positions, weights and rows' statistics in the form that the kernels read: packed once per call, coordinate by coordinate, padded to
// whole tiles, with the extent of every tile. The scores are computed here and nowhere else.
#pragma once

#include "cuda_portable.h"

namespace continuum_ops {
namespace cuda {

constexpr int POINTS = 64;  // points of a tile: the padding, and the unit of skipping
constexpr int PACK_THREADS = 256;
constexpr float LOG2_E = 1.4426950408889634f;

__host__ __device__ __forceinline__ int64_t padded(int64_t n) { return (n + POINTS - 1) / POINTS * POINTS; }

// (entries, d, pad) coordinates, and for every tile of 64 points and axis the centre and half width of its box, (entries, tiles, d, 2).
// Positions in float64 beside float32 arithmetic are split: what float32 leaves of the coordinates follows them, (entries, 2 d, pad).
template <class A> struct Points {
  A *position, *box;
  int64_t entries, n, pad;
  int d, parts;

  __device__ const A* of(int64_t g) const { return position + (entries == 1 ? 0 : g) * d * parts * pad; }
  __device__ const A* box_of(int64_t g, int64_t tile) const { return box + ((entries == 1 ? 0 : g) * (pad / POINTS) + tile) * d * 2; }
};

// A number per point, (entries, pad), with its largest value in every tile, (entries, tiles).
template <class A> struct Field {
  A *value, *top;
  int64_t entries, pad;

  __device__ const A* of(int64_t g) const { return value + (entries == 1 ? 0 : g) * pad; }
  __device__ A top_of(int64_t g, int64_t tile) const { return top[(entries == 1 ? 0 : g) * (pad / POINTS) + tile]; }
};

template <class A> struct Geometry {
  Points<A> query, key;
  Field<A> log_weights;  // base 2; -inf: the key does not exist
  Field<A> reach;        // squared radius of every query, rounding allowed for
  Field<A> nearest;      // squared distance of every query to its nearest key, per geometry: the exponents are relative to it
  Field<A> drop;         // -shift of the exponents, per (geometry, head): the entries are geometry * heads + head
  A *scale, *centre;     // backward, as drop: 1 / denominator, and grad_lse - grad_out . out
  const A* period;       // (d, 2): length and its inverse, 0 where not periodic; null: nowhere
  const A* rate;
  int64_t rate_stride, geometries;
  int heads;
  A negligible;  // a probability, relative to the largest of its row, that cannot change the forward sum
  A log_negligible;

  __device__ A rate_of(int h) const {  // base 2
    const A r = rate[h * rate_stride];
    return r >= A(0) ? r * A(1.4426950408889634) : NOT_A_NUMBER<A>;
  }
};

template <class A> struct alignas(16) Four { A x[4]; };
template <class A> struct alignas(2 * sizeof(A)) Two { A x[2]; };

// The difference of two coordinates, to the nearest image along a periodic axis.
template <class A> __device__ __forceinline__ A nearest_image(A difference, const A* period, int axis) {
  if (period) difference = fused(-nearest(difference * period[2 * axis + 1]), period[2 * axis], difference);
  return difference;
}

// log2(w_k e^{-rate (|x - y|^2 - nearest)}). Distances are subtracted first: rate |x - y|^2 may be thousands, whose rounding, and that of a
// sum with log w, would be an error of the probability; of what counts in a row the difference is small. A distance that is not a
// number counts: it must come out.
template <class A> __device__ __forceinline__ A score(A distance, A nearest, A rate, A log_weight, A reach) {
  const A s = fused(-rate, distance - nearest, log_weight);
  return distance > reach ? -INFINITE<A> : s;
}

// Squared distances of the point at x to the four at y, of the point sets a and b.
template <class A>
__device__ __forceinline__ Four<A> distances(const A* x, const Points<A>& a, const A* y, const Points<A>& b, const A* period) {
  Four<A> sum = {};
#pragma unroll 1
  for (int axis = 0; axis < a.d; ++axis) {
    const A from = x[axis * a.pad];
    Four<A> to = *reinterpret_cast<const Four<A>*>(y + axis * b.pad);
#pragma unroll
    for (int e = 0; e < 4; ++e) to.x[e] = from - to.x[e];
    if (a.parts > 1) {
      const A from_rest = x[(a.d + axis) * a.pad];
      const Four<A> rest = *reinterpret_cast<const Four<A>*>(y + (a.d + axis) * b.pad);
#pragma unroll
      for (int e = 0; e < 4; ++e) to.x[e] += from_rest - rest.x[e];
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const A step = nearest_image(to.x[e], period, axis);
      sum.x[e] = fused(step, step, sum.x[e]);
    }
  }
  return sum;
}

// One coordinate's difference of the point at x to that at y, as distances() has it.
template <class A>
__device__ __forceinline__ A difference(const A* x, const Points<A>& a, const A* y, const Points<A>& b, const A* period, int axis) {
  A step = x[axis * a.pad] - y[axis * b.pad];
  if (a.parts > 1) step += x[(a.d + axis) * a.pad] - y[(a.d + axis) * b.pad];
  return nearest_image(step, period, axis);
}

// Nothing of the two tiles' product can count: every pair is out of reach, or below `least` relative to its row's largest term. A NaN
// anywhere makes the comparisons false and the tile is computed.
template <class A>
__device__ __forceinline__ bool skippable(const Geometry<A>& geo, int64_t g, int h, A rate, int64_t query_tile, int64_t key_tile, A least) {
  const A *a = geo.query.box_of(g, query_tile), *b = geo.key.box_of(g, key_tile);
  A gap2 = 0;
#pragma unroll 1
  for (int axis = 0; axis < geo.query.d; ++axis) {
    const A centre = nearest_image(a[2 * axis] - b[2 * axis], geo.period, axis), width = a[2 * axis + 1] + b[2 * axis + 1];
    const A gap = (centre < A(0) ? -centre : centre) - width;
    gap2 = gap > A(0) ? fused(gap, gap, gap2) : gap == gap ? gap2 : NOT_A_NUMBER<A>;
  }
  gap2 *= A(0.9999);  // this sum, too, is rounded
  if (gap2 > geo.reach.top_of(g, query_tile)) return true;
  const A beyond = gap2 - geo.nearest.top_of(g, query_tile);
  return fused(-rate, beyond, geo.log_weights.top_of(g, key_tile)) + geo.drop.top_of(g * geo.heads + h, query_tile) < least;
}

// ---- Packing --------------------------------------------------------------------------------------------------------------------

template <class A> struct Strided2 { const A* data; int64_t strides[2]; };
template <class A> struct Strided3 { const A* data; int64_t strides[3]; };

// One block per (entry, tile of 64 points), 64 threads. A key that does not exist lies at the origin and outside every box.
template <class A, class X>
__global__ void __launch_bounds__(POINTS) pack_points(Points<A> to, Strided3<X> from, Field<A> log_weights, int weighted) {
  __shared__ A low[POINTS], high[POINTS];
  const int64_t tiles = to.pad / POINTS, entry = blockIdx.x / tiles, tile = blockIdx.x % tiles, i = tile * POINTS + threadIdx.x;
  const bool live = i < to.n && !(weighted && log_weights.of(entry)[i] == -INFINITE<A>);
  const int64_t source = from.strides[0] * entry;
  for (int axis = 0; axis < to.d; ++axis) {
    const X whole = live ? from.data[source + i * from.strides[1] + axis * from.strides[2]] : X(0);
    const A x = A(whole);
    A* position = to.position + (entry * to.parts * to.d + axis) * to.pad + i;
    *position = x;
    if (to.parts > 1) position[to.d * to.pad] = A(whole - X(x));
    low[threadIdx.x] = live ? x : INFINITE<A>;
    high[threadIdx.x] = live ? x : -INFINITE<A>;
    for (int half = POINTS / 2; half; half /= 2) {
      __syncthreads();
      if (int(threadIdx.x) < half) {
        low[threadIdx.x] = min_or_nan(low[threadIdx.x], low[threadIdx.x + half]);
        high[threadIdx.x] = max_or_nan(high[threadIdx.x], high[threadIdx.x + half]);
      }
    }
    if (threadIdx.x == 0) {
      A* box = to.box + ((entry * tiles + tile) * to.d + axis) * 2;
      const bool empty = low[0] > high[0];
      box[0] = empty ? A(0) : (low[0] + high[0]) / 2;
      // Wide enough for the rounding of the centre and of the coordinates.
      box[1] = empty ? A(0) : (high[0] - low[0]) / 2 + 2 * EPSILON<A> * max_or_nan(-low[0], high[0]) + 2 * EPSILON<A> * max_or_nan(low[0], -high[0]);
    }
    __syncthreads();
  }
}

// The largest of a tile's 64 values, one block per tile.
template <class A> __device__ __forceinline__ void write_top(A value, A* top, A* shared) {
  shared[threadIdx.x] = value;
  for (int half = POINTS / 2; half; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half) shared[threadIdx.x] = max_or_nan(shared[threadIdx.x], shared[threadIdx.x + half]);
  }
  if (threadIdx.x == 0) top[blockIdx.x] = shared[0];
}

template <class A> __global__ void __launch_bounds__(POINTS) pack_weights(Field<A> to, Strided2<A> weights, int64_t m) {
  __shared__ A shared[POINTS];
  const int64_t tiles = to.pad / POINTS, entry = blockIdx.x / tiles, k = blockIdx.x % tiles * POINTS + threadIdx.x;
  A value = -INFINITE<A>;
  if (k < m) {
    const A w = weights.data ? weights.data[entry * weights.strides[0] + k * weights.strides[1]] : A(1);
    value = w > A(0) ? log_2(w) : w == A(0) ? -INFINITE<A> : NOT_A_NUMBER<A>;
  }
  to.value[entry * to.pad + k] = value;
  write_top(value, to.top, shared);
}

template <class A> __global__ void __launch_bounds__(POINTS) pack_radius(Field<A> to, Strided2<A> radius, int64_t n) {
  __shared__ A shared[POINTS];
  const int64_t tiles = to.pad / POINTS, entry = blockIdx.x / tiles, i = blockIdx.x % tiles * POINTS + threadIdx.x;
  A value = i < n ? INFINITE<A> : A(0);
  if (i < n && radius.data) {
    const A r = radius.data[entry * radius.strides[0] + i * radius.strides[1]];
    value = r >= A(0) ? r * r * (1 + 8 * EPSILON<A>) : NOT_A_NUMBER<A>;
  }
  to.value[entry * to.pad + i] = value;
  write_top(value, to.top, shared);
}

struct Period { double length[16]; };
template <class A> __global__ void pack_period(A* to, Period period, int first, int d) {
  const int axis = first + threadIdx.x;
  if (axis >= d) return;
  const A length = A(period.length[threadIdx.x]);
  const bool finite = length < INFINITE<A>;
  to[2 * axis] = finite ? length : A(0);
  to[2 * axis + 1] = finite ? 1 / length : A(0);
}

// An exponent relative to `nearest`, infinite while there is no key, relative to `least`.
template <class A> __device__ __forceinline__ A nearer(A exponent, A rate, A nearest, A least) {
  return nearest < INFINITE<A> ? fused(rate, least - nearest, exponent) : exponent;
}

// The nearest key of every row, and the largest exponent relative to it, which becomes the row's shift. Eight threads take the keys of a
// query in turn, four heads at a time.
template <class A> __global__ void __launch_bounds__(PACK_THREADS) find_shifts(Geometry<A> geo) {
  const Points<A> &query = geo.query, &key = geo.key;
  const int64_t per_block = PACK_THREADS / 8, blocks = query.pad / per_block;
  const int64_t g = blockIdx.x / blocks, i = blockIdx.x % blocks * per_block + threadIdx.x / 8;
  const A *x = query.of(g) + i, *y = key.of(g), *log_weights = geo.log_weights.of(g);
  const A reach = geo.reach.of(g)[i];
  for (int h0 = 0; h0 < geo.heads; h0 += 4) {
    A rate[4], most[4], nearest = INFINITE<A>;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      rate[j] = geo.rate_of(h0 + j < geo.heads ? h0 + j : h0);
      most[j] = reach == reach ? -INFINITE<A> : NOT_A_NUMBER<A>;
    }
    for (int64_t k = threadIdx.x % 8 * 4; k < key.pad; k += 32) {
      const Four<A> distance = distances(x, query, y + k, key, geo.period);
      const Four<A> weight = *reinterpret_cast<const Four<A>*>(log_weights + k);
      A least = nearest;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool counts = !(distance.x[e] > reach) && weight.x[e] != -INFINITE<A>;
        least = counts && distance.x[e] < least ? distance.x[e] : least;
      }
      if (least < nearest) {
#pragma unroll
        for (int j = 0; j < 4; ++j) most[j] = nearer(most[j], rate[j], nearest, least);
        nearest = least;
      }
      const A origin = nearest < INFINITE<A> ? nearest : A(0);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) most[j] = max_or_nan(most[j], score(distance.x[e], origin, rate[j], weight.x[e], reach));
      }
    }
    A least = nearest;
#pragma unroll
    for (int lane = 1; lane < 8; lane *= 2) {
      const A other = __shfl_xor_sync(0xffffffffu, least, lane);
      least = other < least ? other : least;
    }
    if (h0 == 0 && threadIdx.x % 8 == 0) geo.nearest.value[g * query.pad + i] = i < query.n && least < INFINITE<A> ? least : A(0);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      most[j] = nearer(most[j], rate[j], nearest, least);
#pragma unroll
      for (int lane = 1; lane < 8; lane *= 2) most[j] = max_or_nan(most[j], __shfl_xor_sync(0xffffffffu, most[j], lane));
      if (threadIdx.x % 8 == 0 && h0 + j < geo.heads) {
        // A row without keys is shifted by nothing; one behind the last query has no terms at all.
        const A drop = i >= query.n ? -INFINITE<A> : most[j] == -INFINITE<A> ? A(0) : -most[j];
        geo.drop.value[(g * geo.heads + h0 + j) * query.pad + i] = drop;
      }
    }
  }
}

template <class A> __global__ void __launch_bounds__(POINTS) find_tops(Field<A> field) {
  __shared__ A shared[POINTS];
  write_top(field.value[int64_t(blockIdx.x) * POINTS + threadIdx.x], field.top, shared);
}

}  // namespace cuda
}  // namespace continuum_ops
