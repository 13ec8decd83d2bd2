#pragma once

#include <array>
#include <vector>

#include "ops/testing/op_test.h"

namespace tessera::testing {

struct ExpertScaleCase {
  int64_t tokens;
  int64_t top_k;
  int64_t experts;
};
inline constexpr std::array kExpertScaleCases = {ExpertScaleCase{0, 2, 4}, ExpertScaleCase{1, 1, 1},
                                                 ExpertScaleCase{7, 3, 5},
                                                 ExpertScaleCase{130, 8, 128}};

/// Every fifth choice has no expert.
inline std::vector<TestInput> make_expert_scale_inputs(const ExpertScaleCase& c, uint64_t seed) {
  Random random(seed, 1);
  std::vector<int32_t> experts;
  for (int64_t i = 0; i < c.tokens * c.top_k; ++i)
    experts.push_back(i % 5 == 4 ? -1 : static_cast<int32_t>(i * 7 % c.experts));
  const Shape choices{c.tokens, c.top_k};
  return list_inputs(
      TestInput{random_tensor(DType::kF32, choices, random), Role::kValue, "probs"},
      TestInput{tensor_of_i32(choices, experts), Role::kConstant, "expert_idx"},
      TestInput{random_tensor(DType::kF32, {c.experts}, random), Role::kWeight, "scale"});
}

}  // namespace tessera::testing
