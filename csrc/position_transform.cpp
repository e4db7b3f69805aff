// One head of position attention through a grid: points to nodes of their cells, nodes to nodes axis by axis, nodes to points, and back
// for the gradients. The sums over points are in position_transform_kernel.cpp; which heads go this way, in position_transform_plan.h.
#include "position_transform_head.h"

#include <array>
#include <atomic>
#include <cmath>

#include "cpu_isa.h"
#include "parallel.h"

namespace continuum_ops {
namespace {

constexpr int64_t W = TRANSFORM_COLUMNS, POINTS = 512;  // of a task that goes point by point
constexpr int64_t GRID_NUMBERS = 1 << 21;  // of a grid and its columns, 16 MiB
// The error that a Gaussian interpolated between two cells may have, relative to |basis| Gaussian |basis|, is about 1e-8 for near pairs and
// grows with their distance z: 1e-8 (1 + e^(2.7 (sqrt(rate) |z| - 1.5))) along each axis bounds what was measured for all of CELL_WIDTHS.
// A row whose terms have a bound of more than MOST_ERROR of that is refused.
constexpr double GROWTH = 2.7, FLAT = 1.5, MOST_ERROR = 128;
constexpr double LEAST_SUM = 0x1p-60;  // below it float32 has no digits to spare
constexpr double KINK_SHARE = 0x1p-22;  // of a row's sum that keys at the antipode may have

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
const PositionTransformKernels& kernels() { return position_transform_kernels(); }

// Values at u in [-1, 1] of the Lagrange polynomials of p Chebyshev nodes, by the barycentric formula.
void lagrange(double u, int64_t p, const double* node, const double* weight, float* to) {
  double sum = 0, term[16];
  for (int64_t j = 0; j < p; ++j) {
    const double apart = u - node[j];
    if (apart == 0) {
      for (int64_t k = 0; k < p; ++k) to[k] = k == j ? 1.0f : 0.0f;
      return;
    }
    term[j] = weight[j] / apart, sum += term[j];
  }
  for (int64_t j = 0; j < p; ++j) to[j] = float(term[j] / sum);
}

// In parts that do not depend on the number of threads.
double dot_of(const double* x, const double* y, int64_t count) {
  constexpr int64_t PART = 1 << 14;
  std::vector<double> sums(ceil_div(count, PART));
  run_tasks(int64_t(sums.size()), double(count), 0, [&](int64_t part, void*) {
    double sum[4] = {};
    const int64_t end = std::min((part + 1) * PART, count);
    int64_t i = part * PART;
    for (; i + 4 <= end; i += 4) {
      for (int k = 0; k < 4; ++k) sum[k] += x[i + k] * y[i + k];
    }
    for (; i < end; ++i) sum[0] += x[i] * y[i];
    sums[part] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  });
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

}  // namespace

HeadTransform::HeadTransform(const PositionProblem& a, const PositionGroup& g, const TransformPoints& points, int64_t head,
                             const TransformPlan& plan)
    : a_(a), g_(g), head_(head), value_head_(a.value_heads > 1 ? head : 0), rate_(a.rate[head]), antipode_(plan.antipode) {
  build(query_, points.query, g.query, plan.query_cells, plan.points, plan.query);
  build(key_, points.key, g.key, plan.key_cells, plan.points, plan.key);
  if (points.weights) {
    log_max_weight_ = g.log2_max_weight * 0.69314718055994530942;
    if (g.bias) {
      float most = 0;
      for (const int64_t k : key_.place) most = std::max(most, points.weights[k]);
      key_.mass = Buffer<float>(key_.s.count);
      for (int64_t i = 0; i < key_.s.count; ++i) key_.mass[i] = points.weights[key_.place[i]] / most;
      key_.s.mass = key_.mass.get();
    }
  }
  build_matrices();
  sum_ones();
}

void HeadTransform::build(Side& side, const PointRows& rows, const PointSet& set, const int64_t* cells, const int64_t* points,
                          const TransformBox& box) {
  constexpr double PI = 3.14159265358979323846;
  TransformSide& s = side.s;
  s.count = set.count, s.d = a_.d;
  std::copy_n(cells, MAX_TRANSFORM_AXES, s.cells), std::copy_n(points, MAX_TRANSFORM_AXES, s.points);
  std::vector<double> node[MAX_TRANSFORM_AXES], weight[MAX_TRANSFORM_AXES];
  int64_t factors = 0;
  for (int64_t t = 0; t < s.d; ++t) {
    const int64_t p = points[t];
    const double width = box.extent[t] / double(cells[t]);
    factors += p;
    for (int64_t j = 0; j < p; ++j) {
      const double angle = (2 * double(j) + 1) * PI / (2 * double(p));
      node[t].push_back(std::cos(angle)), weight[t].push_back((j % 2 ? -1 : 1) * std::sin(angle));
    }
    for (int64_t i = 0; i < cells[t] * p; ++i) {
      side.node[t].push_back(box.low[t] + (double(i / p) + 0.5 + node[t][i % p] / 2) * width);
    }
  }
  // Cell by cell, each in the order of the rows.
  auto cell_along = [&](int64_t place, int64_t t) {
    const double at = box.extent[t] > 0 ? (rows.at(place, t) - box.low[t]) / box.extent[t] * double(cells[t]) : 0;
    return std::clamp<int64_t>(int64_t(at), 0, cells[t] - 1);
  };
  std::vector<int64_t> cell(set.count);
  side.begin.assign(s.all_cells() + 1, 0);
  for (int64_t i = 0; i < set.count; ++i) {
    int64_t c = 0;
    for (int64_t t = 0; t < MAX_TRANSFORM_AXES; ++t) c = c * cells[t] + (t < s.d ? cell_along(set.place[i], t) : 0);
    cell[i] = c, ++side.begin[c + 1];
  }
  for (int64_t c = 0; c < s.all_cells(); ++c) side.begin[c + 1] += side.begin[c];
  side.place.resize(set.count);
  std::vector<int64_t> next(side.begin.begin(), side.begin.end() - 1);
  for (int64_t i = 0; i < set.count; ++i) side.place[next[cell[i]]++] = set.place[i];
  for (int64_t c = 0; c < s.all_cells(); ++c) {
    for (int64_t first = side.begin[c]; first < side.begin[c + 1]; first += TRANSFORM_ROWS) {
      side.cell_of_task.push_back(c), side.first_of_task.push_back(first);
      side.last_of_task.push_back(std::min(first + TRANSFORM_ROWS, side.begin[c + 1]));
    }
  }
  side.basis = Buffer<float>(set.count * factors);
  run_tasks(ceil_div(set.count, POINTS), double(set.count) * double(factors) * 10, 0, [&](int64_t task, void*) {
    for (int64_t i = task * POINTS; i < std::min((task + 1) * POINTS, set.count); ++i) {
      float* to = side.basis.get() + i * factors;
      for (int64_t t = 0; t < s.d; ++t) {
        const double width = box.extent[t] / double(cells[t]), x = rows.at(side.place[i], t) - box.low[t];
        const double centre = (double(cell_along(side.place[i], t)) + 0.5) * width;
        lagrange(width > 0 ? (x - centre) / (width / 2) : 0, points[t], node[t].data(), weight[t].data(), to);
        to += points[t];
      }
    }
  });
  s.place = side.place.data(), s.begin = side.begin.data(), s.basis = side.basis.get();
}

void HeadTransform::build_matrices() {
  between_ = key_.s.all_nodes();
  for (int64_t nodes = between_, t = a_.d - 1; t >= 0; --t) {
    nodes = nodes / key_.s.nodes(int(t)) * query_.s.nodes(int(t));
    between_ = std::max(between_, nodes);
  }
  for (int64_t nodes = query_.s.all_nodes(), t = a_.d - 1; t >= 0; --t) {
    nodes = nodes / query_.s.nodes(int(t)) * key_.s.nodes(int(t));
    between_ = std::max(between_, nodes);
  }
  for (int64_t t = 0; t < a_.d; ++t) {
    const double length = a_.period ? a_.period[t] : std::numeric_limits<double>::infinity();
    const bool periodic = length < std::numeric_limits<double>::infinity();
    for (const Kind m : {GAUSSIAN, SQUARED, SLOPE, ERROR}) matrix_[t][m].reserve(query_.node[t].size() * key_.node[t].size());
    for (const double x : query_.node[t]) {
      for (const double y : key_.node[t]) {
        double z = x - y;
        if (periodic) z -= length * std::nearbyint(z / length);
        const double e = std::exp(-rate_ * z * z);
        matrix_[t][GAUSSIAN].push_back(e), matrix_[t][SQUARED].push_back(z * z * e), matrix_[t][SLOPE].push_back(-2 * rate_ * z * e);
        matrix_[t][ERROR].push_back(e + std::exp(GROWTH * (std::sqrt(rate_) * std::abs(z) - FLAT) - rate_ * z * z));
      }
    }
  }
}

void HeadTransform::across(const Kind* kinds, bool to_query, const double* from, int64_t columns, double* to, double* spare) const {
  const Side &source = to_query ? key_ : query_, &target = to_query ? query_ : key_;
  double* buffers[2] = {to, spare};
  for (int64_t t = a_.d - 1; t >= 0; --t) {
    AxisProduct p{true, 1, target.s.nodes(int(t)), source.s.nodes(int(t)), columns};
    for (int64_t s = 0; s < t; ++s) p.before *= source.s.nodes(int(s));
    for (int64_t s = t + 1; s < a_.d; ++s) p.columns *= target.s.nodes(int(s));
    const int64_t keys = key_.s.nodes(int(t));
    double* out = buffers[t % 2];  // the last, t = 0, into `to`
    apply_axis_product(p, matrix_[t][kinds[t]].data(), to_query ? keys : 1, to_query ? 1 : keys, from, out);
    from = out;
  }
}

void HeadTransform::spread(const Side& side, bool mass, const float* rows, int64_t columns, double* grid) const {
  const double work = double(side.s.count) * double(side.s.cell_nodes()) * double(columns);
  run_tasks(side.s.all_cells(), work, kernels().scratch(side.s.cell_nodes()), [&](int64_t cell, void* scratch) {
    kernels().spread(side.s, cell, mass, rows, columns, grid, scratch);
  });
}

void HeadTransform::spread_numbers(const Side& side, bool mass, const double* x, double* sums, double* sizes) const {
  const double work = double(side.s.count) * double(side.s.cell_nodes()) * 4;
  run_tasks(side.s.all_cells(), work, kernels().scratch(side.s.cell_nodes()), [&](int64_t cell, void* scratch) {
    kernels().spread_numbers(side.s, cell, mass, x, sums, sizes, scratch);
  });
}

// f(first, last, y) for each task's points, y with W columns
template <class F>
void HeadTransform::gather(const Side& side, const double* grid, int64_t columns, const double* ones, const double* total, bool divide,
                           F f) const {
  const size_t scratch_bytes = kernels().scratch(side.s.cell_nodes()), rows = TRANSFORM_ROWS * W * sizeof(float);
  const double work = double(side.s.count) * double(side.s.cell_nodes()) * double(columns);
  run_tasks(int64_t(side.cell_of_task.size()), work, rows + scratch_bytes, [&](int64_t task, void* memory) {
    float* y = static_cast<float*>(memory);
    void* scratch = static_cast<char*>(memory) + rows;
    const int64_t first = side.first_of_task[task], last = side.last_of_task[task];
    kernels().gather(side.s, side.cell_of_task[task], first, last, grid, columns, ones, total, divide, y, scratch);
    f(first, last, y);
  });
}

void HeadTransform::gather_numbers(const Side& side, const double* grid, bool sizes, double* y) const {
  const double work = double(side.s.count) * double(side.s.cell_nodes()) * 2;
  run_tasks(int64_t(side.cell_of_task.size()), work, kernels().scratch(side.s.cell_nodes()), [&](int64_t task, void* scratch) {
    const int64_t first = side.first_of_task[task];
    kernels().gather_numbers(side.s, side.cell_of_task[task], first, side.last_of_task[task], grid, sizes, y + first, scratch);
  });
}

bool HeadTransform::pack(const Side& side, const TransformField& field, int64_t begin, int64_t columns, const float* scale,
                         const float* centre, float* to) const {
  std::atomic<bool> finite{true};
  run_tasks(ceil_div(side.s.count, POINTS), double(side.s.count) * double(columns) * 4, 0, [&](int64_t task, void*) {
    const int64_t first = task * POINTS, last = std::min(first + POINTS, side.s.count);
    if (!kernels().pack(field, begin, columns, side.s.place, scale, centre, first, last, to + first * W)) finite = false;
  });
  return finite;
}

// sums[i] += (what the grid is at point i) . rows[i]
void HeadTransform::add_products(const Side& side, const double* grid, int64_t columns, const float* rows, double* sums) const {
  gather(side, grid, columns, nullptr, nullptr, false, [&](int64_t first, int64_t last, const float* y) {
    kernels().dot(rows + first * W, y, last - first, sums + first);
  });
}

int64_t HeadTransform::columns_at_once() const {
  const int64_t fit = GRID_NUMBERS / grid_size() / 16 * 16;
  return std::min({std::max<int64_t>(fit, 16), W, a_.columns()});
}

TransformField HeadTransform::value_field() const {
  const int64_t size = a_.dtype == DType::float32 ? 4 : 2;
  const char* data = static_cast<const char*>(a_.value.data) + (g_.first_entry * a_.value.batch + value_head_ * a_.value.head) * size;
  return {a_.dtype, const_cast<char*>(data), a_.value.batch, a_.value.row, a_.value.column, a_.c};
}

void HeadTransform::sum_ones() {
  constexpr Kind gaussian[MAX_TRANSFORM_AXES] = {GAUSSIAN, GAUSSIAN, GAUSSIAN};
  const Buffer<double> sums(grid_size()), sizes(grid_size()), spare(grid_size()), size(query_.s.count);
  spread_numbers(key_, true, nullptr, sums.get(), sizes.get());
  ones_ = Buffer<double>(grid_size()), total_ = Buffer<double>(query_.s.count);
  across(gaussian, true, sums.get(), 1, ones_.get(), spare.get());
  constexpr Kind error[MAX_TRANSFORM_AXES] = {ERROR, ERROR, ERROR};
  across(error, true, sizes.get(), 1, sums.get(), spare.get());
  gather_numbers(query_, ones_.get(), false, total_.get());
  gather_numbers(query_, sums.get(), true, size.get());
  double mass = 0;
  for (int64_t k = 0; k < key_.s.count; ++k) mass += key_.s.mass ? key_.s.mass[k] : 1.0f;
  const double least = std::max(LEAST_SUM, mass * antipode_ / KINK_SHARE);
  refused_.assign(a_.n, 0);
  for (int64_t i = 0; i < query_.s.count; ++i) refused_[query_.place[i]] = !(total_[i] >= least && size[i] <= MOST_ERROR * total_[i]);
}

bool HeadTransform::forward(const PositionOutput& o, int64_t group, const float* nearest) const {
  constexpr Kind gaussian[MAX_TRANSFORM_AXES] = {GAUSSIAN, GAUSSIAN, GAUSSIAN};
  const int64_t columns = a_.columns(), size = a_.dtype == DType::float32 ? 4 : 2, widest = columns_at_once();
  const Buffer<float> rows(key_.s.count * W);
  const Buffer<double> sums(grid_size() * widest), result(grid_size() * widest), spare(grid_size() * widest);
  const TransformField out{a_.dtype, static_cast<char*>(o.out) + (g_.first_entry * a_.heads + head_) * a_.n * a_.c * size,
                           a_.heads * a_.n * a_.c, a_.c, 1, a_.c};
  for (int64_t begin = 0; begin < columns; begin += widest) {
    const int64_t width = std::min(widest, columns - begin);
    if (!pack(key_, value_field(), begin, width, nullptr, nullptr, rows.get())) return false;
    spread(key_, true, rows.get(), width, sums.get());
    across(gaussian, true, sums.get(), width, result.get(), spare.get());
    gather(query_, result.get(), width, ones_.get(), total_.get(), true, [&](int64_t first, int64_t last, const float* y) {
      kernels().put(out, begin, width, query_.s.place, nullptr, first, last, y);
    });
  }
  for (int64_t i = 0; i < query_.s.count; ++i) {
    const int64_t place = query_.place[i], row = (group * a_.heads + head_) * a_.n + place;
    if (o.lse) static_cast<float*>(o.lse)[row] = float(std::log(total_[i]) + log_max_weight_);
    if (o.stats) {  // relative to the nearest key, as the other kernel keeps them
      static_cast<float*>(o.stats)[2 * row] = nearest[place];
      static_cast<float*>(o.stats)[2 * row + 1] = float(total_[i] * std::exp(rate_ * double(nearest[place])));
    }
  }
  return true;
}

bool HeadTransform::prepare(const TransformField& grad_out, const void* out, const float* grad_lse, bool scores) {
  const int64_t columns = a_.columns(), size = a_.dtype == DType::float32 ? 4 : 2;
  const Buffer<float> rows(query_.s.count * W), of_out(scores ? query_.s.count * W : 0), of_key(scores ? key_.s.count * W : 0);
  const TransformField result{a_.dtype,
                              const_cast<char*>(static_cast<const char*>(out)) + (g_.first_entry * a_.heads + head_) * a_.n * a_.c * size,
                              a_.heads * a_.n * a_.c, a_.c, 1, a_.c};
  delta_.assign(query_.s.count, 0);
  centre_.assign(columns, 0);
  for (int64_t begin = 0; begin < columns; begin += W) {
    const int64_t width = std::min(W, columns - begin);
    if (!pack(query_, grad_out, begin, width, nullptr, nullptr, rows.get())) return false;
    if (!scores) continue;
    if (!pack(key_, value_field(), begin, width, nullptr, nullptr, of_key.get())) return false;
    const int64_t step = std::max<int64_t>(1, key_.s.count / 256);
    double sum[W] = {};
    int64_t taken = 0;
    for (int64_t i = 0; i < key_.s.count; i += step, ++taken) {
      for (int64_t c = 0; c < width; ++c) sum[c] += double(of_key[i * W + c]);
    }
    for (int64_t c = 0; c < width; ++c) centre_[begin + c] = float(sum[c] / double(taken));
    if (!pack(query_, result, begin, width, nullptr, centre_.data() + begin, of_out.get())) return false;
    run_tasks(ceil_div(query_.s.count, POINTS), double(query_.s.count) * W, 0, [&](int64_t task, void*) {
      const int64_t first = task * POINTS, count = std::min(POINTS, query_.s.count - first);
      kernels().dot(rows.get() + first * W, of_out.get() + first * W, count, delta_.data() + first);
    });
  }
  for (int64_t i = 0; grad_lse && i < query_.s.count; ++i) delta_[i] -= double(grad_lse[query_.place[i]]);
  return true;
}

void HeadTransform::backward(const TransformField& grad_out, const TransformGradients& to) const {
  constexpr Kind gaussian[MAX_TRANSFORM_AXES] = {GAUSSIAN, GAUSSIAN, GAUSSIAN};
  const int64_t n = query_.s.count, m = key_.s.count, d = a_.d, columns = a_.columns(), widest = columns_at_once();
  const bool scores = to.bias || to.query || to.key || to.rate, of_values = to.bias || to.key || to.query || to.rate;
  const Buffer<float> inverse(n), ones(m, 1.0f), g(n * W), v(of_values ? m * W : 0);
  std::vector<double> delta(n);
  for (int64_t i = 0; i < n; ++i) {
    inverse[i] = refused_[query_.place[i]] ? 0.0f : float(1 / total_[i]);
    delta[i] = refused_[query_.place[i]] ? 0 : delta_[i] / total_[i];
  }
  const float* mass = key_.s.mass ? key_.s.mass : ones.get();
  const Buffer<double> of_query(grid_size() * widest), of_key(of_values ? grid_size() * widest : 0), result(grid_size() * widest),
      spare(grid_size() * widest);
  const TransformField grad_value{DType::float32, to.value ? to.value + value_head_ * a_.m * a_.c : nullptr, a_.value_heads * a_.m * a_.c,
                                  a_.c, 1, a_.c};
  std::vector<double> bias(to.bias ? m : 0), query(to.query ? n * d : 0), key(to.key ? m * d : 0);
  double rate = 0;
  auto kinds_of = [&](Kind kind, int64_t axis) {
    std::array<Kind, MAX_TRANSFORM_AXES> kinds{GAUSSIAN, GAUSSIAN, GAUSSIAN};
    kinds[size_t(axis)] = kind;
    return kinds;
  };
  for (int64_t begin = 0; begin < columns; begin += widest) {
    const int64_t width = std::min(widest, columns - begin);
    pack(query_, grad_out, begin, width, inverse.get(), nullptr, g.get());
    spread(query_, false, g.get(), width, of_query.get());
    if (scores) pack(key_, value_field(), begin, width, nullptr, centre_.data() + begin, v.get());
    if (to.value || to.bias) {
      across(gaussian, false, of_query.get(), width, result.get(), spare.get());
      gather(key_, result.get(), width, nullptr, nullptr, false, [&](int64_t first, int64_t last, const float* y) {
        if (to.value) kernels().put(grad_value, begin, width, key_.s.place, mass, first, last, y);
        if (to.bias) kernels().dot(v.get() + first * W, y, last - first, bias.data() + first);
      });
    }
    if (to.rate || to.query) spread(key_, true, v.get(), width, of_key.get());
    for (int64_t t = 0; t < d; ++t) {
      if (to.rate) {
        across(kinds_of(SQUARED, t).data(), true, of_key.get(), width, result.get(), spare.get());
        rate -= dot_of(of_query.get(), result.get(), query_.s.all_nodes() * width);
      }
      if (to.query) {
        across(kinds_of(SLOPE, t).data(), true, of_key.get(), width, result.get(), spare.get());
        add_products(query_, result.get(), width, g.get(), query.data() + t * n);
      }
      if (to.key) {
        across(kinds_of(SLOPE, t).data(), false, of_query.get(), width, result.get(), spare.get());
        add_products(key_, result.get(), width, v.get(), key.data() + t * m);
      }
    }
  }
  if (!scores) return;
  // The part of delta, one column of float64.
  spread_numbers(query_, false, delta.data(), of_query.get(), nullptr);
  spread_numbers(key_, true, nullptr, of_key.get(), nullptr);
  const Buffer<double> part(std::max(n, m));
  auto back = [&](const Side& side) { gather_numbers(side, result.get(), false, part.get()); };
  if (to.bias) {
    across(gaussian, false, of_query.get(), 1, result.get(), spare.get());
    back(key_);
    for (int64_t i = 0; i < m; ++i) to.bias[key_.place[i]] += double(mass[i]) * (bias[i] - part[i]);
  }
  for (int64_t t = 0; t < d; ++t) {
    if (to.rate) {
      across(kinds_of(SQUARED, t).data(), true, of_key.get(), 1, result.get(), spare.get());
      rate += dot_of(of_query.get(), result.get(), query_.s.all_nodes());
    }
    if (to.query) {
      across(kinds_of(SLOPE, t).data(), true, of_key.get(), 1, result.get(), spare.get());
      back(query_);
      for (int64_t i = 0; i < n; ++i) to.query[query_.place[i] * d + t] += query[t * n + i] - delta[i] * part[i];
    }
    if (to.key) {
      across(kinds_of(SLOPE, t).data(), false, of_query.get(), 1, result.get(), spare.get());
      back(key_);
      for (int64_t i = 0; i < m; ++i) to.key[key_.place[i] * d + t] -= double(mass[i]) * (key[t * m + i] - part[i]);
    }
  }
  if (to.rate) *to.rate += rate;
}

}  // namespace continuum_ops
