#include "ops/block_sparse/block_sparse_activation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/block_sparse/topology.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::random_tensor;
using testing::Role;
using testing::TestInput;

KernelTable kernels() {
  KernelTable table;
  add_block_sparse_activation_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(const BlockSparseActivationSpec& spec, Random& random) {
  const std::vector<int64_t> offsets = {0, 8, 8, 24};
  const std::vector<int64_t> sizes = {8, 16, 24};
  const BlockTopology topology = make_expert_topology(offsets, sizes, spec.block_size);
  const int64_t num_blocks = topology.view().num_blocks();
  const auto indices = [](const std::vector<int32_t>& values) {
    return testing::tensor_of_i32({static_cast<int64_t>(values.size())}, values);
  };
  const int64_t gates = is_gated(spec.activation.kind) ? 2 : 1;
  std::vector<TestInput> inputs;
  inputs.push_back(
      {random_tensor(DType::kF32, {gates * num_blocks, 8, 8}, random), Role::kValue, "pre"});
  inputs.push_back({random_tensor(DType::kF32, {24}, random), Role::kValue, "probs"});
  inputs.push_back({indices(topology.row_offsets), Role::kConstant, "row_offsets"});
  inputs.push_back({indices(topology.col_indices), Role::kConstant, "col_indices"});
  return inputs;
}

TEST(BlockSparseActivation, Gradients) {
  Random random(41, 0);
  for (const auto& activation : std::initializer_list<ActivationFunction>{
           Activation::kSwiGLU,
           Activation::kGeGLU,
           Activation::kGeGLUTanh,
           Activation::kGelu,
           Activation::kGeluTanh,
           {Activation::kSwiGLUOai, 0.75},
           {Activation::kSwiGLUClamped, 1.25},
           Activation::kRelu2,
       }) {
    SCOPED_TRACE(to_string(activation));
    const BlockSparseActivationSpec spec{activation, 8};
    testing::check_gradients(make_block_sparse_activation(spec), kernels(),
                             make_inputs(spec, random));
  }
}

TEST(BlockSparseActivation, RefusesWhatDoesNotFit) {
  Random random(42, 0);
  const BlockSparseActivationSpec spec{Activation::kSwiGLU, 8};
  std::vector<ValueType> types;
  for (const TestInput& input : make_inputs(spec, random)) {
    types.push_back({input.tensor.get().dtype, input.tensor.get().shape});
  }
  const BlockSparseActivation op(spec);
  EXPECT_NO_THROW(op.infer(types));
  const auto with = [&](size_t idx, const ValueType& type) {
    std::vector<ValueType> changed = types;
    changed[idx] = type;
    return changed;
  };
  EXPECT_THROW(op.infer(with(0, {DType::kF32, {7, 8, 8}})), UserError);
  EXPECT_THROW(op.infer(with(0, {DType::kI32, types[0].shape})), UserError);
  EXPECT_THROW(op.infer(with(1, {DType::kF32, {32}})), UserError);
  EXPECT_THROW(op.infer(with(2, {DType::kI64, types[2].shape})), UserError);
  EXPECT_THROW(BlockSparseActivation({Activation::kGelu, 12}), UserError);
}

}  // namespace
}  // namespace tessera
