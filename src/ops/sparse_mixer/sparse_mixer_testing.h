#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "ops/sparse_mixer/sparse_mixer.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {

struct SparseMixerCase {
  int64_t tokens = 1;
  int64_t num_experts = 1;
  int64_t top_k = 1;
  double jitter = 0.05;
  double deviation = 1;  ///< of logits: small ones have many near the best
  double mean = 0;       ///< of logits: below 0 the best is nearer to the others
};

inline std::vector<SparseMixerCase> sparse_mixer_cases() {
  return {{0, 4, 2},
          {1, 1, 1},
          {17, 5, 3, 0.3},
          {300, 16, 2, 0.01},
          {300, 16, 2, 0.2},
          {100, 16, 2, 0.1, 0.1, 2},
          {100, 16, 2, 0.1, 1, -4},
          {40, 40, 8, 0.2}};
}

/// Logits and each token's best experts, best first. Every eighth token has none.
inline std::vector<TestInput> make_sparse_mixer_inputs(const SparseMixerCase& c, uint64_t seed) {
  Random random(seed, 0);
  std::vector<float> logits;
  std::vector<int32_t> experts;
  for (int64_t token = 0; token < c.tokens; ++token) {
    std::vector<float> own(c.num_experts);
    for (float& logit : own)
      logit = static_cast<float>(c.mean + c.deviation * random.next_normal());
    std::vector<int32_t> order(c.num_experts);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::sort(order, [&](int32_t a, int32_t b) { return own[a] > own[b]; });
    for (int64_t k = 0; k < c.top_k; ++k) experts.push_back(token % 8 == 7 ? -1 : order[k]);
    logits.insert(logits.end(), own.begin(), own.end());
  }
  return list_inputs(
      TestInput{tensor_of({c.tokens, c.num_experts}, logits), Role::kValue, "xlogits"},
      TestInput{tensor_of_i32({c.tokens, c.top_k}, experts), Role::kConstant, "expert_idx"});
}

/// Behind those: numbers of tokens, beyond 32 bits too, and the noise of training or of none.
inline void add_sparse_mixer_noise(std::vector<TestInput>& inputs, bool training,
                                   int32_t key = 0x12345678) {
  const int64_t tokens = inputs[0].tensor.get().shape[0];
  std::vector<int64_t> numbers(tokens);
  for (int64_t i = 0; i < tokens; ++i) numbers[i] = (i % 3 == 2 ? int64_t{1} << 33 : 0) + 5 * i;
  inputs.push_back({tensor_of_i64({tokens}, numbers), Role::kConstant, "token_numbers"});
  inputs.push_back(
      {tensor_of_i32({kNumNoiseWords}, {key, -7, 0, training ? 1 : 0}), Role::kConstant, "noise"});
}

}  // namespace tessera::testing
