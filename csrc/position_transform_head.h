// One head of one group of position attention through a grid: from points to out, and back from grad_out to gradients.
#pragma once

#include <vector>

#include "position_groups.h"
#include "position_transform_plan.h"

namespace continuum_ops {

struct TransformPoints {
  PointRows query, key;
  Row<float> weights;  // data null: ones
};

// Where gradients of a group are added: rows are those of the tensors; null where not wanted.
struct TransformGradients {
  float* value = nullptr;  // (entries, value_heads, m, c)
  double *bias = nullptr, *query = nullptr, *key = nullptr, *rate = nullptr;  // (m): d / d log w; (n, d); (m, d); one number
};

class HeadTransform {
 public:
  HeadTransform(const PositionProblem& a, const PositionGroup& g, const TransformPoints& points, int64_t head, const TransformPlan& plan);

  // Rows whose sum float32 does not hold through the grid: nearly all of it cancels, or they are far from all keys.
  const std::vector<uint8_t>& refused() const { return refused_; }  // (n)

  // False, with nothing of use written, if a value is not finite. nearest: (n), or null if stats are not wanted.
  bool forward(const PositionOutput& o, int64_t group, const float* nearest) const;

  // False if a value or a gradient is not finite; to be asked first.
  bool prepare(const TransformField& grad_out, const void* out, const float* grad_lse, bool scores);
  // Without the refused rows.
  void backward(const TransformField& grad_out, const TransformGradients& to) const;

 private:
  struct Side {
    TransformSide s;
    std::vector<int64_t> place, begin, cell_of_task, first_of_task, last_of_task;
    std::vector<double> node[MAX_TRANSFORM_AXES];
    Buffer<float> basis, mass;
  };
  // exp(-rate z^2), z^2 exp(-rate z^2), d/dz exp(-rate z^2), z = x - y; and a bound of the first's error, in units of ROUNDING
  enum Kind { GAUSSIAN, SQUARED, SLOPE, ERROR };

  const PositionProblem& a_;
  const PositionGroup& g_;
  int64_t head_, value_head_;
  double rate_, antipode_, log_max_weight_ = 0;
  Side query_, key_;
  std::vector<double> matrix_[MAX_TRANSFORM_AXES][4];  // (query nodes, key nodes)
  Buffer<double> ones_, total_;                        // of the query grid: a field of ones; of the queries: the sum of their terms
  std::vector<uint8_t> refused_;
  std::vector<float> centre_;  // of values, a constant for each column
  std::vector<double> delta_;  // of the queries in cell order: grad_out . (out - centre) - grad_lse

  int64_t between_ = 0;  // nodes of the largest grid on the way from one side to the other, those of the sides included

  void build(Side& side, const PointRows& rows, const PointSet& set, const int64_t* cells, const int64_t* points, const TransformBox& box);
  void build_matrices();
  void sum_ones();
  int64_t columns_at_once() const;  // so many that grids stay in the caches
  int64_t grid_size() const { return between_; }
  // kinds: one for each axis; result in `to`, (nodes of the other side, columns); spare: as large as any grid on the way
  void across(const Kind* kinds, bool to_query, const double* from, int64_t columns, double* to, double* spare) const;
  void spread(const Side&, bool mass, const float* rows, int64_t columns, double* grid) const;
  void spread_numbers(const Side&, bool mass, const double* x, double* sums, double* sizes) const;
  template <class F>
  void gather(const Side&, const double* grid, int64_t columns, const double* ones, const double* total, bool divide, F f) const;
  void add_products(const Side&, const double* grid, int64_t columns, const float* rows, double* sums) const;
  void gather_numbers(const Side&, const double* grid, bool sizes, double* y) const;
  bool pack(const Side&, const TransformField&, int64_t begin, int64_t columns, const float* scale, const float* centre, float* to) const;
  TransformField value_field() const;
};

}  // namespace continuum_ops
