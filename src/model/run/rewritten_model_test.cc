// What rewrites a layer's programs: values that are computed again, products that gather, and
// activations that are part of products.
#include <gtest/gtest.h>

#include "core/testing/case_share.h"
#include "model/run/gradient_cases.h"

namespace tessera {
namespace {

using testing::Case;
using testing::expect_same_gradients;
using testing::gradient_cases;
using testing::kLength;
using testing::kSequences;
using testing::run_once;
using testing::tiny_config;

TEST(Recompute, GivesBitwiseTheSameGradientsInLessMemory) {
  for (const Case& c : gradient_cases()) {
    SCOPED_TRACE(c.name);
    const auto plain = run_once(c.config);
    const auto all = run_once(c.config, {"all"});
    expect_same_gradients(*plain, *all, 0);
    EXPECT_LT(all->model.activation_bytes().saved, plain->model.activation_bytes().saved);
  }
}

TEST(Recompute, SomeValuesOnly) {
  const auto plain = run_once(tiny_config());
  const auto some = run_once(tiny_config(), {"expert_act", "expert_in", "attn_norm"});
  expect_same_gradients(*plain, *some, 0);
  EXPECT_LT(some->model.activation_bytes().saved, plain->model.activation_bytes().saved);
}

TEST(Recompute, AnUnknownNameIsRefusedWithTheNearest) {
  try {
    run_once(tiny_config(), {"expert_akt"});
    FAIL() << "expected UserError";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("expert_act"), std::string::npos) << error.what();
  }
}

/// The model whose products gather, beside the one with copies in the experts' order.
ModelConfig gathering(ModelConfig config, GatherFusion fusion) {
  config.moe.fuse_gather = fusion;
  return config;
}

TEST(FusedGathers, GiveBitwiseTheSameGradientsAndKeepNoMore) {
  for (const Case& c : testing::share_of_cases(gradient_cases(), 0)) {
    for (const RecomputePolicy& policy : {RecomputePolicy{}, RecomputePolicy{"all"}}) {
      SCOPED_TRACE(fmt::format("{}, {} names", c.name, policy.size()));
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const auto copies = run_once(gathering(c.config, GatherFusion::kNever), policy, dtype);
        const auto fused = run_once(gathering(c.config, GatherFusion::kAlways), policy, dtype);
        // Experts' adapters read the rows too, and gradients are added after they came together.
        const bool adds = is_adapted(c.config, "moe.experts.gate_up");
        if (!adds || dtype == DType::kF32) expect_same_gradients(*copies, *fused, adds ? 1e-4 : 0);
        const ActivationBytes before = copies->model.activation_bytes();
        const ActivationBytes after = fused->model.activation_bytes();
        EXPECT_LE(after.saved, before.saved);
        EXPECT_LE(after.total(), before.total());
      }
    }
  }
}

TEST(FusedGathers, LeaveOutTheCopyOfEveryMoeLayer) {
  const auto copies = run_once(gathering(tiny_config(), GatherFusion::kNever));
  const auto fused = run_once(gathering(tiny_config(), GatherFusion::kAlways));
  const ModelConfig config = tiny_config();
  const int64_t copy_bytes = kSequences * kLength * config.moe.top_k * config.hidden_size * 4;
  EXPECT_EQ(copies->model.activation_bytes().saved - fused->model.activation_bytes().saved,
            config.num_layers * copy_bytes);
}

TEST(FusedActivations, GiveBitwiseTheSameGradientsInNoMoreMemory) {
  for (const Case& c : testing::share_of_cases(gradient_cases(), 1)) {
    for (const RecomputePolicy& policy :
         {RecomputePolicy{}, RecomputePolicy{"expert_act"}, RecomputePolicy{"all"}}) {
      if (policy == RecomputePolicy{"expert_act"} && c.config.moe.num_experts == 0) continue;
      SCOPED_TRACE(fmt::format("{}, {} names", c.name, policy.size()));
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        ModelConfig config = c.config;
        const auto apart = run_once(config, policy, dtype);
        config.moe.fuse_activation = true;
        const auto fused = run_once(config, policy, dtype);
        expect_same_gradients(*apart, *fused, 0);
        EXPECT_EQ(fused->model.activation_bytes().saved, apart->model.activation_bytes().saved);
      }
    }
  }
}

}  // namespace
}  // namespace tessera
