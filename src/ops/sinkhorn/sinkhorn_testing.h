#pragma once

#include <vector>

#include "ops/noise.h"
#include "ops/sinkhorn/sinkhorn.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {

/// The inputs of Sinkhorn: logits that prefer the first experts.
inline std::vector<TestInput> make_sinkhorn_inputs(int64_t tokens, int64_t experts, uint64_t seed,
                                                   bool training = true) {
  Random random(seed, 0);
  std::vector<float> logits(tokens * experts);
  for (size_t i = 0; i < logits.size(); ++i) {
    const auto expert = static_cast<double>(static_cast<int64_t>(i) % experts);
    logits[i] =
        static_cast<float>(random.next_normal() - 2 * expert / static_cast<double>(experts));
  }
  return list_inputs(TestInput{tensor_of({tokens, experts}, logits), Role::kConstant, "logits"},
                     TestInput{tensor_of_i32({kNumNoiseWords}, {0, 0, 0, training ? 1 : 0}),
                               Role::kConstant, "noise"});
}

}  // namespace tessera::testing
