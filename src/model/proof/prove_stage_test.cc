#include "model/proof/prove_stage.h"

#include <gtest/gtest.h>

#include "core/testing/case_share.h"
#include "model/proof/proof_testing.h"

namespace tessera {
namespace {

using testing::Case;
using testing::LayoutCase;

class ProvenLayout : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(ProvenLayout, HoldsForEveryKindOfModel) {
  int num_planned = 0;
  for (const Case& model : testing::share_of_cases(testing::gradient_cases(), 0)) {
    SCOPED_TRACE(model.name);
    const auto stage = testing::plan_stage(model.config, GetParam());
    if (!stage) continue;
    ++num_planned;
    const StageProof proof = prove_stage(*stage);
    EXPECT_EQ(proof.faults, ShardingFaults());
  }
  EXPECT_GT(num_planned, testing::share_of_count(10));
}

TEST_P(ProvenLayout, HoldsWhereLogitsAreMeasured) {
  for (const Case& model : testing::share_of_cases(testing::gradient_cases(), 1)) {
    SCOPED_TRACE(model.name);
    const auto stage = testing::plan_stage(model.config, GetParam(), 0, {}, 1.0);
    if (stage) {
      EXPECT_EQ(prove_stage(*stage).faults, ShardingFaults());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, ProvenLayout, ::testing::ValuesIn(testing::proof_layouts()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
