// Position attention on CUDA. Two kernels do the work, each for rows of queries and, transposed, for rows of keys:
//   weighted_sum  rows x columns = P x: the output (rows are queries, x the values), grad_value (rows are keys, x is grad_out)
//   score_sums    per row sum_j g, sum_j g d2, sum_j g (x - y) of the scores' gradient g: grad of rate, positions, weights
// P is computed once per (query, key, head) for the batch and all channels (of a block's columns, up to 512), into shared memory, and
// multiplied by tensor cores. The row maximum is known beforehand (find_shifts), so that nothing is rescaled and far tiles are skipped.
// Every sum has one owner and a fixed order: no atomics, the same bits every time.
#include "position_attention_cuda.h"

#include <algorithm>
#include <type_traits>

#include "cuda_tiles.h"
#include "position_attention_geometry.cuh"
#include "position_attention_reductions.cuh"

namespace continuum_ops {
namespace cuda {
namespace {

constexpr int ROWS = POINTS;   // of a block's tile
constexpr int WARP_ROWS = 32;  // of a warp's share of it
constexpr int MT = WARP_ROWS / 16;

// ---- Sums of rows -----------------------------------------------------------------------------------------------------------------

template <class T, class A> struct SumOutput {
  T* out;  // (batch, heads, rows, channels)
  A *lse, *stats;  // forward only
  int64_t rows, others, columns;
  int heads, x_heads;  // of out, of x
};

template <class Tile, int CT, int THREADS> struct SumShape {
  static constexpr int WARP_COLUMNS = CT * 2 / (THREADS / 32), NT = WARP_COLUMNS / 8;  // two warps share a column range
  static constexpr int BK = Tile::is_half ? 64 : 32;                                   // keys (queries) of a step
  static constexpr int P_PITCH = BK + Tile::PAD_ALONG, X_PITCH = CT + Tile::PAD_ACROSS;
  static constexpr int PER_ROW = THREADS / ROWS, SCORES = BK / PER_ROW;  // threads of a row, scores of a thread
  static_assert(SCORES % 4 == 0 && PER_ROW <= 32 && (PER_ROW & (PER_ROW - 1)) == 0 && POINTS % BK == 0);
};

template <class T, bool TF32, int CT, int THREADS, bool TRANSPOSED, class A = typename Tile<T, TF32>::Acc>
__global__ void __launch_bounds__(THREADS, THREADS == 512 ? 1 : CT == 64 && Tile<T, TF32>::arithmetic <= Arithmetic::tf32 ? 3 : 2) weighted_sum(Geometry<A> geo, Columns<T> x, SumOutput<T, A> o) {
  using Tl = Tile<T, TF32>;
  using S = SumShape<Tl, CT, THREADS>;
  CUDA_DYN_SMEM(T, shared);
  __shared__ A denominators[ROWS];
  T *p_tile = shared, *x_tile = shared + ROWS * S::P_PITCH;

  const int64_t column_blocks = o.columns > 0 ? (o.columns + CT - 1) / CT : 1;
  const Points<A>&row_points = TRANSPOSED ? geo.key : geo.query, &other_points = TRANSPOSED ? geo.query : geo.key;
  const int64_t row_tiles = row_points.pad / ROWS;
  int64_t block = blockIdx.x;
  const int64_t column = block % column_blocks * CT;
  block /= column_blocks;
  const int64_t row_tile = block % row_tiles, row0 = row_tile * ROWS;
  block /= row_tiles;
  const int out_head = int(block % o.heads);
  const int64_t g = block / o.heads;
  // Values that the heads share get the gradients of all of them.
  const int head_begin = TRANSPOSED && o.heads == 1 ? 0 : out_head, head_end = TRANSPOSED && o.heads == 1 ? geo.heads : out_head + 1;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp % 2 * WARP_ROWS, warp_column = warp / 2 * S::WARP_COLUMNS;
  const int row = threadIdx.x / S::PER_ROW, j_first = threadIdx.x % S::PER_ROW * S::SCORES;
  const A* point = row_points.of(g) + row0 + row;
  const A* others = other_points.of(g);
  A acc[MT][S::NT][4] = {};
  A denominator = 0;

#pragma unroll 1
  for (int head = head_begin; head < head_end; ++head) {
    const A rate = geo.rate_of(head);
    const int64_t gh = g * geo.heads + head;
    const A* drops = geo.drop.of(gh);
    const A* scales = TRANSPOSED ? geo.scale + gh * geo.query.pad : nullptr;
    const A* log_weights = geo.log_weights.of(g);
    const A* reaches = geo.reach.of(g);
    // What belongs to the row: its own share of the exponent.
    const A row_term = TRANSPOSED ? log_weights[row0 + row] : drops[row0 + row];
    const A row_reach = TRANSPOSED ? A(0) : reaches[row0 + row];
    for (int64_t j0 = 0; j0 < o.others; j0 += S::BK) {
      const int64_t other_tile = j0 / POINTS;
      if (TRANSPOSED ? skippable(geo, g, head, rate, other_tile, row_tile, vanishing<A>())
                     : skippable(geo, g, head, rate, row_tile, other_tile, geo.log_negligible)) continue;
      stage<Tl, S::BK, CT, THREADS>(x_tile, S::X_PITCH, x, geo.geometries == 1 ? 0 : g, o.x_heads == 1 ? 0 : head, j0, o.others, column,
                                    o.columns, TRANSPOSED ? static_cast<const A*>(nullptr) : log_weights);
      bool counts = false;
#pragma unroll 1
      for (int s = 0; s < S::SCORES; s += 4) {
        const int64_t j = j0 + j_first + s;
        const Four<A> distance = distances(point, row_points, others + j, other_points, geo.period);
        const Four<A> term = *reinterpret_cast<const Four<A>*>((TRANSPOSED ? drops : log_weights) + j);
        Four<A> reach, scale;
        if (TRANSPOSED) {
          reach = *reinterpret_cast<const Four<A>*>(reaches + j);
          scale = *reinterpret_cast<const Four<A>*>(scales + j);
        }
        struct alignas(4 * sizeof(T)) { T x[4]; } packed;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          A p;
          if (TRANSPOSED) {
            p = exp_2(score(distance.x[e], rate, row_term, reach.x[e]) + term.x[e]) * scale.x[e];
            counts |= p != A(0);
          } else {
            p = exp_2(score(distance.x[e], rate, term.x[e], row_reach) + row_term);
            denominator += p;
            counts |= !(p <= geo.negligible);
          }
          packed.x[e] = convert<T>(p);
        }
        *reinterpret_cast<decltype(packed)*>(p_tile + row * S::P_PITCH + j_first + s) = packed;
      }
      copies_arrived();
      if (__syncthreads_or(counts)) {
        tile_product<Tl, MT, S::NT, false>(acc, p_tile + warp_row * S::P_PITCH, S::P_PITCH, x_tile + warp_column, S::X_PITCH, S::BK);
      }
      __syncthreads();
    }
  }

