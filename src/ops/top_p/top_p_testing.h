#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops/testing/op_test.h"
#include "ops/top_p/top_p.h"

namespace tessera::testing {

struct TopPCase {
  int64_t tokens = 1;
  int64_t top_k = 1;
  TopPSpec spec = {};
};

/// The inputs of TopP: each token's best experts of a softmax, best first.
inline std::vector<TestInput> make_top_p_inputs(const TopPCase& c, uint64_t seed) {
  Random random(seed, 0);
  const int64_t num_experts = c.spec.num_experts;
  std::vector<float> probs;
  std::vector<int32_t> experts;
  for (int64_t token = 0; token < c.tokens; ++token) {
    std::vector<double> weights(num_experts);
    for (double& weight : weights) weight = std::exp(1.5 * random.next_normal());
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    std::vector<int32_t> order(num_experts);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::sort(order, [&](int32_t a, int32_t b) { return weights[a] > weights[b]; });
    for (int64_t k = 0; k < c.top_k; ++k) {
      experts.push_back(order[k]);
      probs.push_back(static_cast<float>(weights[order[k]] / sum));
    }
  }
  const Shape choices = {c.tokens, c.top_k};
  return list_inputs(TestInput{tensor_of(choices, probs), Role::kValue, "probs"},
                     TestInput{tensor_of_i32(choices, experts), Role::kConstant, "expert_idx"});
}

inline std::vector<TopPCase> top_p_cases() {
  std::vector<TopPCase> cases;
  for (const bool normalize : {false, true}) {
    for (const double share : {0.05, 0.4, 0.7, 1.0}) {
      cases.push_back({0, 2, {4, share, normalize}});
      cases.push_back({1, 1, {1, share, normalize}});
      cases.push_back({17, 3, {5, share, normalize, 2.5}});
      cases.push_back({300, 8, {40, share, normalize}});
    }
  }
  return cases;
}

}  // namespace tessera::testing
