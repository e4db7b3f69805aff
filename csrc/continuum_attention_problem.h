// continuum_attention on CPU tensors: the arguments, checked and as the kernels see them.
#pragma once

#include "continuum_attention.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_isa.h"
#include "parallel.h"
#include "tensors.h"

namespace continuum_ops {
namespace {

DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::float32;
    case ScalarType::Double: return DType::float64;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Half: return DType::float16;
    default: throw std::invalid_argument("query must be float64, float32, bfloat16 or float16");
  }
}

ScalarType accumulation_type(DType t) { return t == DType::float64 ? ScalarType::Double : ScalarType::Float; }

struct LeadOperand {
  std::vector<int64_t> offsets;
  Operand operand;

  LeadOperand(const Tensor& t, const std::vector<int64_t>& leads, int64_t trailing = 2) : offsets(lead_offsets(t, trailing, leads)) {
    operand = {t.const_data_ptr(), offsets.data(), t.stride(t.dim() - trailing), t.stride(t.dim() - 1)};
  }
};

// The keys that exist, lead by lead. Leads that share weights and key mask share index and bias.
class KeySets {
 public:
  std::vector<KeySet> sets;

  template <class T>
  void build(const Tensor* weights, const Tensor* key_mask, const std::vector<int64_t>& shape, int64_t leads, int64_t m) {
    const std::vector<int64_t> w_offset = weights ? lead_offsets(*weights, 1, shape) : std::vector<int64_t>(leads, 0);
    const std::vector<int64_t> mask_offset = key_mask ? lead_offsets(*key_mask, 2, shape) : std::vector<int64_t>(leads, 0);
    sets.resize(leads);
    for (int64_t lead = 0; lead < leads; ++lead) {
      if (lead > 0 && w_offset[lead] == w_offset[lead - 1] && mask_offset[lead] == mask_offset[lead - 1]) {
        sets[lead] = sets[lead - 1];
        continue;
      }
      sets[lead].count = m;
      if (m == 0 || (!weights && !key_mask)) continue;
      const T* w = weights ? static_cast<const T*>(weights->const_data_ptr()) + w_offset[lead] : nullptr;
      const int64_t w_stride = weights ? weights->stride(weights->dim() - 1) : 0;
      const uint8_t* mask = key_mask ? static_cast<const uint8_t*>(key_mask->const_data_ptr()) + mask_offset[lead] : nullptr;
      const int64_t mask_stride = key_mask ? key_mask->stride(key_mask->dim() - 1) : 0;
      build_one<T>(sets[lead], w, w_stride, mask, mask_stride, m);
    }
  }

 private:
  std::vector<std::vector<int64_t>> indices_;
  std::vector<std::vector<float>> float_biases_;
  std::vector<std::vector<double>> double_biases_;

  template <class T>
  void build_one(KeySet& set, const T* w, int64_t w_stride, const uint8_t* mask, int64_t mask_stride, int64_t m) {
    auto alive = [&](int64_t k) { return (!w || w[k * w_stride] != T(0)) && (!mask || mask[k * mask_stride]); };
    T most = 0, least = std::numeric_limits<T>::infinity();
    int64_t count = 0;
    for (int64_t k = 0; k < m; ++k) {
      if (w && !(w[k * w_stride] >= T(0) && w[k * w_stride] <= std::numeric_limits<T>::max())) {
        throw std::invalid_argument("continuum_attention: weights must be >= 0 and finite, got " + std::to_string(w[k * w_stride]) +
                                    " for key " + std::to_string(k));
      }
      // Of removed keys too: what the record of a row is relative to must not depend on whether a mask is read as one of keys,
      // since a copy of it that the backward gets may not be.
      if (w) most = std::max(most, w[k * w_stride]);
      if (!alive(k)) continue;
      ++count;
      if (w) least = std::min(least, w[k * w_stride]);
    }
    set.count = count;
    if (count < m) {
      std::vector<int64_t>& index = indices_.emplace_back();
      index.reserve(count);
      for (int64_t k = 0; k < m; ++k) {
        if (alive(k)) index.push_back(k);
      }
      set.index = index.data();
    }
    if (!w || count == 0) return;
    set.log2_max_weight = std::log2(double(most));
    if (least == most) return;
    auto& biases = [this]() -> auto& {
      if constexpr (sizeof(T) == 4) return float_biases_; else return double_biases_;
    }();
    std::vector<T>& bias = biases.emplace_back(count);
    for (int64_t j = 0; j < count; ++j) {
      const double x = w[(set.index ? set.index[j] : j) * w_stride], ratio = x / double(most);
      bias[j] = T(ratio >= DBL_MIN ? std::log2(ratio) : std::log2(x) - set.log2_max_weight);
    }
    set.min_bias = std::log2(double(least)) - set.log2_max_weight;
    set.bias = bias.data();
  }
};