  if (!TRANSPOSED) {
#pragma unroll
    for (int step = 1; step < S::PER_ROW; step *= 2) denominator += __shfl_xor_sync(0xffffffffu, denominator, step);
    if (threadIdx.x % S::PER_ROW == 0) {
      denominators[row] = denominator;
      if (column == 0 && row0 + row < o.rows) {
        const int64_t at = (g * geo.heads + out_head) * o.rows + row0 + row;
        const A shift = -geo.drop.of(g * geo.heads + out_head)[row0 + row];
        o.stats[2 * at] = shift;
        o.stats[2 * at + 1] = denominator;
        o.lse[at] = denominator == A(0) ? -infinity<A>() : (shift + log_2(denominator)) * A(0.6931471805599453);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = warp_row + 16 * i + fragment_row(lane, e);
      if (row0 + r >= o.rows) continue;
      const A divisor = TRANSPOSED ? A(1) : denominators[r] == A(0) ? A(1) : denominators[r];
#pragma unroll
      for (int j = 0; j < S::NT; ++j) {
        const int64_t c = column + warp_column + 8 * j + fragment_column(lane, e);
        if (c >= o.columns) continue;
        const uint32_t entry = uint32_t(c) / x.channels, channel = uint32_t(c) - entry * x.channels;
        const int64_t b = (geo.geometries == 1 ? 0 : g) + entry;
        o.out[((b * o.heads + out_head) * o.rows + row0 + r) * x.channels + channel] = convert<T>(acc[i][j][e] / divisor);
      }
    }
  }
}

// ---- Sums of the scores' gradient ---------------------------------------------------------------------------------------------------

constexpr int SUM_THREADS = 256, AXES = 4;  // axes of one launch
constexpr int SIDE_NT = 2, SIDE_WARP = 8 * SIDE_NT;  // columns of a warp: 4 x 16 are a tile's 64

template <class A> struct ScoreSums {
  A* sums;  // (geometries, heads, rows, 2 + d)
  int64_t rows, others, columns;
  int value_heads, first_axis, axes;  // the axes of this launch; 0: no positions
};

template <class Tile> struct SideShape {
  static constexpr int KC = Tile::is_half ? 64 : Tile::is_double ? 16 : 32;  // columns (channels of the batch) of a step
  static constexpr int PITCH = KC + Tile::PAD_ALONG;
};

// g_ik = p_ik (grad_out_i . value_k + centre_i); rows are the queries, or the keys if TRANSPOSED.
template <class T, bool TF32, bool TRANSPOSED, class A = typename Tile<T, TF32>::Acc>
__global__ void __launch_bounds__(SUM_THREADS, sizeof(T) == 8 ? 1 : 2) score_sums(Geometry<A> geo, Columns<T> grad_out, Columns<T> value, ScoreSums<A> o) {
  using Tl = Tile<T, TF32>;
  using S = SideShape<Tl>;
  CUDA_DYN_SMEM(T, shared);
  const Points<A>&row_points = TRANSPOSED ? geo.key : geo.query, &other_points = TRANSPOSED ? geo.query : geo.key;
  const int64_t row_tiles = row_points.pad / ROWS, row_tile = blockIdx.x % row_tiles, row0 = row_tile * ROWS;
  const int64_t gh = blockIdx.x / row_tiles, g = gh / geo.heads;
  const int head = int(gh % geo.heads), value_head = o.value_heads == 1 ? 0 : head;
  const int64_t batch = geo.geometries == 1 ? 0 : g;
  const A rate = geo.rate_of(head);
  const A *log_weights = geo.log_weights.of(g), *reaches = geo.reach.of(g), *drops = geo.drop.of(gh);
  const A *scales = geo.scale + gh * geo.query.pad, *centres = geo.centre + gh * geo.query.pad;
  const A *row_position = row_points.of(g) + row0, *other_position = other_points.of(g);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp % 2 * WARP_ROWS, warp_column = warp / 2 * SIDE_WARP;
  constexpr int R = 2 * MT, C = 2 * SIDE_NT;  // this thread's rows and columns of the tile
  int rows[R];
#pragma unroll
  for (int r = 0; r < R; ++r) rows[r] = warp_row + r / 2 * 16 + fragment_row(lane, r % 2 * 2);
  A sums[R][2 + AXES] = {};

  for (int64_t j0 = 0; j0 < o.others; j0 += POINTS) {
    const int64_t other_tile = j0 / POINTS;
    // Nothing is negligible here: the gradient of a weight is divided by the weight.
    if (TRANSPOSED ? skippable(geo, g, head, rate, other_tile, row_tile, vanishing<A>())
                   : skippable(geo, g, head, rate, row_tile, other_tile, vanishing<A>())) continue;
    int64_t columns[C / 2];  // pairs of neighbours
#pragma unroll
    for (int c = 0; c < C / 2; ++c) columns[c] = j0 + warp_column + 8 * c + fragment_column(lane, 0);
    A distance[R][C] = {}, p[R][C];
#pragma unroll 1
    for (int axis = 0; axis < row_points.d; ++axis) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const A step = difference(row_position + rows[r], row_points, other_position + columns[c / 2] + c % 2, other_points, geo.period, axis);
          distance[r][c] = fused(step, step, distance[r][c]);
        }
      }
    }
    bool counts = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const int64_t query = TRANSPOSED ? columns[c / 2] + c % 2 : row0 + rows[r], key = TRANSPOSED ? row0 + rows[r] : columns[c / 2] + c % 2;
        p[r][c] = exp_2(score(distance[r][c], rate, log_weights[key], reaches[query]) + drops[query]) * scales[query];
        counts |= p[r][c] != A(0);
      }
    }
    if (!__syncthreads_or(counts)) continue;

    A acc[MT][SIDE_NT][4] = {};
    for (int64_t column = 0; column < o.columns; column += S::KC) {
      T *left = shared, *right = shared + ROWS * S::PITCH;
      stage<Tl, ROWS, S::KC, SUM_THREADS>(TRANSPOSED ? right : left, S::PITCH, grad_out, batch, head, TRANSPOSED ? j0 : row0,
                                          geo.query.n, column, o.columns, static_cast<const A*>(nullptr));
      stage<Tl, ROWS, S::KC, SUM_THREADS>(TRANSPOSED ? left : right, S::PITCH, value, batch, value_head, TRANSPOSED ? row0 : j0,
                                          geo.key.n, column, o.columns, log_weights);
      copies_arrived();
      __syncthreads();
      tile_product<Tl, MT, SIDE_NT, true>(acc, left + warp_row * S::PITCH, S::PITCH, right + warp_column * S::PITCH, S::PITCH, S::KC);
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const int64_t query = TRANSPOSED ? columns[c / 2] + c % 2 : row0 + rows[r];
        const A gradient = p[r][c] * (acc[r / 2][c / 2][r % 2 * 2 + c % 2] + centres[query]);
        p[r][c] = gradient;
        sums[r][0] += gradient;
        sums[r][1] = fused(gradient, distance[r][c], sums[r][1]);
      }
    }
