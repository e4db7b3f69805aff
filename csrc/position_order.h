// The order in which points are visited: along a Hilbert curve, so that tiles of consecutive points are compact.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace continuum_ops {

// Strided coordinates (count, d), float or double.
struct PointRows {
  const void* data = nullptr;
  bool wide = false;
  int64_t count = 0, d = 0, row = 0, column = 0;

  double at(int64_t i, int64_t t) const {
    const int64_t o = i * row + t * column;
    return wide ? static_cast<const double*>(data)[o] : double(static_cast<const float*>(data)[o]);
  }
};

constexpr int64_t FEW_POINTS = 128;  // so few are taken as they come

// Place on the curve of a point whose n coordinates have `bits` bits (J. Skilling, "Programming the Hilbert curve", 2004).
inline uint32_t hilbert_index(uint32_t (&x)[3], int n, int bits) {
  for (uint32_t q = 1u << (bits - 1); q > 1; q >>= 1) {
    for (int i = 0; i < n; ++i) {
      if (x[i] & q) {
        x[0] ^= q - 1;
      } else {
        const uint32_t t = (x[0] ^ x[i]) & (q - 1);
        x[0] ^= t;
        x[i] ^= t;
      }
    }
  }
  for (int i = 1; i < n; ++i) x[i] ^= x[i - 1];
  uint32_t t = 0;
  for (uint32_t q = 1u << (bits - 1); q > 1; q >>= 1) {
    if (x[n - 1] & q) t ^= q - 1;
  }
  uint32_t index = 0;
  for (int bit = bits - 1; bit >= 0; --bit) {
    for (int i = 0; i < n; ++i) index = index << 1 | (((x[i] ^ t) >> bit) & 1u);
  }
  return index;
}

inline std::vector<int64_t> visiting_order(const PointRows& p) {
  std::vector<int64_t> order(p.count);
  std::iota(order.begin(), order.end(), int64_t(0));
  if (p.count < FEW_POINTS || p.d == 0) return order;
  // The three axes of largest extent decide.
  std::vector<double> low(p.d, std::numeric_limits<double>::infinity()), extent(p.d, 0);
  for (int64_t t = 0; t < p.d; ++t) {
    double high = -low[t];
    for (int64_t i = 0; i < p.count; ++i) {
      const double x = p.at(i, t);
      if (std::isfinite(x)) low[t] = std::min(low[t], x), high = std::max(high, x);
    }
    extent[t] = std::max(0.0, high - low[t]);
  }
  std::vector<int64_t> axes(p.d);
  std::iota(axes.begin(), axes.end(), int64_t(0));
  std::stable_sort(axes.begin(), axes.end(), [&](int64_t a, int64_t b) { return extent[a] > extent[b]; });
  const int n = int(std::min<int64_t>(p.d, 3)), bits = 30 / n;
  const double cells = double((1u << bits) - 1), scale = extent[axes[0]] > 0 ? cells / extent[axes[0]] : 0;
  std::vector<std::pair<uint32_t, int64_t>> keys(p.count);
  for (int64_t i = 0; i < p.count; ++i) {
    uint32_t x[3] = {0, 0, 0};
    for (int k = 0; k < n; ++k) {
      const double cell = (p.at(i, axes[k]) - low[axes[k]]) * scale;
      x[k] = cell > 0 ? uint32_t(std::min(cell, cells)) : 0;  // a NaN goes to 0
    }
    keys[i] = {hilbert_index(x, n, bits), i};
  }
  std::sort(keys.begin(), keys.end());
  for (int64_t i = 0; i < p.count; ++i) order[i] = keys[i].second;
  return order;
}

}  // namespace continuum_ops