// Those of all, which must be equal.
std::vector<int64_t> equal_leads(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& weights) {
  const int64_t dims = query.dim();
  STD_TORCH_CHECK(dims >= 2, "query: at least 2 dimensions");
  STD_TORCH_CHECK(key.dim() == dims && value.dim() == dims && (!weights || weights->dim() == dims - 1),
                  "key and value: as many dimensions as query; weights: one less");
  for (int64_t i = 0; i < dims - 2; ++i) {
    const int64_t size = query.size(i);
    STD_TORCH_CHECK(key.size(i) == size && value.size(i) == size && (!weights || weights->size(i) == size),
                    "leading dimensions of query, key, value and weights must be equal (expand them)");
  }
  return sizes_of(query, dims - 2);
}

// To which those of query, key and value broadcast; that they do is seen where they are used.
std::vector<int64_t> common_leads(const Tensor& query, const Tensor& key, const Tensor& value) {
  const int64_t dims = std::max({query.dim(), key.dim(), value.dim()});
  STD_TORCH_CHECK(std::min({query.dim(), key.dim(), value.dim()}) >= 2, "query, key, value: at least 2 dimensions");
  std::vector<int64_t> leads(dims - 2, 1);
  for (const Tensor* t : {&query, &key, &value}) {
    for (int64_t i = 0, missing = dims - t->dim(); i < t->dim() - 2; ++i) {
      if (t->size(i) != 1) leads[i + missing] = t->size(i);
    }
  }
  return leads;
}

// (*leads, rows, columns)
std::vector<int64_t> with_rows(const std::vector<int64_t>& leads, int64_t rows, int64_t columns) {
  std::vector<int64_t> sizes;
  sizes.reserve(leads.size() + 2);
  sizes.assign(leads.begin(), leads.end());
  sizes.push_back(rows), sizes.push_back(columns);
  return sizes;
}

// Throws unless every number is >= 0.
template <class T> void check_not_negative(const char* name, const Tensor& t, const std::vector<int64_t>& leads, int64_t n) {
  const int64_t trailing = t.dim() - int64_t(leads.size()), stride = trailing == 1 ? t.stride(t.dim() - 1) : 0;
  int64_t before = -1;
  for (const int64_t offset : lead_offsets(t, trailing, leads)) {
    if (offset == before) continue;
    before = offset;
    for (int64_t i = 0; i < n; ++i) {
      const T x = static_cast<const T*>(t.const_data_ptr())[offset + i * stride];
      if (!(x >= T(0))) {
        throw std::invalid_argument(std::string("continuum_attention: ") + name + " must be >= 0 and not NaN, got " + std::to_string(x));
      }
    }
  }
}

// The optional inputs that make the distance term, and what the kernels see of them.
struct Distance {
  std::optional<Tensor> query_pos, key_pos, rate, radius;
  std::optional<std::vector<double>> period;
};

struct DistanceOperands {
  std::optional<LeadOperand> query_pos, key_pos, radius;
  std::vector<int64_t> rate_offsets;
  std::vector<double> period;
  DistanceTerm term;

  DistanceOperands(const Distance& x, const std::vector<int64_t>& leads, DType dtype, int64_t n, int64_t m) {
    STD_TORCH_CHECK(x.query_pos.has_value() == x.key_pos.has_value() && (x.query_pos || !(x.rate || x.radius || x.period)),
                    "query_pos and key_pos: both or none; rate, radius and period: only with them");
    if (!x.query_pos) return;
    const ScalarType acc = accumulation_type(dtype);
    for (const std::optional<Tensor>* t : {&x.query_pos, &x.key_pos, &x.rate, &x.radius}) {
      STD_TORCH_CHECK(!*t || (*t)->scalar_type() == acc, "positions, rate and radius: the accumulation dtype");
    }
    query_pos.emplace(*x.query_pos, leads), key_pos.emplace(*x.key_pos, leads);
    const int64_t last = x.query_pos->dim() - 1;
    term.given = true;
    term.dims = x.query_pos->size(last);
    STD_TORCH_CHECK(x.query_pos->size(last - 1) == n && x.key_pos->size(last - 1) == m && x.key_pos->size(last) == term.dims,
                    "query_pos: (*L, N, d), key_pos: (*L, M, d)");
    term.query_pos = query_pos->operand, term.key_pos = key_pos->operand;
    if (x.rate) {
      rate_offsets = lead_offsets(*x.rate, 0, leads);
      term.rate = x.rate->const_data_ptr(), term.rate_offset = rate_offsets.data();
      check("rate", *x.rate, leads, 1);
    }
    if (x.radius) {
      radius.emplace(*x.radius, leads, 1);
      STD_TORCH_CHECK(x.radius->size(x.radius->dim() - 1) == n, "radius: (*L, N)");
      term.radius = radius->operand;
      check("radius", *x.radius, leads, n);
    }
    if (x.period) {
      STD_TORCH_CHECK(int64_t(x.period->size()) == term.dims, "period: one length for each coordinate");
      for (const double length : *x.period) period.push_back(std::isfinite(length) ? length : 0);
      term.period = period.data();
    }
  }

