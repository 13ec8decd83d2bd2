#include "ops/scaled_grouped_wgrad/scaled_grouped_wgrad.h"

#include <gtest/gtest.h>

#include "ops/scaled_grouped_wgrad/scaled_wgrad_testing.h"

namespace tessera {
namespace {

using Op = ScaledGroupedWgrad;
using testing::ScaledWgradCase;
using testing::ScaledWgradData;

constexpr float kBefore = 2;

/// By the CPU's kernel, without offsets where there is but one expert.
std::vector<float> run(const ScaledWgradCase& test, const ScaledWgradData& data, bool sets) {
  const Op op(ExpertSizes(test.sizes, "test"), test.by_block, test.num_tokens());
  const OwnedTensor offsets = testing::tensor_of_i64({std::ssize(data.offsets())}, data.offsets());
  std::vector<Tensor> inputs = {data.narrow().codes, data.wide().codes, data.narrow().scales,
                                data.wide().scales};
  if (test.sizes.size() > 1) inputs.push_back(offsets);
  std::vector<ValueType> types;
  for (const Tensor& input : inputs) types.push_back({.dtype = input.dtype, .shape = input.shape});
  const OwnedTensor grad(DType::kF32, op.infer(types)[Op::kGradWeight].shape);
  std::ranges::fill(grad.get().span<float>(), sets ? std::nanf("") : kBefore);
  KernelTable table;
  add_scaled_grouped_wgrad_cpu(table);
  const Kernel& kernel = table.find(Op::kName)->second;
  Buffer workspace(kernel.workspace_bytes(op, types), "scratch memory");
  const std::vector<Tensor> outputs = {grad};
  kernel(op, {.inputs = inputs,
              .outputs = outputs,
              .workspace = {workspace.data(), static_cast<size_t>(workspace.num_bytes())},
              .set_accumulators = sets});
  const auto values = grad.get().span<float>();
  return {values.begin(), values.end()};
}

void check_case(const ScaledWgradCase& test) {
  const ScaledWgradData data(test);
  for (const bool sets : {false, true})
    data.expect_gradient(run(test, data, sets), sets ? 0 : kBefore, 1e-5);
}

TEST(ScaledGroupedWgrad, AddsUpTokens) {
  for (const bool by_block : {false, true}) {
    check_case({.sizes = {3, 5}, .tokens_of = {4, 0}, .columns = 7, .by_block = by_block});
    check_case({.sizes = {16}, .tokens_of = {300}, .columns = 20, .by_block = by_block});
    check_case({.sizes = {8, 8, 8, 8},
                .tokens_of = {0, 129, 1, 128},
                .columns = 16,
                .by_block = by_block});
  }
  Random random(5, 1);
  for (int i = 0; i < 20; ++i) check_case(testing::random_scaled_wgrad(random, 40, i % 2 == 1));
}

TEST(ScaledGroupedWgrad, RefusesWhatDoesNotFit) {
  const Op op(ExpertSizes({64, 32}, "test"), /*by_block=*/true, 200);
  const ValueType narrow{.dtype = DType::kE4M3, .shape = {64, 384}};
  const ValueType wide{.dtype = DType::kE4M3, .shape = {48, 384}};
  const ValueType narrow_scales{.dtype = DType::kF32, .shape = {3, 64}};
  const ValueType wide_scales{.dtype = DType::kF32, .shape = {3, 48}};
  const ValueType offsets{.dtype = DType::kI64, .shape = {3}};
  const std::vector<ValueType> types = {narrow, wide, narrow_scales, wide_scales, offsets};
  EXPECT_EQ(op.infer(types)[0].to_string(), "f32 [96, 48]");
  EXPECT_EQ(op.cost(types, op.infer(types)).flops, 2.0 * 100 * 96 * 48);
  EXPECT_EQ(op.attributes(), "experts=[64, 32] by block");
  for (size_t i = 0; i < types.size(); ++i) {
    std::vector<ValueType> other = types;
    other[i].shape[0] += 1;
    EXPECT_THROW(op.infer(other), UserError) << i;
  }
  EXPECT_THROW(op.infer(std::span(types).first(4)), UserError);  // two experts
  EXPECT_THROW(Op(op.sizes(), /*by_block=*/false, 200).infer(types), UserError);
}

TEST(ScaledGroupedWgrad, KnowsWhatAGpuTakes) {
  EXPECT_TRUE(has_scaled_wgrad(ExpertSizes({64, 48}, "test"), 32));
  EXPECT_FALSE(has_scaled_wgrad(ExpertSizes({64, 72}, "test"), 32));
  EXPECT_FALSE(has_scaled_wgrad(ExpertSizes({64, 64}, "test"), 40));
}

}  // namespace
}  // namespace tessera