#pragma unroll
    for (int a = 0; a < AXES; ++a) {
      if (a >= o.axes) break;
      const int axis = o.first_axis + a;
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const A step = difference(row_position + rows[r], row_points, other_position + columns[c / 2] + c % 2, other_points, geo.period, axis);
          sums[r][2 + a] = fused(p[r][c], TRANSPOSED ? -step : step, sums[r][2 + a]);
        }
      }
    }
  }

  // The four lanes of a row, then the four warps of its columns, in this order.
  __shared__ A parts[4][ROWS][2 + AXES];
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int a = 0; a < 2 + AXES; ++a) {
      A sum = sums[r][a];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 == 0) parts[warp / 2][rows[r]][a] = sum;
    }
  }
  __syncthreads();
  const int width = 2 + row_points.d;
  for (int i = threadIdx.x; i < ROWS * (2 + AXES); i += SUM_THREADS) {
    const int r = i / (2 + AXES), a = i % (2 + AXES);
    if (row0 + r >= o.rows || a >= 2 + o.axes || (a < 2 && o.first_axis > 0)) continue;
    o.sums[(gh * o.rows + row0 + r) * width + (a < 2 ? a : a + o.first_axis)] = (parts[0][r][a] + parts[1][r][a]) + (parts[2][r][a] + parts[3][r][a]);
  }
}

