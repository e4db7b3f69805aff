// What the torch side of the CPU operators shares: sizes, offsets of the leading dimensions, new tensors.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "memory.h"

namespace continuum_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::vector<int64_t> sizes_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return {sizes.begin(), sizes.end()};
}
inline std::vector<int64_t> sizes_of(const Tensor& t, int64_t dims) { return {t.sizes().begin(), t.sizes().begin() + dims}; }

// Writes offsets[i] + j * stride for each i < size and each j < count, i outside; returns how many these are.
inline int64_t repeat_offsets(int64_t* offsets, int64_t size, int64_t count, int64_t stride) {
  for (int64_t i = count <= 1 ? -1 : size - 1; i >= 0; --i) {  // from behind: each is read before it is written over
    const int64_t first = offsets[i];
    for (int64_t j = 0; j < count; ++j) offsets[i * count + j] = first + j * stride;
  }
  return size * count;
}

// Offsets of the leads of a tensor (*leads, ...) with `trailing` further dimensions; a dimension that is missing, or of size 1, serves
// all leads along it.
inline std::vector<int64_t> lead_offsets(const Tensor& t, int64_t trailing, const std::vector<int64_t>& leads) {
  const auto sizes = t.sizes(), strides = t.strides();
  const int64_t dims = int64_t(sizes.size()), missing = int64_t(leads.size()) + trailing - dims;
  STD_TORCH_CHECK(missing >= 0 && dims >= trailing, "leading dimensions must broadcast to those of query");
  int64_t total = 1, count = 1;
  for (const int64_t size : leads) total *= size;
  std::vector<int64_t> offsets(size_t(total > 0 ? total : 0));
  for (int64_t dim = 0; dim < int64_t(leads.size()); ++dim) {
    const int64_t size = dim < missing ? 1 : sizes[dim - missing];
    STD_TORCH_CHECK(size == leads[dim] || size == 1, "leading dimensions must be those of query, or 1");
    if (total > 0) count = repeat_offsets(offsets.data(), count, leads[dim], size == 1 ? 0 : strides[dim - missing]);
  }
  return offsets;
}

inline int64_t element_size(ScalarType type) {
  return type == ScalarType::Double ? 8 : type == ScalarType::Float ? 4 : 2;
}

// A contiguous CPU tensor. torch::stable::new_empty looks its operator up by name, which costs more than a small problem.
inline Tensor new_tensor(const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (int64_t i = int64_t(sizes.size()) - 1; i >= 0; --i) {
    strides[i] = step;
    step *= sizes[i] > 1 ? sizes[i] : 1;
  }
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle = nullptr;
  const bool made = aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(), dtype,
                                             aoti_torch_device_type_cpu(), -1, &handle) == 0;
  if (!made) {
    double count = double(element_size(type));
    for (const int64_t size : sizes) count *= double(size);
    throw OutOfMemory(count);
  }
  Tensor t(handle);
  const int64_t bytes = t.numel() * element_size(type);
  if (bytes > 0) ask_for_large_pages(t.mutable_data_ptr(), bytes);
  return t;
}

// The data of t with other sizes and strides; the offset that the call takes is beyond t's own.
inline Tensor viewed(const Tensor& t, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(t.get(), int64_t(sizes.size()), sizes.data(), strides.data(), 0, &handle));
  return Tensor(handle);
}

// A view with the sizes given: an axis that t has not, or has once, is repeated.
inline Tensor expanded(const Tensor& t, const std::vector<int64_t>& sizes) {
  const int64_t dims = int64_t(sizes.size()), missing = dims - t.dim();
  STD_TORCH_CHECK(missing >= 0, "more dimensions than it must broadcast to");
  std::vector<int64_t> strides(sizes.size(), 0);
  for (int64_t i = missing; i < dims; ++i) {
    STD_TORCH_CHECK(t.size(i - missing) == sizes[i] || t.size(i - missing) == 1, "sizes that do not broadcast");
    if (t.size(i - missing) == sizes[i]) strides[i] = t.stride(i - missing);
  }
  return viewed(t, sizes, strides);
}

// A tensor as kernels see it, its sizes read once. With an axis of size 1 put in at `one`, which as a tensor of its own would be an
// allocation.
class View {
 public:
  static constexpr int64_t AXES = 4;  // that are looked at; dim() tells of more

  explicit View(const Tensor& t, int64_t one = -1) : data_(t.const_data_ptr()), type_(t.scalar_type()), dims_(t.dim() + (one >= 0)), one_(one) {
    const auto sizes = t.sizes(), strides = t.strides();
    for (int64_t i = 0, from = 0; i < dims_ && i < AXES; ++i) {
      const bool own = i != one;
      sizes_[i] = own ? sizes[from] : 1, strides_[i] = own ? strides[from] : 0;
      from += own;
    }
  }
  const void* const_data_ptr() const { return data_; }
  ScalarType scalar_type() const { return type_; }
  int64_t dim() const { return dims_; }
  int64_t size(int64_t i) const { return sizes_[i]; }
  int64_t stride(int64_t i) const { return strides_[i]; }
  std::vector<int64_t> own_sizes() const {  // of the tensor
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < dims_; ++i) {
      if (i != one_) sizes.push_back(sizes_[i]);
    }
    return sizes;
  }

 private:
  const void* data_;
  ScalarType type_;
  int64_t dims_, one_, sizes_[AXES] = {}, strides_[AXES] = {};
};

// Throws unless t has this dtype and these sizes: a backward op reads its gradients and results by the sizes of its inputs.
inline void check_is(const Tensor& t, ScalarType type, const std::vector<int64_t>& sizes, const char* message) {
  STD_TORCH_CHECK(t.scalar_type() == type && t.dim() == int64_t(sizes.size()) && sizes_of(t, t.dim()) == sizes, message);
}

// A contiguous CPU tensor of zeros, float or double.
inline Tensor new_cleared(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType type) {
  int64_t bytes = element_size(type);
  for (const int64_t s : sizes) bytes *= s;
  if (bytes > (int64_t(1) << 18)) {
    return allocating(double(bytes), [&] { return torch::stable::new_zeros(like, sizes, type); });  // on all threads
  }
  Tensor t = new_tensor(sizes, type);
  if (bytes > 0) std::memset(t.mutable_data_ptr(), 0, size_t(bytes));
  return t;
}

// t in another dtype.
inline Tensor converted(const Tensor& t, ScalarType type) {
  return allocating(double(t.numel()) * double(element_size(type)), [&] { return torch::stable::to(t, type); });
}

}  // namespace continuum_ops
