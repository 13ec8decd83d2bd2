#include "train/verify/verify_static.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/planned_world.h"
#include "core/testing/case_share.h"
#include "runtime/cuda/cuda_backend.h"
#include "train/memory/planned_rank.h"
#include "train/testing/option_families.h"
#include "train/testing/random_layout.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

void expect_proven(const Settings& settings, int64_t num_ranks) {
  const StaticVerification found = verify_static(settings, num_ranks);
  EXPECT_TRUE(found.agrees()) << describe(found, false);
  EXPECT_GT(found.num_values(), 0);
}

/// Layouts that `verify_layout` compares by numbers, and more ranks than would run here.
TEST(VerifyStatic, ProvesRandomLayouts) {
  for (uint64_t seed = 1; seed <= testing::few_of_count<uint64_t>(210); ++seed) {
    const testing::RandomLayout layout = testing::draw_layout(seed, seed % 2 == 0 ? 8 : 64);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(layout)));
    expect_proven(layout.settings, layout.num_ranks);
  }
}

/// Their programs have other operators.
TEST(VerifyStatic, ProvesRandomLayoutsOfGpus) {
  if (!built_with_cuda()) GTEST_SKIP() << "built without CUDA";
  int num_proven = 0;
  for (uint64_t seed = 1; seed <= testing::share_of_count<uint64_t>(120); ++seed) {
    testing::RandomLayout layout = testing::draw_layout(seed, 64);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, testing::describe(layout)));
    layout.settings.run.device = DeviceChoice::kCuda;
    layout.settings.train.precision = Precision::kBF16;
    try {
      expect_proven(layout.settings, layout.num_ranks);
      ++num_proven;
    } catch (const UserError&) {  // what GPUs do not take
    }
  }
  EXPECT_GT(num_proven, testing::share_of_count(40));
}

class StaticFamily : public ::testing::TestWithParam<testing::OptionFamily> {};

/// Each family of options on one rank, and on ranks of every axis where they can run.
TEST_P(StaticFamily, IsProven) {
  Settings settings = testing::settings_of(GetParam());
  settings.run.device = DeviceChoice::kCpu;
  expect_proven(settings, 1);
  settings.train.micro_batch = 2;
  settings.train.global_batch = 32;
  settings.parallel.layout = {.tp = 2, .cp = 2, .ep = 2};
  try {
    expect_proven(settings, 8);
  } catch (const UserError&) {
    settings.parallel.layout = {};
    expect_proven(settings, 2);
  }
}

INSTANTIATE_TEST_SUITE_P(Options, StaticFamily,
                         ::testing::ValuesIn(testing::share_of_cases(testing::option_families(),
                                                                     2)),
                         [](const auto& info) { return std::string(info.param.name); });

Settings published(const std::string& preset) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  const auto found = std::ranges::find(presets(), preset, &Preset::name);
  schema.load_preset(found->name, found->toml);
  if (settings.model.vocab_size == 0) settings.model.vocab_size = 32000;
  settings.data.sequence_length = 4096;
  settings.train.micro_batch = 1;
  settings.train.global_batch = 16384;
  return settings;
}

/// Of four ranks along TP, neighbours hold the same two key-value heads but in layers with a
/// window.
TEST(VerifyStatic, DescribesLayersByTheirOwnHeads) {
  Settings settings = testing::settings_of(testing::option_families()[0]);
  settings.model.window = 9;
  settings.model.window_layers = {1};
  settings.model.window_kv_heads = 4;
  settings.parallel.layout = {.tp = 4};
  std::map<std::string, std::string> spread;
  const StaticVerification found = verify_static(settings, 4);
  for (const ProvenProgram& program : found.stages.front().programs) {
    for (const ValueId id : program.values.ids()) {
      if (program.program.value(id).name == "attn.k.weight")
        spread[program.title] = program.describe(id);
    }
  }
  EXPECT_THAT(describe(found, true), HasSubstr(spread.at("moe_layer, forward")));
  EXPECT_NE(spread.at("moe_layer, forward"), spread.at("window_moe_layer, forward"));
  EXPECT_THAT(spread.at("window_moe_layer, forward"), Not(HasSubstr("R")));
  EXPECT_THAT(spread.at("moe_layer, forward"), HasSubstr("R"));
}

