// The instruction set whose kernels run, chosen once at load time from what the processor has.
#pragma once

#include <string>
#include <vector>

#include "axis_product.h"
#include "continuum_attention.h"
#include "galerkin_attention.h"
#include "patch_attention.h"
#include "patch_dft.h"
#include "position_attention.h"
#include "position_transform.h"

namespace continuum_ops {

std::vector<std::string> available_isas();  // best first
std::string current_isa();
void set_isa(const std::string& name);  // throws std::invalid_argument

const ContinuumAttentionKernels& continuum_attention_kernels();
const PatchAttentionKernels& patch_attention_kernels();
const PatchTransformKernels& patch_dft_kernels();
const PositionAttentionKernels& position_attention_kernels();
const GalerkinAttentionKernels& galerkin_attention_kernels();
const AxisProductKernels& axis_product_kernels();
const PositionTransformKernels& position_transform_kernels();

}  // namespace continuum_ops
