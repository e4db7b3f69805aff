// The instruction set of this CPU, and the kernels that were compiled for it.
#include "cpu_isa.h"

#include <atomic>
#include <stdexcept>

namespace continuum_ops {
namespace {

struct Kernels {
  const ContinuumAttentionKernels* continuum;
  const PatchAttentionKernels* patch;
  const PositionAttentionKernels* position;
  const PatchTransformKernels* patch_dft;
  const GalerkinAttentionKernels* galerkin;
  const AxisProductKernels* axis_product;
  const PositionTransformKernels* position_transform;
};

#define CO_KERNELS(isa) \
  {&isa::continuum_attention, &isa::patch_attention, &isa::position_attention, &isa::patch_dft, \
   &isa::galerkin_attention, &isa::axis_product, &isa::position_transform}

const std::vector<Kernels>& available() {
  static const std::vector<Kernels> kernels = [] {
    std::vector<Kernels> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl")) {
      found.push_back(CO_KERNELS(avx512));
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(CO_KERNELS(avx2));
#endif
    found.push_back(CO_KERNELS(generic));
    return found;
  }();
  return kernels;
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> kernels{&available().front()};
  return kernels;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels& k : available()) names.emplace_back(k.continuum->isa);
  return names;
}

std::string current_isa() { return current().load()->continuum->isa; }

void set_isa(const std::string& name) {
  std::string known;
  for (const Kernels& k : available()) {
    if (name == k.continuum->isa) {
      current() = &k;
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(k.continuum->isa);
  }
  throw std::invalid_argument("name must be one of " + known + " on this machine, got " + name);
}

const ContinuumAttentionKernels& continuum_attention_kernels() { return *current().load()->continuum; }
const PatchTransformKernels& patch_dft_kernels() { return *current().load()->patch_dft; }
const PatchAttentionKernels& patch_attention_kernels() { return *current().load()->patch; }
const PositionAttentionKernels& position_attention_kernels() { return *current().load()->position; }
const GalerkinAttentionKernels& galerkin_attention_kernels() { return *current().load()->galerkin; }
const AxisProductKernels& axis_product_kernels() { return *current().load()->axis_product; }
const PositionTransformKernels& position_transform_kernels() { return *current().load()->position_transform; }

}  // namespace continuum_ops
