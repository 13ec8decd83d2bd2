#include "ops/expert_scale/expert_scale.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/expert_scale/expert_scale_testing.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_expert_scale_cpu(table);
  return table;
}

TEST(ExpertScale, TakesTheFactorOfEachExpert) {
  for (const ExpertScaleCase& c : kExpertScaleCases) {
    const auto inputs = make_expert_scale_inputs(c, 3);
    const auto probs = inputs[0].tensor.get().span<float>();
    const auto experts = inputs[1].tensor.get().span<int32_t>();
    const auto scale = inputs[2].tensor.get().span<float>();
    std::vector<float> expected;
    for (size_t i = 0; i < probs.size(); ++i)
      expected.push_back(experts[i] < 0 ? probs[i] : probs[i] * scale[experts[i]]);
    const auto outputs = run_operator(ExpertScale(), kernels(), inputs);
    expect_bitwise_equal(outputs[0], tensor_of({c.tokens, c.top_k}, expected), "scaled");
  }
}

TEST(ExpertScale, GradientsMatchFiniteDifferences) {
  for (const ExpertScaleCase& c : kExpertScaleCases)
    check_gradients(make_expert_scale(), kernels(), make_expert_scale_inputs(c, 5));
}

TEST(ExpertScale, ShapeRule) {
  const ValueType probs{DType::kF32, {8, 2}};
  const ValueType idx{DType::kI32, {8, 2}};
  const ValueType scale{DType::kF32, {4}};
  EXPECT_EQ(make_expert_scale()->infer(std::vector{probs, idx, scale})[0], probs);
  const auto refuses = [](const std::vector<ValueType>& wrong, const char* message) {
    EXPECT_THAT([&] { ExpertScale().infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses({probs, idx}, "expert_scale: takes probs, expert_idx and scale, got 2 inputs");
  refuses({probs, probs, scale}, "expert_scale: expert_idx must be i32 [T, K]");
  refuses({scale, idx, scale}, "expert_scale: probs must be f32");
  refuses({probs, idx, probs}, "expert_scale: scale must be f32 [E]");
}

}  // namespace
}  // namespace tessera::testing