 private:
  static void check(const char* name, const Tensor& t, const std::vector<int64_t>& leads, int64_t n) {
    t.scalar_type() == ScalarType::Double ? check_not_negative<double>(name, t, leads, n) : check_not_negative<float>(name, t, leads, n);
  }
};

struct Problem {
  std::vector<int64_t> shape;  // of the leads
  LeadOperand query, key, value;
  std::optional<LeadOperand> mask;
  KeySets keys;
  DistanceOperands distance;
  AttentionProblem a;

  // Leading dimensions broadcast to `leads`.
  Problem(const std::vector<int64_t>& leads, const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& weights,
          const std::optional<Tensor>& attn_mask, const Distance& d, const std::optional<Tensor>& seed, double scale, double dropout_p,
          bool is_causal)
      : shape(leads), query(q, shape), key(k, shape), value(v, shape),
        distance(d, shape, dtype_of(q), q.size(q.dim() - 2), k.size(k.dim() - 2)) {
    a.dtype = dtype_of(q);
    STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "query, key, value: one dtype");
    const int64_t dims = int64_t(shape.size()) + 2;
    a.n = q.size(q.dim() - 2), a.d = q.size(q.dim() - 1), a.m = k.size(k.dim() - 2), a.dv = v.size(v.dim() - 1);
    STD_TORCH_CHECK(k.size(k.dim() - 1) == a.d && v.size(v.dim() - 2) == a.m, "key: (*L, M, D), value: (*L, M, Dv)");
    STD_TORCH_CHECK(!weights || (weights->scalar_type() == accumulation_type(a.dtype) && weights->dim() >= 1 &&
                                 weights->size(weights->dim() - 1) == a.m), "weights: (*L, M) in the accumulation dtype");
    STD_TORCH_CHECK(!attn_mask || (attn_mask->scalar_type() == ScalarType::Bool && attn_mask->dim() == dims &&
                                   attn_mask->size(dims - 2) == a.n && attn_mask->size(dims - 1) == a.m), "attn_mask: bool (*L, N, M)");
    const bool placed = dropout_p > 0 && seed && seed->numel() > 1;
    STD_TORCH_CHECK(dropout_p == 0 || (seed && seed->scalar_type() == ScalarType::Long && seed->is_contiguous() &&
                                       seed->numel() == (placed ? 1 + a.n + a.m : 1)),
                    "seed: one int64, or that and the places of the N queries and M keys");
    a.leads = int64_t(query.offsets.size());
    a.query = query.operand, a.key = key.operand, a.value = value.operand;
    a.scale = scale, a.is_causal = is_causal, a.dropout_p = dropout_p;
    const int64_t* numbers = dropout_p > 0 ? static_cast<const int64_t*>(seed->const_data_ptr()) : nullptr;
    a.seed = numbers ? uint64_t(*numbers) : 0;
    a.query_places = placed ? numbers + 1 : nullptr;
    a.key_places = placed ? numbers + 1 + a.n : nullptr;

    // A mask that is the same for every query removes keys; only one that differs needs a look per score.
    const bool masked = attn_mask && a.n > 0 && a.m > 0;  // an empty mask has no data to look at
    const bool key_mask = masked && (attn_mask->stride(dims - 2) == 0 || a.n == 1);
    if (masked && !key_mask) {
      mask.emplace(*attn_mask, shape);
      a.mask = mask->operand;
    }
    const Tensor* w = weights ? &*weights : nullptr;
    const Tensor* removed = key_mask ? &*attn_mask : nullptr;
    if (a.dtype == DType::float64) keys.build<double>(w, removed, shape, a.leads, a.m);
    else keys.build<float>(w, removed, shape, a.leads, a.m);
    a.keys = keys.sets.data();
    a.distance = distance.term;

    const ContinuumAttentionKernels& kernels = continuum_attention_kernels();
    if (a.n >= 16 && a.m > FEW_KEYS && !a.distance.rate) {
      run_tasks(a.leads, double(a.leads) * a.m * a.d, 0,
                [&](int64_t lead, void*) { keys.sets[lead].max_norm = kernels.max_norm(a, lead, keys.sets[lead]); });
    } else {
      for (KeySet& s : keys.sets) s.max_norm = std::numeric_limits<double>::infinity();
    }
  }

  double scores() const { return double(a.leads) * a.n * a.m; }
};

}  // namespace
}  // namespace continuum_ops
