#include "train/plan/search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "train/plan/plan_testing.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::settings_to_plan;
using testing::small_machine;
using ::testing::ThrowsMessage;

SearchSpace space_of(const Settings& settings, int64_t num_ranks, std::set<std::string> fixed) {
  return {.base = settings, .num_ranks = num_ranks, .node_devices = 4, .fixed = std::move(fixed)};
}

PlanResult search(const SearchSpace& space, const Hardware& hardware = small_machine()) {
  return search_plan(space, StepWork(hardware));
}

std::vector<std::string> describe(const PlanResult& result) {
  std::vector<std::string> lines;
  for (const PlannedLayout& layout : result.layouts) {
    lines.push_back(fmt::format("{} {} {:.17g}", describe_candidate(layout.settings),
                                fmt::join(list_overrides(layout.settings), " "),
                                layout.step.seconds));
  }
  return lines;
}

TEST(SearchPlan, FindsTheSameEachTime) {
  const SearchSpace space = space_of(settings_to_plan({}), 8, {});
  const PlanResult result = search(space);
  EXPECT_EQ(describe(result), describe(search(space)));
  EXPECT_GT(result.num_judged, 20);
  ASSERT_GT(result.layouts.size(), 3);
  for (size_t i = 1; i < result.layouts.size(); ++i)
    EXPECT_GE(result.layouts[i].step.seconds, result.layouts[i - 1].step.seconds);
}

/// A large head makes the last of equal stages the busiest.
TEST(SearchPlan, CutsStagesByTime) {
  const Settings settings = settings_to_plan(
      {"--model.vocab_size=30000", "--parallel.tp=1", "--parallel.cp=1", "--parallel.pp=4"});
  const std::set<std::string> fixed = {"parallel.tp", "parallel.cp",       "parallel.pp",
                                       "parallel.ep", "train.micro_batch", "optim.shard"};
  const PlannedLayout best = search(space_of(settings, 4, fixed)).layouts.at(0);
  const PipelineLayout cut = parse_pipeline_layout(best.settings.parallel.pipeline_layout, 4,
                                                   settings.model.layer_counts());
  EXPECT_LT(cut.chunks.back().num_layers, 2);
  EXPECT_THAT(describe_candidate(best.settings), HasSubstr("stages by time"));
  EXPECT_THAT(list_overrides(best.settings), ::testing::Contains(HasSubstr("pipeline_layout=E")));
  auto even_fixed = fixed;
  even_fixed.insert("parallel.pipeline_layout");
  const PlannedLayout even = search(space_of(settings, 4, even_fixed)).layouts.at(0);
  EXPECT_EQ(even.settings.parallel.pipeline_layout, "");
  EXPECT_LT(best.step.seconds, 0.95 * even.step.seconds);
}

TEST(SearchPlan, IsNoSlowerThanLayoutsByHand) {
  const SearchSpace space = space_of(settings_to_plan({}), 8, {});
  const double best = search(space).layouts.at(0).step.seconds;
  const StepWork work(small_machine());
  for (const std::vector<std::string>& by_hand :
       std::vector<std::vector<std::string>>{{},
                                             {"--parallel.ep=8"},
                                             {"--parallel.pp=2", "--parallel.ep=4"},
                                             {"--parallel.tp=2", "--parallel.ep=2"},
                                             {"--parallel.pp=4"},
                                             {"--optim.shard=full", "--train.micro_batch=2"}}) {
    const Settings settings = settings_to_plan(by_hand);
    EXPECT_LE(best, simulate_step(settings, 8, work, flops_of(settings)).seconds * 1.0001)
        << fmt::format("{}", fmt::join(by_hand, " "));
  }
}

