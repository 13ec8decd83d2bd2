#include <gtest/gtest.h>

#include "model/proof/mutants_testing.h"

namespace tessera {
namespace {

using testing::Case;
using testing::LayoutCase;
using testing::LooseProgram;

/// Models that have every kind of exchange between them.
std::vector<Case> mutated_models() {
  std::vector<Case> chosen;
  for (const Case& c : testing::gradient_cases()) {
    for (const char* name : {"biases", "all_heads_norm", "head_norm", "latent", "global_balance",
                             "classic_weighting", "shared_gated", "block_sparse"})
      if (c.name == name) chosen.push_back(c);
  }
  return chosen;
}

class MutatedLayout : public ::testing::TestWithParam<LayoutCase> {
 protected:
  void prove_mutants(const ModelProgram& layout, const DerivedProgram& derived,
                     const StageGroups& groups, const RankAxes& axes) {
    const LooseProgram original(layout, derived);
    ASSERT_EQ(original.prove(axes, groups), ShardingFaults());
    testing::Mutator(original, groups, axes,
                     [&](const std::string& what, const LooseProgram& mutant) {
                       ++num_mutants_;
                       if (mutant.prove(axes, groups).empty())
                         ADD_FAILURE() << "not found: " << what;
                     })
        .run();
  }

  int num_mutants_ = 0;
};

TEST_P(MutatedLayout, EveryMistakeIsFound) {
  for (const Case& model : mutated_models()) {
    SCOPED_TRACE(model.name);
    const auto stage = testing::plan_stage(model.config, GetParam());
    if (!stage) continue;
    const StageGroups& groups = stage->part.groups;
    const RankAxes axes(groups, stage->config.kv_heads());
    for (const auto& [key, kind] : stage->kinds)
      prove_mutants(kind->layout, kind->derived, groups, axes);
    prove_mutants(stage->embedding_layout, *stage->embedding, groups, axes);
    for (const HeadPasses& head : stage->heads)
      prove_mutants(head.layout, head.derived, groups, axes);
  }
  RecordProperty("mutants", num_mutants_);
  const bool exchanges = GetParam().num_ranks > 1 && GetParam().name != "dp4";
  EXPECT_GE(num_mutants_, exchanges ? 20 : 0);
  std::cout << num_mutants_ << " mutants\n";
}

INSTANTIATE_TEST_SUITE_P(Layouts, MutatedLayout, ::testing::ValuesIn(testing::proof_layouts()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
