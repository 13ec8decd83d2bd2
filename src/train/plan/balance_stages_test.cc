#include "train/plan/balance_stages.h"

#include <gtest/gtest.h>

#include <limits>

#include "core/random.h"
#include "parallel/options.h"
#include "train/plan/plan_testing.h"

namespace tessera {
namespace {

using testing::settings_to_plan;
using testing::small_machine;

std::string cut(const ModelTimes& times, int64_t stages, int64_t chunks = 1, int64_t mtp = 0) {
  return write_pipeline_layout(
      balance_stages(times, stages, chunks, {.decoder = std::ssize(times.layers), .mtp = mtp}));
}

TEST(BalanceStages, GivesALongHeadFewerLayers) {
  const auto of = [](int64_t layers, double first, double last) {
    return ModelTimes{std::vector<double>(layers, 1.0), first, last};
  };
  EXPECT_EQ(cut(of(8, 0, 0), 4), "Et*2|t*2|t*2|t*2L");
  EXPECT_EQ(cut(of(14, 0, 2), 4), "Et*4|t*4|t*4|t*2L");
  EXPECT_EQ(cut(of(9, 0, 3), 4), "Et*3|t*3|t*3|L");
  EXPECT_EQ(cut(of(6, 2, 0), 4), "Et|t|t*2|t*2L") << "the longest is 3 however they are cut";
  EXPECT_EQ(cut(of(9, 0, 3), 2, 2), "Et*3|t*3|t*3|L");
  EXPECT_EQ(cut(of(6, 0, 3), 3, 1, 1), "Et*3|t*3|mL");
  EXPECT_EQ(cut({{4, 1, 1, 1, 1, 4}, 0, 0}, 3), "Et|t*4|tL") << "layers that are unequal";
}

/// The longest chunk of all ways to cut.
double least_of_all(const ModelTimes& times, int64_t chunks, int64_t first = 0,
                    int64_t number = 0) {
  const int64_t layers = std::ssize(times.layers);
  PipelineChunk chunk{.embedding = number == 0, .first_layer = first, .loss = number == chunks - 1};
  if (chunk.loss) {
    chunk.num_layers = layers - first;
    return times.of(chunk);
  }
  double least = std::numeric_limits<double>::infinity();
  for (chunk.num_layers = 1; first + chunk.num_layers <= layers; ++chunk.num_layers)
    least = std::min(least,
                     std::max(times.of(chunk),
                              least_of_all(times, chunks, first + chunk.num_layers, number + 1)));
  return least;
}

TEST(BalanceStages, IsAsShortAsTheBestOfAllCuts) {
  Random random(3, 1);
  for (int i = 0; i < 200; ++i) {
    ModelTimes times{.first = random.next_uniform(), .last = 3 * random.next_uniform()};
    const auto layers = static_cast<int64_t>(1 + random.next_below(9));
    for (int64_t l = 0; l < layers; ++l) times.layers.push_back(0.1 + random.next_uniform());
    const auto stages = static_cast<int64_t>(1 + random.next_below(static_cast<uint64_t>(layers)));
    const LayerCounts counts{.decoder = layers};
    const PipelineLayout found = balance_stages(times, stages, 1, counts);
    EXPECT_EQ(parse_pipeline_layout(write_pipeline_layout(found), stages, counts).chunks,
              found.chunks);
    EXPECT_NEAR(busiest_stage(times, found), least_of_all(times, stages), 1e-12);
  }
}

/// Times of a model whose first layer is dense come from stages that have layers of both kinds.
TEST(BalanceStages, TimesAreOfWhatIsCut) {
  const Settings settings = settings_to_plan(
      {"--parallel.pp=4", "--moe.first_dense_layers=1", "--model.vocab_size=30000"});
  const StepWork work(small_machine());
  const auto times_of = [&](const std::vector<int64_t>& ranks) {
    StageSimulation stages(settings, 4, ranks);
    const SimulatedPlans plans = stages.run_plans(work, 1);
    std::vector<RankTimes> all;
    for (size_t i = 0; i < ranks.size(); ++i)
      all.push_back({plans.plans[i], plans.works[i], stages.chunks(i)});
    return sum_times(settings.model, all);
  };
  const ModelTimes whole = times_of({0, 1, 2, 3});
  const ModelTimes some = times_of({0, 3});
  ASSERT_EQ(whole.layers.size(), 8);
  EXPECT_NE(whole.layers[0], whole.layers[1]);
  EXPECT_GT(whole.first, 0);
  EXPECT_GT(whole.last, whole.layers[7]);
  EXPECT_EQ(some.last, whole.last);
  for (size_t l = 0; l < 8; ++l)
    EXPECT_NEAR(some.layers[l], whole.layers[l], 1e-9 * whole.layers[l]) << l;
}

}  // namespace
}  // namespace tessera