// ---- Launches -----------------------------------------------------------------------------------------------------------------------

constexpr size_t ALIGNMENT = 256;

// Hands out pieces of the scratch memory; without memory it only counts.
class Scratch {
 public:
  explicit Scratch(void* memory) : memory_(static_cast<char*>(memory)) {}
  size_t size() const { return size_; }
  template <class A> A* take(int64_t count) {
    A* piece = memory_ ? reinterpret_cast<A*>(memory_ + size_) : nullptr;
    size_ += (size_t(count) * sizeof(A) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return piece;
  }

 private:
  char* memory_;
  size_t size_ = 0;
};

template <class A> struct Pieces {
  Geometry<A> geo{};
  A *query_sums = nullptr, *key_sums = nullptr, *period = nullptr;

  Pieces(const PositionProblem& p, const PositionGradients* gradients, Scratch& scratch) {
    const int64_t n = padded(p.n), m = padded(p.m), geometries = p.geometries();
    auto points = [&](int64_t entries, int64_t count, int64_t pad) {
      const int parts = p.wide_positions && sizeof(A) == 4 ? 2 : 1;
      A* position = scratch.take<A>(entries * p.d * parts * pad);
      return Points<A>{position, scratch.take<A>(entries * pad / POINTS * p.d * 2), entries, count, pad, int(p.d), parts};
    };
    auto field = [&](int64_t entries, int64_t pad) {
      A* value = scratch.take<A>(entries * pad);
      return Field<A>{value, scratch.take<A>(entries * pad / POINTS), entries, pad};
    };
    geo.query = points(p.query_entries, p.n, n);
    geo.key = points(std::max(p.key_entries, p.weight_entries), p.m, m);
    geo.log_weights = field(p.weight_entries, m);
    geo.reach = field(p.radius_entries, n);
    geo.drop = field(geometries * p.heads, n);
    if (p.period) geo.period = period = scratch.take<A>(2 * p.d);
    geo.rate = static_cast<const A*>(p.rate);
    geo.rate_stride = p.rate_stride;
    geo.geometries = geometries;
    geo.heads = int(p.heads);
    // All negligible terms of a row together stay below half a unit in the last place of its largest one.
    geo.negligible = std::numeric_limits<A>::epsilon() / 2 / A(std::max<int64_t>(p.m, 1));
    geo.log_negligible = std::log2(geo.negligible);
    if (!gradients) return;
    geo.scale = scratch.take<A>(geometries * p.heads * n);
    geo.centre = scratch.take<A>(geometries * p.heads * n);
    const bool key_side = gradients->grad_key_pos || gradients->grad_weights;
    if (gradients->grad_query_pos || (gradients->grad_rate && !key_side)) query_sums = scratch.take<A>(geometries * p.heads * p.n * (2 + p.d));
    if (key_side) key_sums = scratch.take<A>(geometries * p.heads * p.m * (2 + p.d));
  }
};

class Launcher {
 public:
  explicit Launcher(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}
  int status() const { return int(status_); }