/// The first and the last of eight stages have one of twelve layers, others two: by these alone
/// every layout of eight stages would look nearly twice as fast as it is.
TEST(SearchPlan, JudgesStagesOfDifferentSizesByTheLargest) {
  const std::vector<std::string> options = {"--train.global_batch=512", "--model.num_layers=12",
                                            "--model.hidden_size=256", "--model.inner_size=1024"};
  Hardware hardware = small_machine();
  hardware.node = hardware.network = {.microseconds = 0, .gbs = 1000};
  const PlanResult result = search(space_of(settings_to_plan(options), 64, {}), hardware);
  const double best = result.layouts.at(0).step.seconds;
  for (const char* stages : {"--parallel.pp=1", "--parallel.pp=2", "--parallel.pp=4"}) {
    std::vector<std::string> by_hand = options;
    by_hand.insert(by_hand.end(), {"--train.micro_batch=1", stages});
    const Settings settings = settings_to_plan(by_hand);
    EXPECT_LE(best, simulate_step(settings, 64, StepWork(hardware), flops_of(settings)).seconds)
        << stages << " and not " << describe_candidate(result.layouts.at(0).settings);
  }
}

TEST(SearchPlan, TriesAChunkForEachLayerOfAStage) {
  const auto chunks_of = [](int64_t layers, std::set<std::string> fixed = {}) {
    Settings settings = settings_to_plan({"--parallel.pp=2"});
    settings.model.num_layers = layers;
    std::set<int64_t> chunks;
    for (const Settings& one : list_variants(space_of(settings, 8, std::move(fixed)), settings))
      chunks.insert(one.parallel.chunks_per_stage);
    return chunks;
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(chunks_of(14), ElementsAre(1, 2, 4, 7));
  EXPECT_THAT(chunks_of(12), ElementsAre(1, 2, 3, 4, 6));
  EXPECT_THAT(chunks_of(13), ElementsAre(1, 2, 4)) << "uneven stages";
  EXPECT_THAT(chunks_of(22), ElementsAre(1, 2, 4, 8)) << "no more than eight";
  EXPECT_THAT(chunks_of(14, {"parallel.pipeline_chunks"}), ElementsAre(1));
}

TEST(SearchPlan, TriesOtherDispatchersWhereTokensTravel) {
  const auto others = [](const std::vector<std::string>& options,
                         std::set<std::string> fixed = {}) {
    std::vector<std::string> found;
    const Settings settings = settings_to_plan(options);
    for (const Settings& other :
         other_dispatchers(space_of(settings, 8, std::move(fixed)), settings))
      found.push_back(fmt::format("{} {}", dispatcher_name(kind_of(other.parallel.dispatcher)),
                                  other.parallel.dispatch_inner));
    return found;
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(others({}), ElementsAre());
  EXPECT_THAT(others({"--parallel.ep=4"}), ElementsAre("deduplicated 1")) << "all in one node";
  EXPECT_THAT(others({"--parallel.ep=8"}), ElementsAre("deduplicated 1", "hierarchical 4"));
  EXPECT_THAT(others({"--parallel.ep=2", "--parallel.expert_order=edp-etp-ep-pp"}),
              ElementsAre("deduplicated 1"))
      << "one rank of each node";
  EXPECT_THAT(others({"--parallel.ep=8"}, {"parallel.dispatcher"}), ElementsAre());
}

TEST(SearchPlan, LeavesFixedKeysAsTheyAre) {
  const Settings settings =
      settings_to_plan({"--parallel.pp=2", "--train.micro_batch=2", "--parallel.ep=4"});
  const PlanResult result =
      search(space_of(settings, 8, {"parallel.pp", "train.micro_batch", "parallel.ep"}));
  ASSERT_FALSE(result.layouts.empty());
  for (const PlannedLayout& layout : result.layouts) {
    EXPECT_EQ(layout.settings.parallel.layout.pp, 2);
    EXPECT_EQ(layout.settings.parallel.layout.ep, 4);
    EXPECT_EQ(layout.settings.train.micro_batch, 2);
  }
}

TEST(SearchPlan, MergesPassesWhereExchangesTakeTime) {
  Hardware hardware = small_machine();
  hardware.node.gbs = 0.5;
  const SearchSpace space =
      space_of(settings_to_plan({"--parallel.ep=8"}), 8,
               {"parallel.ep", "parallel.tp", "parallel.pp", "optim.shard", "train.micro_batch"});
  const PlannedLayout best = search(space, hardware).layouts.at(0);
  EXPECT_EQ(best.settings.train.schedule, "merged");
  EXPECT_THAT(describe_candidate(best.settings), HasSubstr("merged"));
  EXPECT_THAT(list_overrides(best.settings), ::testing::Contains("--train.schedule=merged"));
  SearchSpace fixed = space;
  fixed.fixed.insert("train.schedule");
  for (const PlannedLayout& layout : search(fixed, hardware).layouts)
    EXPECT_EQ(layout.settings.train.schedule, kAsBuilt);
}

TEST(SearchPlan, ComputesAgainWhatDoesNotFit) {
  const Settings settings = settings_to_plan({"--train.micro_batch=8"});
  const SearchSpace roomy =
      space_of(settings, 1, {"train.micro_batch", "train.offload", "optim.shard"});
  SearchSpace space = space_of(settings, 1, {"train.micro_batch", "optim.shard"});
  const int64_t all = search(roomy).layouts.at(0).step.fullest().memory.total();
  space.base.train.memory_limit = fmt::format("{}B", all * 3 / 4);
  const PlanResult result = search(space);
  ASSERT_EQ(result.layouts.size(), 1);
  EXPECT_FALSE(result.layouts[0].settings.train.recompute.empty());
  EXPECT_LE(result.layouts[0].step.fullest().memory.total(), all * 3 / 4);
}

TEST(SearchPlan, SaysWhatIsLeastWhereNothingFits) {
  SearchSpace space = space_of(settings_to_plan({}), 2, {"train.offload", "optim.shard"});
  space.base.train.memory_limit = "1MiB";
  const PlanResult result = search(space);
  EXPECT_TRUE(result.layouts.empty());
  ASSERT_TRUE(result.least.has_value());
  EXPECT_GT(result.least->step.fullest().memory.total(), 1 << 20);
}

/// In each part of the search the next pause is soon, and ends it.
TEST(SearchPlan, EndsWhereAPauseThrows) {
  const SearchSpace space = space_of(settings_to_plan({}), 8, {});
  const StepWork work(small_machine());
  int all = 0;
  search_plan(space, work, {}, [&] { ++all; });
  ASSERT_GE(all, 6);
  for (const int last : {1, all / 2, all}) {
    int pauses = 0;
    bool ended = false;
    const auto pause = [&] {
      if (++pauses >= last) throw std::runtime_error("enough");
    };
    try {
      search_plan(space, work, {}, pause);
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "enough");
      ended = true;
    }
    EXPECT_EQ(ended, pauses == last);  // how many there are is a matter of threads
    EXPECT_LE(pauses, last);
    EXPECT_TRUE(ended || last > 1);
  }
}

TEST(SearchPlan, RefusesWhatNoLayoutCanTrain) {
  const Settings settings = settings_to_plan({"--train.global_batch=1"});
  EXPECT_THAT(
      [&] {
        search(space_of(settings, 7, {"parallel.pp", "parallel.tp"}));
      },
      ThrowsMessage<UserError>(
          AllOf(HasSubstr("no layout of 7 ranks"), HasSubstr("global batch of 1"))));
}

TEST(ListLayouts, AreThoseThatDivideTheRanks) {
  const std::vector<Settings> layouts = list_layouts(space_of(settings_to_plan({}), 8, {}));
  EXPECT_GT(layouts.size(), 20);
  for (const Settings& one : layouts) {
    const LayoutSpec& layout = one.parallel.layout;
    EXPECT_EQ(8 % (layout.tp * layout.cp * layout.pp), 0);
    EXPECT_LE(layout.tp, 4) << "a node";
    EXPECT_EQ(one.train.micro_batch, 1);
  }
  for (const Settings& layout : layouts) {
    for (const Settings& variant : list_variants(space_of(settings_to_plan({}), 8, {}), layout)) {
      EXPECT_EQ(variant.parallel.layout.ep, layout.parallel.layout.ep);
      EXPECT_NE(describe_candidate(variant), describe_candidate(layout));
    }
  }
}

}  // namespace
}  // namespace tessera
