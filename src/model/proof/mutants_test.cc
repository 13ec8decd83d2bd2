#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/testing/case_share.h"
#include "model/proof/mutants_testing.h"
#include "ops/attention/attention.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/router/router.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

using testing::Case;
using testing::LayoutCase;
using testing::LooseProgram;

/// Models that have every kind of exchange between them.
std::vector<Case> mutated_models() {
  std::vector<Case> chosen;
  for (const Case& c : testing::gradient_cases()) {
    for (const char* name :
         {"biases", "all_heads_norm", "head_norm", "latent", "global_balance", "classic_weighting",
          "shared_gated", "block_sparse", "gated_delta", "mamba"})
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
  for (const Case& model : testing::share_of_cases(mutated_models(), 0)) {
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
  EXPECT_GE(num_mutants_, exchanges ? testing::share_of_count(50) : 0);
}

/// What is computed again is exchanged again, in the same groups (finding 4 of Megatron-LM's issue
/// 7452).
TEST(Mutants, OfRecomputationAreFound) {
  const SavedPolicy policy{.recompute = parse_recompute({"all"})};
  int num_mutants = 0;
  for (const LayoutCase& layout : testing::proof_layouts()) {
    if (layout.name != "tp4_cp2_ep2_etp2" && layout.name != "ulysses2_cp2") continue;
    for (const Case& model : testing::share_of_cases(mutated_models(), 0)) {
      const auto stage = testing::plan_stage(model.config, layout, 0, policy);
      if (!stage) continue;
      const StageGroups& groups = stage->part.groups;
      const RankAxes axes(groups, stage->config.kv_heads());
      for (const auto& [key, kind] : stage->kinds) {
        const LooseProgram original(kind->layout, kind->derived);
        ASSERT_EQ(original.prove(axes, groups), ShardingFaults());
        testing::Mutator(original, groups, axes,
                         [&](const std::string& what, const LooseProgram& mutant) {
                           ++num_mutants;
                           EXPECT_FALSE(mutant.prove(axes, groups).empty()) << what;
                         })
            .run();
      }
    }
  }
  EXPECT_GT(num_mutants, 100);
}

/// Mistakes of other kinds, one program each.
class KnownMistake : public ::testing::Test {
 protected:
  /// The layers' program of a model on a layout, and what the proof says of it once it is changed.
  template <typename Change>
  ShardingFaults faults_of(const std::string& model, const std::string& layout, Change change) {
    const auto cases = testing::gradient_cases();
    const auto layouts = testing::proof_layouts();
    const auto stage = testing::plan_stage(std::ranges::find(cases, model, &Case::name)->config,
                                           *std::ranges::find(layouts, layout, &LayoutCase::name));
    if (!stage) return {"cannot be planned"};
    const StageGroups& groups = stage->part.groups;
    const RankAxes axes(groups, stage->config.kv_heads());
    const KindProgram& kind = *stage->kinds.begin()->second;
    LooseProgram program(kind.layout, kind.derived);
    EXPECT_EQ(program.prove(axes, groups), ShardingFaults());
    change(program);
    return program.prove(axes, groups);
  }
  /// Puts other operators in place of those of one name.
  static void replace(Program& program, std::string_view name,
                      const std::function<void(Node&)>& change) {
    std::vector<Node> nodes = program.nodes();
    for (Node& node : nodes) {
      if (node.op->name() == name) change(node);
    }
    program = program.with_nodes(std::move(nodes));
  }
};

/// Queries that miss the keys of other ranks.
TEST_F(KnownMistake, AttentionToOwnTokensAlone) {
  const auto faults = faults_of("plain", "ring2", [](LooseProgram& program) {
    replace(program.programs[0], "ring_attention", [](Node& node) {
      node.op = make_attention(dynamic_cast<const AttentionOperator&>(*node.op).spec());
    });
  });
  ASSERT_FALSE(faults.empty());
  EXPECT_THAT(faults[0], HasSubstr("queries do not see the tokens that other ranks have"));
}

/// A norm over all heads that sees a rank's own.
TEST_F(KnownMistake, NormOfOwnHeadsAlone) {
  const auto faults = faults_of("all_heads_norm", "tp2", [](LooseProgram& program) {
    replace(program.programs[0], "spread_norm", [](Node& node) {
      node.op = make_rmsnorm(1e-5);
      node.inputs.resize(2);
    });
  });
  ASSERT_FALSE(faults.empty());
  EXPECT_THAT(faults[0], HasSubstr("the whole of a dim is needed"));
}

/// Statistics that were never summed over the ranks of a micro-batch (finding 10 of the same).
TEST_F(KnownMistake, BalanceByOwnTokensAlone) {
  const auto faults = faults_of("plain", "ring2", [](LooseProgram& program) {
    const ValueId spread = program.layout.ports.at(Port::kBalanceLoss);
    ValueId own = -1;
    for (const Node& node : program.programs[0].nodes()) {
      if (node.op->name() == "router") own = node.outputs[Router::kBalanceLoss];
    }
    program.layout.ports.set(Port::kBalanceLoss, own);
    std::vector<ValueId> outputs = program.programs[0].outputs();
    std::ranges::replace(outputs, spread, own);
    program.programs[0].set_outputs(outputs);
    for (Link& link : program.links[0].grad_outputs)
      if (link.forward == spread) link.forward = own;
  });
  ASSERT_FALSE(faults.empty());
  EXPECT_THAT(faults[0], HasSubstr("'balance_loss' is spread as"));
}

/// A weight of each head that all ranks hold, whose gradient each has of its own heads (finding 11
/// of the same, and torchtitan's issue 2387 of the router).
TEST_F(KnownMistake, GradientsOfSharedWeightsTakenForWholeOnes) {
  for (const char* name : {"attn.q_norm.weight", "moe.router.weight", "attn_norm.weight"}) {
    const auto faults = faults_of("head_norm", "tp2", [&](LooseProgram& program) {
      program.layout.placements.at(name).tp_copies = 1;
    });
    ASSERT_FALSE(faults.empty()) << name;
    EXPECT_THAT(faults[0], HasSubstr(fmt::format("weight '{}' is", name)));
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, MutatedLayout, ::testing::ValuesIn(testing::proof_layouts()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
