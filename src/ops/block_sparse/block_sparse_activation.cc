#include "ops/block_sparse/block_sparse_activation.h"

#include <memory>

#include "ops/block_sparse/topology.h"

namespace tessera {
namespace {

std::string attributes_of(const BlockSparseActivationSpec& spec) {
  return fmt::format("{} block={}", to_string(spec.activation), spec.block_size);
}

int64_t pre_blocks(const BlockSparseActivationSpec& spec, int64_t num_blocks) {
  return is_gated(spec.activation.kind) ? 2 * num_blocks : num_blocks;
}

void check_values(const Operator& op, const BlockSparseActivationSpec& spec, const ValueType& type,
                  int64_t num_blocks, std::string_view what) {
  check_shape(op, type.shape == Shape({num_blocks, spec.block_size, spec.block_size}),
              "{} must be [{}, {}, {}], got {}", what, num_blocks, spec.block_size, spec.block_size,
              type.to_string());
  check_shape(op, is_storage(type.dtype), "{} must be F32 or BF16, got {}", what,
              dtype_name(type.dtype));
}

void check_rows(const Operator& op, const BlockSparseActivationSpec& spec, const ValueType& probs,
                const ValueType& row_offsets) {
  check_shape(op, probs.dtype == DType::kF32 && probs.shape.rank() == 1,
              "probabilities must be F32 [R], got {}", probs.to_string());
  check_shape(op, row_offsets.dtype == DType::kI32 && row_offsets.shape.rank() == 1,
              "row offsets must be I32 of rank 1, got {}", row_offsets.to_string());
  check_shape(op, probs.shape[0] / spec.block_size == row_offsets.shape[0] - 1,
              "{} probabilities for a topology of at most {} block-rows of {}", probs.shape[0],
              row_offsets.shape[0] - 1, spec.block_size);
}

}  // namespace

BlockSparseActivation::BlockSparseActivation(const BlockSparseActivationSpec& spec) : spec_(spec) {
  require_block_size(spec.block_size);
}

std::string BlockSparseActivation::attributes() const {
  return attributes_of(spec_);
}

std::vector<ValueType> BlockSparseActivation::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 4, "4 inputs expected, got {}", inputs.size());
  const ValueType& col_indices = inputs[kColIndices];
  check_shape(*this, col_indices.dtype == DType::kI32 && col_indices.shape.rank() == 1,
              "column indices must be I32 of rank 1, got {}", col_indices.to_string());
  const int64_t num_blocks = col_indices.shape[0];
  check_values(*this, spec_, inputs[kPre], pre_blocks(spec_, num_blocks), "the pre-activation");
  check_rows(*this, spec_, inputs[kProbs], inputs[kRowOffsets]);
  ValueType type = col_indices;
  type.dtype = inputs[kPre].dtype;
  type.shape = {num_blocks, spec_.block_size, spec_.block_size};
  return {type};
}

void BlockSparseActivation::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kOut);
  if (!grad || !(builder.needs_grad(kPre) || builder.needs_grad(kProbs))) return;
  const auto grads =
      builder.emit(std::make_shared<BlockSparseActivationBackward>(spec_),
                   {*grad, builder.input(kPre), builder.input(kProbs), builder.input(kRowOffsets)});
  using Backward = BlockSparseActivationBackward;
  if (builder.needs_grad(kPre)) builder.set_grad_input(kPre, grads[Backward::kGradPre]);
  if (builder.needs_grad(kProbs)) builder.set_grad_input(kProbs, grads[Backward::kGradProbs]);
}

std::string BlockSparseActivationBackward::attributes() const {
  return attributes_of(spec_);
}

std::vector<ValueType> BlockSparseActivationBackward::infer(
    std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 4, "4 inputs expected, got {}", inputs.size());
  check_shape(*this, inputs[kGrad].shape.rank() == 3 && inputs[kGrad].dtype == inputs[kPre].dtype,
              "the gradient must be sparse values in the pre-activation's type, got {}",
              inputs[kGrad].to_string());
  const int64_t num_blocks = inputs[kGrad].shape[0];
  check_values(*this, spec_, inputs[kGrad], num_blocks, "the gradient");
  check_values(*this, spec_, inputs[kPre], pre_blocks(spec_, num_blocks), "the pre-activation");
  check_rows(*this, spec_, inputs[kProbs], inputs[kRowOffsets]);
  return {inputs[kPre], inputs[kProbs]};
}

OperatorPtr make_block_sparse_activation(const BlockSparseActivationSpec& spec) {
  return std::make_shared<BlockSparseActivation>(spec);
}

}  // namespace tessera
