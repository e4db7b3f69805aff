// Which grid serves one head of one group, and whether it is worth while.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "position_attention.h"
#include "position_transform.h"

namespace continuum_ops {

struct TransformBox {
  double low[MAX_TRANSFORM_AXES] = {}, extent[MAX_TRANSFORM_AXES] = {};
};

struct TransformPlan {
  bool use = false;
  int64_t points[MAX_TRANSFORM_AXES] = {1, 1, 1};
  int64_t query_cells[MAX_TRANSFORM_AXES] = {1, 1, 1}, key_cells[MAX_TRANSFORM_AXES] = {1, 1, 1};
  TransformBox query, key;
  double antipode = 0;  // the Gaussian of half a period, where the distance has a kink, if pairs are so far apart
};

// Nodes along an axis of a cell, and the width of the cell, in units of 1 / sqrt(rate), up to which exp(-rate (x - y)^2) is interpolated
// between any two cells to 1e-8 of the largest value that it has there, or of e^-4 where it is smaller everywhere.
struct CellWidth {
  int64_t points;
  double width;
};
constexpr CellWidth CELL_WIDTHS[] = {{5, 0.077}, {6, 0.150}, {7, 0.260}, {8, 0.424},  {9, 0.625},
                                     {10, 0.810}, {11, 1.015}, {12, 1.271}, {13, 1.577}, {14, 1.834}};
constexpr int64_t MOST_NODES = 1024;      // of a cell
constexpr double FARTHEST_BIAS = -17;     // log2 of the least weight over the largest: rows of light keys see errors of heavy ones
constexpr double MOST_ANTIPODE = 1e-10;    // Gaussian of half a period: beyond it few rows would be accurate
constexpr int64_t FEW = 256;              // points that are not worth a grid
constexpr double GAIN = 2, FIXED = 2.5e7;  // at least this factor less work, and multiplications that the rest costs

// The box of the points of one side; an infinite extent where a coordinate is not finite.
inline TransformBox bounding_box(const PointSet& s, int64_t d) {
  constexpr double INF = std::numeric_limits<double>::infinity();
  TransformBox box;
  for (int64_t t = 0; t < d; ++t) {
    double low = INF, high = -INF;
    for (int64_t i = 0; i < (s.count + DEPTH_TILE - 1) / DEPTH_TILE; ++i) {
      low = std::min(low, s.tile_box[i * 2 * d + t]), high = std::max(high, s.tile_box[i * 2 * d + d + t]);
    }
    box.low[t] = low, box.extent[t] = high - low;
  }
  return box;
}

// Multiplications of the direct way: all pairs but those of tiles that are negligible.
inline double direct_work(const PositionProblem& a, const TransformBox& key, int64_t queries, int64_t keys, double rate) {
  double seen = 1;
  const double reach = rate > 0 ? std::sqrt((30 + std::log2(double(keys) + 1)) * 0.693 / rate) : std::numeric_limits<double>::infinity();
  for (int64_t t = 0; t < a.d; ++t) {
    if (key.extent[t] > 0) seen *= std::min(1.0, 2 * reach / key.extent[t]);
  }
  return double(queries) * double(keys) * seen * (double(a.columns()) + 16);
}

enum class Grids { never, when_faster, when_possible };  // for tests and benchmarks
std::atomic<Grids>& use_of_grids();
int64_t heads_through_grids();  // so far

inline bool few_points(int64_t queries, int64_t keys) {
  return std::min(queries, keys) < (use_of_grids() == Grids::when_possible ? 1 : FEW);
}

inline TransformPlan plan_transform(const PositionProblem& a, const PositionGroup& g, double rate) {
  TransformPlan plan;
  const int64_t queries = g.query.count, keys = g.key.count;
  const bool always = use_of_grids() == Grids::when_possible;
  if (use_of_grids() == Grids::never || a.dtype == DType::float64 || g.reach || a.d < 1 || a.d > MAX_TRANSFORM_AXES) return plan;
  if (few_points(queries, keys) || a.columns() < 1) return plan;
  if (g.min_bias < FARTHEST_BIAS) return plan;
  plan.query = bounding_box(g.query, a.d), plan.key = bounding_box(g.key, a.d);
  for (int64_t t = 0; t < a.d; ++t) {
    if (!(plan.query.extent[t] < 1e30) || !(plan.key.extent[t] < 1e30)) return plan;
    const double half = a.period ? a.period[t] / 2 : std::numeric_limits<double>::infinity();
    const double farthest = std::max(plan.query.low[t] + plan.query.extent[t] - plan.key.low[t],
                                     plan.key.low[t] + plan.key.extent[t] - plan.query.low[t]);
    if (half < farthest) plan.antipode = std::max(plan.antipode, std::exp(-rate * half * half));
  }
  if (plan.antipode > MOST_ANTIPODE) return plan;
  constexpr int options = int(sizeof(CELL_WIDTHS) / sizeof(CELL_WIDTHS[0]));
  const double root = std::sqrt(rate), columns = double(a.columns());
  double best = always ? std::numeric_limits<double>::infinity() : direct_work(a, plan.key, queries, keys, rate) / GAIN - FIXED;
  // Grids and matrices stay within what the points take.
  const double most = double(std::max(queries, keys));
  const double grid_limit = std::max(most / 2, 32768.0), matrix_limit = std::max(8 * most, 131072.0);
  int64_t combinations = 1;
  for (int64_t t = 0; t < a.d; ++t) combinations *= options;
  for (int64_t code = 0; code < combinations; ++code) {
    int64_t points[3] = {1, 1, 1}, of_query[3] = {1, 1, 1}, of_key[3] = {1, 1, 1}, rest = code, cell = 1;
    double all_query = 1, all_key = 1;
    bool fits = true;
    for (int64_t t = 0; t < a.d; ++t, rest /= options) {
      const CellWidth& c = CELL_WIDTHS[rest % options];
      const double q = std::ceil(plan.query.extent[t] * root / c.width), k = std::ceil(plan.key.extent[t] * root / c.width);
      fits = fits && q < 1e6 && k < 1e6;
      if (!fits) break;
      points[t] = c.points, cell *= c.points;
      of_query[t] = std::max<int64_t>(1, int64_t(q)), of_key[t] = std::max<int64_t>(1, int64_t(k));
      all_query *= double(of_query[t] * c.points), all_key *= double(of_key[t] * c.points);
    }
    if (!fits || cell > MOST_NODES || std::max(all_query, all_key) > grid_limit) continue;
    const double factors = double(points[0] + points[1] + points[2]);
    double work = double(queries + keys) * (double(cell) * (columns + 40) + 60 * factors) + 2 * (all_query + all_key) * (columns + 8);
    double entries = 0;  // of the matrices between the grids
    for (int64_t t = 0; t < a.d; ++t) entries += double(of_query[t] * points[t]) * double(of_key[t] * points[t]);
    if (entries > matrix_limit) continue;
    work += 50 * entries;
    double there = all_key, back = all_query, largest = 0;  // products in float64, from the last axis to the first
    for (int64_t t = a.d - 1; t >= 0; --t) {
      there *= double(of_query[t]) / double(of_key[t]), back *= double(of_key[t]) / double(of_query[t]);
      largest = std::max({largest, there, back});
      work += 2 * there * double(of_key[t] * points[t]) * columns;
    }
    if (work < best && largest <= grid_limit) {
      best = work, plan.use = true;
      std::copy_n(points, 3, plan.points), std::copy_n(of_query, 3, plan.query_cells), std::copy_n(of_key, 3, plan.key_cells);
    }
  }
  return plan;
}

}  // namespace continuum_ops