/// 671 billion parameters on 2048 ranks, folded as the published runs are.
TEST(VerifyStatic, ProvesDeepSeekV3) {
  Settings settings = published("deepseek-v3");
  settings.model.mtp_layers = 1;
  for (const LayoutSpec& layout :
       {LayoutSpec{.ep = 64, .pp = 16}, LayoutSpec{.tp = 2, .ep = 64, .pp = 8},
        LayoutSpec{.tp = 8, .cp = 2, .etp = 2, .ep = 32, .pp = 4}}) {
    settings.parallel.layout = layout;
    settings.model.mtp_normed = !settings.model.mtp_normed;
    expect_proven(settings, 2048);
  }
}

/// Every way to sum a gradient over other ranks than those that have parts of it is found.
TEST(ProveReductions, FindsGroupsOfOtherRanks) {
  Settings settings = testing::settings_of(testing::option_families()[0]);
  settings.model.tie_embeddings = true;
  settings.train.micro_batch = 2;
  settings.train.global_batch = 64;
  settings.parallel.layout = {.tp = 2, .cp = 2, .ep = 2, .pp = 2};
  const int64_t num_ranks = 16;
  const Layout layout(settings.parallel.layout, num_ranks);
  int num_mutants = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const PlannedRank planned = plan_rank(settings, rank, num_ranks);
    const StageProof proof = prove_rank(settings, planned.layout, planned.model.programs());
    ASSERT_EQ(proof.faults, ShardingFaults());
    const StageGroups& groups = planned.layout.part.groups;
    const auto replicas = list_replica_ranks(settings, layout, rank);
    const auto expect_found = [&](const auto& mutant, const std::string& what) {
      ++num_mutants;
      ShardingFaults faults;
      prove_reductions(mutant, proof.weights, layout, rank, groups, faults);
      EXPECT_FALSE(faults.empty()) << what;
    };
    for (size_t i = 0; i < replicas.size(); ++i) {
      const auto is_used = [&](const SummedWeight& weight) {
        return weight.expert == replicas[i].placement.expert &&
               (weight.expert || weight.tp_copies == replicas[i].placement.tp_copies);
      };
      if (std::ranges::none_of(proof.weights, is_used) || replicas[i].num_stages > 1) continue;
      for (const int64_t other : layout.group(rank, Axis::kPp)) {
        if (other == rank) continue;
        auto mutant = replicas;
        mutant[i].ranks = {other};
        expect_found(mutant, replicas[i].name + " of another stage");
      }
      for (size_t k = 0; k < replicas[i].ranks.size(); ++k) {
        auto mutant = replicas;
        mutant[i].ranks.erase(mutant[i].ranks.begin() + static_cast<std::ptrdiff_t>(k));
        expect_found(mutant, replicas[i].name + " without one");
      }
      for (int64_t other = 0; other < num_ranks; ++other) {
        const bool same_stage =
            layout.coordinate(other, Axis::kPp) == layout.coordinate(rank, Axis::kPp);
        if (!same_stage || std::ranges::count(replicas[i].ranks, other) > 0) continue;
        auto mutant = replicas;
        mutant[i].ranks.push_back(other);
        expect_found(mutant, replicas[i].name + " with one more");
      }
      auto mutant = replicas;
      mutant.erase(mutant.begin() + static_cast<std::ptrdiff_t>(i));
      expect_found(mutant, replicas[i].name + " left out");
    }
  }
  EXPECT_GT(num_mutants, 100);
}

/// Groups that have the ranks of another axis.
TEST(ProveGroups, FindsOtherRanks) {
  const ParallelSpec parallel{.layout = {.tp = 2, .cp = 2, .ep = 4}};
  const Layout layout(parallel.layout, 16);
  const auto world = make_planned_world(5, 16);
  StageGroups groups = join_stage_groups(*world, layout, parallel);
  ShardingFaults faults;
  prove_groups(groups, layout, 5, RankAxes(groups, 8), faults);
  EXPECT_EQ(faults, ShardingFaults());
  groups.tp = world->make_group("tp", layout.group(5, Axis::kCp));
  prove_groups(groups, layout, 5, RankAxes(groups, 8), faults);
  ASSERT_FALSE(faults.empty());
  EXPECT_THAT(faults[0], HasSubstr("group 'tp' of rank 5 has ranks 5, 7, expected 4, 5"));
}

TEST(RequireProof, SaysAllFaults) {
  EXPECT_NO_THROW(require_proof({}));
  StageProof proof;
  proof.faults = {"one fault", "another"};
  EXPECT_THROW(require_proof(proof), InternalError);
}

}  // namespace
}  // namespace tessera
