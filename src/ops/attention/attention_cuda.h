#pragma once

#include "ops/attention/attention.h"
#include "ops/attention/attention_cuda_kernels.h"
#include "ops/attention/attention_operands.h"

/// How the kernels of attention and of ring attention are given their parameters.
namespace tessera::cuda::attention {

/// Whether the tensor cores' kernels take the operator; plain arithmetic takes any.
bool uses_tensor_cores(const AttentionSpec& spec, DType dtype);
/// Positions of a work list's blocks.
int block_size(const AttentionSpec& spec, DType dtype);

/// Throws UserError where there are more rows or blocks than the GPU's 32 bits count.
void check_sizes(const Operator& op, const AttentionSpec& spec, int64_t num_tokens);

/// The parameters that all kernels need, for inputs as make_attention's.
TensorParams tensor_params(const AttentionSpec& spec, const KernelArgs& args, const WorkList& list);
ExactParams exact_params(const AttentionSpec& spec, const KernelArgs& args, const WorkList& list);
/// Sets what tensor_params leaves out, for inputs as make_attention_backward's.
void set_backward(TensorParams& params, const AttentionSpec& spec, const KernelArgs& args,
                  const float* delta);
void set_backward(ExactParams& params, const KernelArgs& args, const float* delta);
/// For launch_delta: delta F32 [N, T], for inputs as make_attention_backward's.
DeltaParams delta_params(const AttentionSpec& spec, const KernelArgs& args, float* delta);

}  // namespace tessera::cuda::attention