  template <class... P, class... A> void operator()(void (*kernel)(P...), int64_t blocks, int threads, size_t shared, A... arguments) {
    if (status_ != cudaSuccess || blocks == 0) return;
    if (blocks > std::numeric_limits<int32_t>::max()) {
      status_ = cudaErrorInvalidConfiguration;
      return;
    }
#ifdef __CUDACC__
    if (shared > 48 * 1024) {
      status_ = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
      if (status_ != cudaSuccess) return;
    }
#endif
    CUDA_LAUNCH(kernel, dim3(unsigned(blocks)), dim3(unsigned(threads)), shared, stream_, arguments...);
    status_ = cudaGetLastError();
  }

 private:
  cudaStream_t stream_;
  cudaError_t status_ = cudaSuccess;
};

template <class T> Columns<T> columns_of(const PositionProblem& p, const void* data, const int64_t (&strides)[4]) {
  constexpr int64_t V = 16 / sizeof(T);
  const bool vectors = strides[3] == 1 && p.channels % V == 0 && strides[0] % V == 0 && strides[1] % V == 0 && strides[2] % V == 0 &&
                       reinterpret_cast<uintptr_t>(data) % 16 == 0;
  return {static_cast<const T*>(data), strides[0], strides[1], strides[2], strides[3], uint32_t(std::max<int64_t>(p.channels, 1)), vectors};
}

template <class A> void pack(Launcher& launch, const PositionProblem& p, Pieces<A>& pieces) {
  Geometry<A>& geo = pieces.geo;
  auto strided2 = [](const void* data, const int64_t (&s)[2]) { return Strided2<A>{static_cast<const A*>(data), {s[0], s[1]}}; };
  for (int64_t first = 0; p.period && first < p.d; first += 16) {
    Period period{};
    for (int64_t i = first; i < std::min(p.d, first + 16); ++i) period.length[i - first] = p.period[i];
    launch(pack_period<A>, 1, 16, 0, pieces.period, period, int(first), int(p.d));
  }
  launch(pack_weights<A>, geo.log_weights.entries * geo.log_weights.pad / POINTS, POINTS, 0, geo.log_weights, strided2(p.weights, p.weights_strides), p.m);
  launch(pack_radius<A>, geo.reach.entries * geo.reach.pad / POINTS, POINTS, 0, geo.reach, strided2(p.radius, p.radius_strides), p.n);
  auto points = [&](const Points<A>& to, const void* data, const int64_t (&s)[3], int weighted) {
    const int64_t tiles = to.entries * to.pad / POINTS;
    if (p.wide_positions) {
      launch(pack_points<A, double>, tiles, POINTS, 0, to, Strided3<double>{static_cast<const double*>(data), {s[0], s[1], s[2]}}, geo.log_weights, weighted);
    } else {
      launch(pack_points<A, A>, tiles, POINTS, 0, to, Strided3<A>{static_cast<const A*>(data), {s[0], s[1], s[2]}}, geo.log_weights, weighted);
    }
  };
  points(geo.query, p.query_pos, p.query_pos_strides, 0);
  points(geo.key, p.key_pos, p.key_pos_strides, 1);
}

template <class T, bool TF32, int CT, int THREADS, bool TRANSPOSED, class A>
void launch_sum(Launcher& launch, const Geometry<A>& geo, const Columns<T>& x, const SumOutput<T, A>& o) {
  using S = SumShape<Tile<T, TF32>, CT, THREADS>;
  const size_t shared = (size_t(ROWS) * S::P_PITCH + size_t(S::BK) * S::X_PITCH) * sizeof(T);
  const int64_t column_blocks = std::max<int64_t>(1, (o.columns + CT - 1) / CT);
  const int64_t tiles = (TRANSPOSED ? geo.key.pad : geo.query.pad) / ROWS;
  launch(weighted_sum<T, TF32, CT, THREADS, TRANSPOSED>, geo.geometries * o.heads * tiles * column_blocks, THREADS, shared, geo, x, o);
}

// Wide blocks compute P once for more columns, narrow ones waste less where there are few.
template <class T, bool TF32, bool TRANSPOSED, class A>
void launch_sum(Launcher& launch, const Geometry<A>& geo, const Columns<T>& x, const SumOutput<T, A>& o) {
  using Tl = Tile<T, TF32>;
  if constexpr (Tl::is_double) {
    return launch_sum<T, TF32, 64, 256, TRANSPOSED>(launch, geo, x, o);
  } else {
    if (o.columns <= 64) return launch_sum<T, TF32, 64, 256, TRANSPOSED>(launch, geo, x, o);
    if constexpr (Tl::arithmetic == Arithmetic::tf32x3) {  // three products a score: computing P again for each 256 columns is little beside them
      return launch_sum<T, TF32, 256, 512, TRANSPOSED>(launch, geo, x, o);
    } else {
      if (o.columns <= 256) return launch_sum<T, TF32, 256, 256, TRANSPOSED>(launch, geo, x, o);
      return launch_sum<T, TF32, 512, 512, TRANSPOSED>(launch, geo, x, o);
    }
  }
}

template <class T, bool TF32> int forward(const PositionProblem& p, const PositionOutput& output, void* memory, void* stream) {
  using A = typename Tile<T, TF32>::Acc;
  Scratch scratch(memory);
  Pieces<A> pieces(p, nullptr, scratch);
  Geometry<A>& geo = pieces.geo;
  Launcher launch(stream);
  pack(launch, p, pieces);
  launch(find_shifts<A>, geo.geometries * geo.query.pad / (PACK_THREADS / 8), PACK_THREADS, 0, geo);
  launch(find_tops<A>, geo.drop.entries * geo.drop.pad / POINTS, POINTS, 0, geo.drop);
  const SumOutput<T, A> o{static_cast<T*>(output.out), static_cast<A*>(output.lse), static_cast<A*>(output.stats), p.n, p.m, p.columns(),
                          int(p.heads), int(p.value_heads)};
  launch_sum<T, TF32, false>(launch, geo, columns_of<T>(p, p.value, p.value_strides), o);
  return launch.status();
}

template <class T, bool TF32, bool TRANSPOSED, class A>
void launch_score_sums(Launcher& launch, const PositionProblem& p, const Geometry<A>& geo, const Columns<T>& grad_out, const Columns<T>& value,
                       A* sums, bool positions) {
  if (!sums) return;
  using S = SideShape<Tile<T, TF32>>;
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

int position_attention_backward_cuda(const PositionProblem& p, const PositionGradients& gradients, void* scratch, void* stream) {
  switch (p.dtype) {
    case DType::float64: return cuda::backward<double, false>(p, gradients, scratch, stream);
    case DType::bfloat16: return cuda::backward<cuda::bf16, false>(p, gradients, scratch, stream);
    case DType::float16: return cuda::backward<cuda::f16, false>(p, gradients, scratch, stream);
    default: return p.tf32 ? cuda::backward<float, true>(p, gradients, scratch, stream) : cuda::backward<float, false>(p, gradients, scratch, stream);
  }
}

const char* cuda_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace continuum_ops
