// The geometry of a call as the kernels want it: points in visiting order, their boxes, weights and radii, for each group of the batch.
#pragma once

#include <cfloat>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

#include "memory.h"
#include "position_attention.h"
#include "position_order.h"

namespace continuum_ops {

// Memory that nobody has to clear first, on cache lines; a few vectors longer than asked for, since tiles of products overhang.
template <class T> class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) : Buffer(size_t(count) * sizeof(T) + OVERHANG, nullptr) {
    if (!data_) throw OutOfMemory(double(count) * sizeof(T));
    ask_for_large_pages(data_.get(), count * int64_t(sizeof(T)));
  }
  Buffer(int64_t count, T x) : Buffer(count) { std::fill_n(data_.get(), count, x); }
  T* get() const { return data_.get(); }
  T& operator[](int64_t i) const { return data_.get()[i]; }

 private:
  static constexpr size_t OVERHANG = 4096;
  struct Free {
    size_t bytes = 0;
    void operator()(T* p) const { Pieces::give(p, bytes); }
  };
  std::unique_ptr<T[], Free> data_;

  Buffer(size_t bytes, std::nullptr_t) : data_(static_cast<T*>(Pieces::take(bytes)), Free{bytes}) {}
};

// Strided rows (count) of numbers of type T; data is null where the argument is absent.
template <class T> struct Row {
  const T* data = nullptr;
  int64_t stride = 0;
  T operator[](int64_t i) const { return data[i * stride]; }
  explicit operator bool() const { return data != nullptr; }
};

inline void refuse(const char* what, double got, const char* where, int64_t index) {
  throw std::invalid_argument("position_attention: " + std::string(what) + ", got " + std::to_string(got) + " for " + where + " " +
                              std::to_string(index));
}

template <class T> class Side {
 public:
  PointSet set;

  void build(const PointRows& rows, std::vector<int64_t> places, bool split) {
    places_ = std::move(places);
    const int64_t count = int64_t(places_.size()), padded = (count + LANE_BLOCK - 1) / LANE_BLOCK * LANE_BLOCK;
    coordinates_ = Buffer<T>(rows.d * padded * (split ? 2 : 1));
    for (int64_t t = 0; t < rows.d; ++t) {
      T *high = coordinates_.get() + t * padded, *low = coordinates_.get() + (rows.d + t) * padded;
      for (int64_t i = 0; i < count; ++i) {
        const double x = rows.at(places_[i], t);
        high[i] = T(x);
        if (split) low[i] = T(std::isfinite(high[i]) ? x - double(high[i]) : 0);
      }
      if (count == padded) continue;
      std::fill(high + count, high + padded, high[count - 1]);
      if (split) std::fill(low + count, low + padded, low[count - 1]);
    }
    set = {count, padded, places_.data(), coordinates_.get(), nullptr, nullptr};
    set.block_box = boxes(rows, LANE_BLOCK, block_boxes_);
    set.tile_box = count <= std::min(LANE_BLOCK, DEPTH_TILE) ? set.block_box : boxes(rows, DEPTH_TILE, tile_boxes_);
  }

 private:
  std::vector<int64_t> places_;
  Buffer<T> coordinates_;
  std::vector<double> block_boxes_, tile_boxes_;

  const double* boxes(const PointRows& rows, int64_t size, std::vector<double>& to) const {
    constexpr double INF = std::numeric_limits<double>::infinity();
    const int64_t count = set.count, d = rows.d;
    to.assign((count + size - 1) / size * 2 * d, 0);
    for (int64_t first = 0; first < count; first += size) {
      double* box = to.data() + first / size * 2 * d;
      bool finite = true;
      for (int64_t t = 0; t < d; ++t) {
        double low = INF, high = -INF;
        for (int64_t i = first; i < std::min(first + size, count); ++i) {
          const double x = rows.at(places_[i], t);
          finite &= bool(std::isfinite(x)) && std::isfinite(T(x));
          low = std::min(low, x), high = std::max(high, x);
        }
        box[t] = low, box[d + t] = high;
      }
      if (!finite) std::fill_n(box, d, -INF), std::fill_n(box + d, d, INF);
    }
    return to.data();
  }
};

// One group with what it owns.
template <class T> class GroupData {
 public:
  PositionGroup g;

  void build(const PointRows& queries, const std::vector<int64_t>& query_order, const PointRows& keys,
             const std::vector<int64_t>& key_order, Row<T> weights, Row<T> radius, bool split) {
    query_.build(queries, query_order, split);
    std::vector<int64_t> alive = key_order;
    if (weights) {
      for (int64_t k = 0; k < keys.count; ++k) {
        if (!(weights[k] >= T(0) && weights[k] <= std::numeric_limits<T>::max())) {
          refuse("weights must be >= 0 and finite", double(weights[k]), "key", k);
        }
      }
      alive.erase(std::remove_if(alive.begin(), alive.end(), [&](int64_t k) { return weights[k] == T(0); }), alive.end());
    }
    key_.build(keys, std::move(alive), split);
    g.query = query_.set, g.key = key_.set;
    if (weights) build_bias(weights);
    if (radius) build_reach(radius);
  }

 private:
  Side<T> query_, key_;
  std::vector<T> bias_, reach_;
  std::vector<double> tile_reach_, block_reach_;

  void build_bias(Row<T> weights) {
    const int64_t count = g.key.count;
    T most = 0, least = std::numeric_limits<T>::infinity();
    for (int64_t j = 0; j < count; ++j) most = std::max(most, weights[g.key.place[j]]), least = std::min(least, weights[g.key.place[j]]);
    if (count == 0) return;
    g.log2_max_weight = std::log2(double(most));
    if (least == most) return;
    bias_.assign(g.key.padded, T(0));
    auto log2_ratio = [&](double x) {
      const double ratio = x / double(most);
      return ratio >= DBL_MIN ? std::log2(ratio) : std::log2(x) - g.log2_max_weight;
    };
    for (int64_t j = 0; j < count; ++j) bias_[j] = T(log2_ratio(weights[g.key.place[j]]));
    g.min_bias = log2_ratio(least);
    g.bias = bias_.data();
  }

  void build_reach(Row<T> radius) {
    const int64_t count = g.query.count;
    for (int64_t i = 0; i < count; ++i) {
      if (!(radius[i] >= T(0))) refuse("radius must be >= 0", double(radius[i]), "query", i);
    }
    reach_.resize(g.query.padded);
    for (int64_t i = 0; i < g.query.padded; ++i) {
      const double r = radius[g.query.place[std::min(i, count - 1)]];
      reach_[i] = T(r * r * (1 + 8 * double(std::numeric_limits<T>::epsilon())));
    }
    g.reach = reach_.data();
    auto largest = [&](int64_t size, std::vector<double>& to) {
      for (int64_t first = 0; first < count; first += size) {
        to.push_back(double(*std::max_element(reach_.begin() + first, reach_.begin() + std::min(first + size, count))));
      }
      return to.data();
    };
    g.tile_reach = largest(DEPTH_TILE, tile_reach_);
    g.block_reach = largest(LANE_BLOCK, block_reach_);
  }
};

}  // namespace continuum_ops
