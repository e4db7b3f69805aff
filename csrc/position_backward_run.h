// The direct backward pass of position_attention: packing, the split into tasks, and the sums of their parts.
#pragma once

#include "position_problem.h"

namespace continuum_ops {

constexpr double LOG2E = 1.4426950408889634074;

template <class T> void add_into(T* to, const T* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

// The backward pass. A task owns the sums it writes; where several tasks share a sum, each writes a part of its own and the parts are
// added in a fixed order: the bits do not depend on which thread ran what.
template <class T> class BackwardRun {
 public:
  Problem<T> problem;
  const PositionProblem& a = problem.a;
  const PositionAttentionKernels& kernels = problem.kernels;
  const bool value, scores;

  BackwardRun(const Arguments& x, bool value, bool scores, const std::vector<std::vector<int64_t>>* only = nullptr)
      : problem(x, only), value(value), scores(scores) {}

  // grad_value: (B, HV, M, C), cleared
  void run(const Tensor& grad_out, const T* grad_lse, const void* out, const T* stats, T* grad_value) {
    load_rows(grad_lse, stats);
    find_far_keys();
    pack(grad_out, out);
    split();
    const int64_t width = a.value_heads * a.m * a.c * a.entries, groups = problem.groups;
    value_parts_ = Buffer<T>(value && query_parts_ > 1 ? groups * (query_parts_ - 1) * width : 0, T(0));
    key_ = Buffer<T>(groups * query_parts_ * a.m * a.d, T(0));
    bias_ = Buffer<T>(groups * query_parts_ * a.m, T(0));
    query_ = Buffer<T>(groups * key_parts_ * a.n * a.d, T(0));
    rate_ = Buffer<double>(groups * key_parts_ * query_parts_ * a.heads, 0.0);
    const double work = problem.work() * (int(value) + int(scores)) + double(groups) * width;
    run_tasks(groups * key_parts_ * query_parts_, work, kernels.backward_scratch(a), [&](int64_t t, void* scratch) {
      const int64_t q = t % query_parts_, k = t / query_parts_ % key_parts_, i = t / query_parts_ / key_parts_;
      const PositionGroup& g = problem.data[i].g;
      const int64_t blocks = ceil_div(g.key.count, LANE_BLOCK), tiles = ceil_div(g.query.count, DEPTH_TILE);
      PositionGradients to{};
      to.value = value, to.scores = scores;
      to.block_begin = blocks * k / key_parts_, to.block_end = blocks * (k + 1) / key_parts_;
      to.tile_begin = tiles * q / query_parts_, to.tile_end = tiles * (q + 1) / query_parts_;
      to.grad_value = q == 0 ? grad_value + i * width : value_parts_.get() + (i * (query_parts_ - 1) + q - 1) * width;
      to.grad_key_pos = key_.get() + (i * query_parts_ + q) * a.m * a.d;
      to.grad_bias = bias_.get() + (i * query_parts_ + q) * a.m;
      to.grad_query_pos = query_.get() + (i * key_parts_ + k) * a.n * a.d;
      to.grad_rate = rate_.get() + t * a.heads;
      kernels.backward(a, g, to, scratch);
    });
    for (int64_t i = 0; value && i < groups; ++i) {
      for (int64_t q = 1; q < query_parts_; ++q) {
        add_into(grad_value + i * width, value_parts_.get() + (i * (query_parts_ - 1) + q - 1) * width, width);
      }
    }
  }

  // The sums of all parts, and of all groups where the batch shares the argument (to: one sample) or each group's own, are added.
  void query_positions(T* to, bool shared) const {
    for (int64_t i = 0; i < problem.groups; ++i) {
      for (int64_t k = 0; k < key_parts_; ++k) {
        const T* from = query_.get() + (i * key_parts_ + k) * a.n * a.d;
        T* rows = to + (shared ? 0 : i) * a.n * a.d;
        for (int64_t j = 0; j < problem.data[i].g.query.count; ++j) add_into(rows + problem.data[i].g.query.place[j] * a.d, from + j * a.d, a.d);
      }
    }
  }
  void key_positions(T* to, bool shared) const { sum_parts(key_.get(), a.m * a.d, to, shared); }
  void log_weights(T* to, bool shared) const { sum_parts(bias_.get(), a.m, to, shared); }
  void rates(T* to) const {
    for (int64_t h = 0; h < a.heads; ++h) {
      double sum = 0;
      for (int64_t t = 0; t < problem.groups * key_parts_ * query_parts_; ++t) sum += rate_[t * a.heads + h];
      to[h] += T(sum);
    }
  }

 private:
  int64_t key_parts_ = 1, query_parts_ = 1;
  Buffer<T> nearest_, inverse_sum_, delta_, shift_, values_, gradients_, value_parts_, key_, bias_, query_;
  Buffer<double> far_, near_, rate_;
  Buffer<uint8_t> special_block_, special_tile_;

  void sum_parts(const T* from, int64_t width, T* to, bool shared) const {
    for (int64_t i = 0; i < problem.groups; ++i) {
      for (int64_t q = 0; q < query_parts_; ++q) add_into(to + (shared ? 0 : i) * width, from + (i * query_parts_ + q) * width, width);
    }
  }

  int64_t padded_rows() const { return problem.lane_blocks() * LANE_BLOCK; }
  int64_t tiles() const { return ceil_div(problem.rows, DEPTH_TILE); }

  void load_rows(const T* grad_lse, const T* stats) {
    const int64_t rows = padded_rows(), groups = problem.groups;
    nearest_ = Buffer<T>(groups * rows, T(0));
    inverse_sum_ = Buffer<T>(groups * a.heads * rows, T(0));
    delta_ = Buffer<T>(groups * a.heads * rows, T(0));
    shift_ = Buffer<T>(groups * a.heads * rows, T(0));
    for (int64_t i = 0; i < groups; ++i) {
      PositionGroup& g = problem.data[i].g;
      for (int64_t h = 0; h < a.heads; ++h) {
        for (int64_t j = 0; j < g.query.count; ++j) {
          const int64_t from = (i * a.heads + h) * a.n + g.query.place[j], to = i * a.heads * rows + h * g.query.padded + j;
          const T sum = stats[2 * from + 1];
          if (sum == T(0)) continue;
          if (h == 0) nearest_[i * rows + j] = stats[2 * from];
          inverse_sum_[to] = 1 / sum;
          if (grad_lse) delta_[to] = -grad_lse[from];
        }
      }
      g.nearest = nearest_.get() + i * rows;
      g.inverse_sum = inverse_sum_.get() + i * a.heads * rows;
      g.delta = delta_.get() + i * a.heads * rows;
      g.shift = shift_.get() + i * a.heads * rows;
    }
  }

  // Could a tile be negligible? Only if the largest rate makes it so across the whole extent.
  bool may_skip(const PositionGroup& g) const {
    double most = 0, across = 0;
    for (int64_t h = 0; h < a.heads; ++h) most = std::max(most, a.rate[h]);
    for (int64_t t = 0; t < a.d; ++t) {
      double low = std::numeric_limits<double>::infinity(), high = -low;
      auto extend = [&](const double* box, int64_t count) {
        for (int64_t i = 0; i < count; ++i) low = std::min(low, box[2 * a.d * i + t]), high = std::max(high, box[2 * a.d * i + a.d + t]);
      };
      extend(g.query.tile_box, ceil_div(g.query.count, DEPTH_TILE));
      extend(g.key.tile_box, ceil_div(g.key.count, DEPTH_TILE));
      across += (high - low) * (high - low);
    }
    return g.key.count > 0 && !(most * LOG2E * across < 30);
  }

  void find_far_keys() {
    constexpr double INF = std::numeric_limits<double>::infinity();
    const int64_t rows = padded_rows(), blocks = problem.lane_blocks(), groups = problem.groups;
    far_ = Buffer<double>(groups * tiles(), INF), near_ = Buffer<double>(groups * tiles(), INF);
    std::vector<uint8_t> looked(groups);
    size_t scratch = 0;
    for (int64_t i = 0; i < groups; ++i) {
      PositionGroup& g = problem.data[i].g;
      looked[i] = may_skip(g) || g.min_bias < -60;
      scratch = std::max(scratch, kernels.forward_scratch(a, g, 0));
      g.tile_far = far_.get() + i * tiles(), g.tile_near = near_.get() + i * tiles();
    }
    const Buffer<T> apart(groups * rows, T(INF));
    run_tasks(groups * blocks, double(groups) * a.n * a.m, scratch, [&](int64_t t, void* memory) {
      const int64_t i = t / blocks, block = t % blocks;
      if (!looked[i] || block * LANE_BLOCK >= problem.data[i].g.query.count) return;
      T* to = apart.get() + i * rows + block * LANE_BLOCK;
      kernels.near_keys(a, problem.data[i].g, block, nullptr, to, shift_.get() + i * a.heads * rows, memory);
    });
    for (int64_t i = 0; i < groups; ++i) {
      const PositionGroup& g = problem.data[i].g;
      const T* reach = static_cast<const T*>(g.reach);
      for (int64_t tile = 0; looked[i] && tile < tiles(); ++tile) {
        double far = 0, near = INF;
        for (int64_t j = tile * DEPTH_TILE; j < std::min((tile + 1) * DEPTH_TILE, g.query.count); ++j) {
          const double d2 = nearest_[i * rows + j], other = apart[i * rows + j];
          if (a.heads > 0 && inverse_sum_[i * a.heads * rows + j] == T(0)) continue;  // no key: nothing depends on this row
          far = d2 <= far ? far : d2;  // a NaN makes it infinite
          if (!(d2 == d2)) far = INF;
          if (reach && other > double(reach[j])) continue;
          far = std::max(far, other), near = std::min(near, other);
        }
        far_[i * tiles() + tile] = far, near_[i * tiles() + tile] = near;
      }
    }
  }

  void pack(const Tensor& grad_out, const void* out) {
    const int64_t groups = problem.groups, padded = problem.row_elements(), rows = problem.rows * padded, columns = a.columns();
    const BatchedOperand source = batched(View(grad_out));
    gradients_ = Buffer<T>(groups * a.heads * rows);
    special_tile_ = Buffer<uint8_t>(groups * tiles(), 0);
    std::vector<uint8_t> special(groups * a.heads * tiles());
    run_tasks(groups * a.heads * tiles(), double(groups) * a.heads * rows * 4, 2 * padded * sizeof(T), [&](int64_t t, void* scratch) {
      const int64_t tile = t % tiles(), head = t / tiles() % a.heads, i = t / tiles() / a.heads;
      const PositionGroup& g = problem.data[i].g;
      const int64_t begin = tile * DEPTH_TILE, end = std::min(begin + DEPTH_TILE, g.query.count);
      if (begin >= end || (g.skip && g.skip[head])) return;
      T *to = gradients_.get() + i * a.heads * rows + head * g.query.count * padded, *delta = delta_.get() + i * a.heads * padded_rows();
      special[t] = kernels.pack_gradient(a, source, out, g, head, begin, end, to, delta, scratch);
    });
    for (int64_t t = 0; t < groups * a.heads * tiles(); ++t) special_tile_[t / (a.heads * tiles()) * tiles() + t % tiles()] |= special[t];

    const int64_t blocks = ceil_div(a.m, LANE_BLOCK), block_values = columns * LANE_BLOCK;
    const int64_t group_values = blocks * a.value_heads * block_values;
    values_ = Buffer<T>(scores ? groups * group_values : 0);
    special_block_ = Buffer<uint8_t>(groups * blocks, 0);
    for (int64_t i = 0; i < groups; ++i) {
      PositionGroup& g = problem.data[i].g;
      g.grad_out = gradients_.get() + i * a.heads * rows;
      g.value_transposed = values_.get() + (scores ? i * group_values : 0);
      g.special_tile = special_tile_.get() + i * tiles();
      g.special_block = special_block_.get() + i * blocks;
    }
    if (!scores) return;
    run_tasks(groups * blocks, double(groups) * group_values, padded * sizeof(T), [&](int64_t t, void* scratch) {
      const int64_t i = t / blocks, block = t % blocks;
      const PositionGroup& g = problem.data[i].g;
      if (block * LANE_BLOCK >= g.key.count) return;
      for (int64_t h = 0; h < a.value_heads; ++h) {
        T* to = values_.get() + i * group_values + (block * a.value_heads + h) * block_values;
        special_block_[t] |= kernels.pack_transposed(a, g, h, block, to, scratch);
      }
    });
  }

  void split() {
    const int64_t threads = torch::stable::get_num_threads(), groups = std::max<int64_t>(problem.groups, 1);
    if (threads == 1) return;
    key_parts_ = std::max<int64_t>(1, std::min(ceil_div(4 * threads, groups), ceil_div(a.m, LANE_BLOCK)));
    const int64_t missing = ceil_div(4 * threads, groups * key_parts_);
    query_parts_ = std::max<int64_t>(1, std::min(missing, tiles() / 8));
  }
};

}  // namespace continuum_ops
