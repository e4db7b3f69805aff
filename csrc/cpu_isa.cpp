#include "cpu_isa.h"

#include <atomic>
#include <stdexcept>

namespace continuum_ops {
namespace {

std::vector<const ContinuumAttentionKernels*> available() {
  std::vector<const ContinuumAttentionKernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    found.push_back(&avx512::continuum_attention);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&avx2::continuum_attention);
#endif
  found.push_back(&generic::continuum_attention);
  return found;
}

std::atomic<const ContinuumAttentionKernels*>& current() {
  static std::atomic<const ContinuumAttentionKernels*> kernels{available().front()};
  return kernels;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const auto* k : available()) names.emplace_back(k->isa);
  return names;
}

std::string current_isa() { return current().load()->isa; }

void set_isa(const std::string& name) {
  std::string known;
  for (const auto* k : available()) {
    if (name == k->isa) {
      current() = k;
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(k->isa);
  }
  throw std::invalid_argument("name must be one of " + known + " on this machine, got " + name);
}

const ContinuumAttentionKernels& continuum_attention_kernels() { return *current().load(); }

}  // namespace continuum_ops
