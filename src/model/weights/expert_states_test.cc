#include "model/weights/expert_states.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "model/run/model_testing.h"

namespace tessera {
namespace {

TEST(ExpertBiases, MoveTowardsEvenLoads) {
  ModelConfig config = testing::tiny_config();
  config.moe.zero_experts = 2;
  auto experts = make_expert_states(config);
  for (ExpertState& state : experts) {
    ASSERT_EQ(state.bias.get().shape, (Shape{6}));
    std::ranges::fill(state.bias.get().span<float>(), 0.0F);
    std::ranges::copy(std::initializer_list<float>{1, 5, 3, 0, 8, 1},
                      state.step_counts.get().as<float>());
  }
  update_expert_biases(experts, 0.5, config.moe.zero_experts);
  for (const ExpertState& state : experts) {
    const auto bias = state.bias.get().span<float>();
    EXPECT_EQ(std::vector<float>(bias.begin(), bias.end()),
              (std::vector<float>{0.5F, -0.5F, 0, 0.5F, 0, 0}))
        << "experts that compute nothing keep theirs";
  }
}

}  // namespace
}  // namespace tessera
