#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops/testing/op_test.h"
#include "ops/zero_experts/zero_experts.h"

namespace tessera::testing {

struct ZeroExpertsCase {
  int64_t tokens = 1;
  int64_t width = 1;
  int64_t top_k = 1;
  ZeroExpertsSpec spec = {};
};

/// The inputs of ZeroExperts: distinct experts of each token, some of them -1.
inline std::vector<TestInput> make_zero_expert_inputs(const ZeroExpertsCase& c, DType dtype,
                                                      uint64_t seed) {
  Random random(seed, 0);
  std::vector<int32_t> experts;
  std::vector<int32_t> all(c.spec.num_experts + c.spec.zero_experts);
  std::iota(all.begin(), all.end(), 0);
  for (int64_t token = 0; token < c.tokens; ++token) {
    for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[random.next_below(i)]);
    for (int64_t k = 0; k < c.top_k; ++k)
      experts.push_back(random.next_below(6) == 0 ? -1 : all[k]);
  }
  const Shape choices = {c.tokens, c.top_k};
  OwnedTensor x = random_tensor(dtype, {c.tokens, c.width}, random);
  return list_inputs(TestInput{std::move(x), Role::kValue, "x"},
                     TestInput{random_tensor(DType::kF32, choices, random), Role::kValue, "probs"},
                     TestInput{tensor_of_i32(choices, experts), Role::kConstant, "expert_idx"});
}

inline std::vector<ZeroExpertsCase> zero_expert_cases() {
  return {{0, 5, 2, {3, 2}},   {1, 1, 1, {1, 1}},     {3, 17, 2, {4, 4}},  {9, 64, 3, {2, 5}},
          {40, 24, 6, {8, 4}}, {7, 2, 2, {600, 300}}, {33, 264, 1, {4, 1}}};
}

}  // namespace tessera::testing
