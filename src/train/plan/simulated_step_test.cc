#include "train/plan/simulated_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "train/plan/plan_testing.h"
#include "train/plan/plan_trace.h"

namespace tessera {
namespace {

using testing::settings_to_plan;
using testing::small_machine;

SimulatedStep simulate(const Settings& settings, int64_t num_ranks, double skew = 1) {
  const StepWork work(small_machine(), {.skew = skew});
  return simulate_step(settings, num_ranks, work, flops_of(settings));
}

/// All micro-batches by the clock.
double run_all(const Settings& settings, int64_t num_ranks) {
  const StepWork work(small_machine());
  const SimulatedPlans plans =
      simulate_plans(settings, num_ranks, work, settings.train.num_micro_batches());
  double end = 0;
  for (const RankClock& clock : plans.clocks) end = std::max(end, clock.end);
  return end;
}

struct LayoutCase {
  std::vector<std::string> overrides;
  int64_t num_ranks = 1;
};

std::vector<LayoutCase> layout_cases() {
  return {{{}, 1},
          {{"--parallel.ep=4"}, 4},
          {{"--parallel.pp=2"}, 2},
          {{"--parallel.pp=4", "--parallel.ep=2"}, 8},
          {{"--parallel.pp=2", "--parallel.pipeline_schedule=gpipe"}, 4},
          {{"--parallel.pp=2", "--parallel.pipeline_schedule=interleaved",
            "--parallel.pipeline_chunks=2"},
           2},
          {{"--parallel.ep=4", "--train.schedule=merged"}, 4},
          {{"--parallel.pp=4", "--parallel.ep=2", "--train.schedule=merged"}, 8},
          {{"--parallel.tp=2", "--parallel.ep=2", "--optim.shard=full"}, 4}};
}

TEST(SimulatedStep, OfManyMicroBatchesIsThatOfAll) {
  for (const LayoutCase& one : layout_cases()) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(one.overrides, " ")));
    const Settings settings = settings_to_plan(one.overrides);
    const double whole = run_all(settings, one.num_ranks);
    EXPECT_NEAR(simulate(settings, one.num_ranks).seconds, whole, 1e-6 * whole);
  }
}

TEST(SimulatedStep, HasSharesThatComeToIt) {
  for (const LayoutCase& one : layout_cases()) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(one.overrides, " ")));
    const Settings settings = settings_to_plan(one.overrides);
    const SimulatedStep step = simulate(settings, one.num_ranks);
    EXPECT_EQ(std::ssize(step.stages), settings.parallel.layout.pp);
    EXPECT_EQ(step.tokens, 64 * 64);
    for (const SimulatedStage& stage : step.stages) {
      EXPECT_NEAR(stage.shares.total(), step.seconds, 0.02 * step.seconds);
      EXPECT_GT(stage.shares.computed, 0);
      EXPECT_GE(stage.shares.exposed, 0);
      EXPECT_GE(stage.shares.idle, -1e-12);
    }
    const StepShares& first = step.stages[0].shares;
    EXPECT_EQ(first.exposed > 0, one.num_ranks > 1);
    EXPECT_EQ(first.exposed_by.contains("ep"), settings.parallel.layout.ep > 1);
  }
}

/// The last stage has a large head and few layers: others take longer with two or three
/// micro-batches, for their gradients and state, and it takes longer with all.
TEST(SimulatedStep, StagesByThemselvesTakeWhatTheyCompute) {
  constexpr int64_t kRanks = 64;
  const Settings settings = settings_to_plan(
      {"--model.preset=gpt-oss-120b", "--model.vocab_size=201088", "--model.num_layers=36",
       "--moe.num_experts=128", "--run.device=cuda", "--train.precision=bf16",
       "--data.sequence_length=4096", "--train.global_batch=1280", "--parallel.pp=8",
       "--parallel.ep=4", "--train.memory_limit=none"});
  const StepWork work(load_hardware("h100-ib"));
  const std::vector<int64_t> ranks = first_ranks(settings, kRanks);
  StageSimulation some(settings, kRanks, {ranks[0], ranks[1], ranks.back()});
  const SimulatedStep alone = some.run_alone(work, 1);
  for (const SimulatedStage& stage : alone.stages)
    EXPECT_LE(stage.shares.computed, alone.seconds * (1 + 1e-9)) << stage.rank;
  const double whole = simulate_step(settings, kRanks, work, 1).seconds;
  EXPECT_GT(alone.seconds, 0.85 * whole);
}

TEST(SimulatedStep, PredictsTheMemoryThatInspectShows) {
  for (const LayoutCase& one : layout_cases()) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(one.overrides, " ")));
    const Settings settings = settings_to_plan(one.overrides);
    for (const SimulatedStage& stage : simulate(settings, one.num_ranks).stages) {
      EXPECT_EQ(stage.memory.total(),
                predict_memory(settings, plan_rank(settings, stage.rank, one.num_ranks)).total());
    }
  }
}

TEST(SimulatedStep, IsSlowerWhereRoutingIsSkewed) {
  const Settings settings = settings_to_plan({"--parallel.ep=4"});
  const double balanced = simulate(settings, 4).seconds;
  const double skewed = simulate(settings, 4, 2).seconds;
  EXPECT_GT(skewed, balanced);
  EXPECT_LT(skewed, 2 * balanced);
}

/// Of passes that are merged one computes while the other's tokens travel.
TEST(SimulatedStep, MergedPassesHideExchanges) {
  for (const char* layout : {"--parallel.pp=1", "--parallel.pp=2"}) {
    const SimulatedStep apart = simulate(settings_to_plan({"--parallel.ep=4", layout}), 8);
    const SimulatedStep merged =
        simulate(settings_to_plan({"--parallel.ep=4", layout, "--train.schedule=merged"}), 8);
    const double before = apart.stages[0].shares.exposed_by.at("ep");
    const double after = merged.stages[0].shares.exposed_by.at("ep");
    EXPECT_LT(after, before / 2) << layout;
    EXPECT_LT(merged.seconds, apart.seconds - (before - after) / 2) << layout;
    EXPECT_GT(merged.fullest().memory.total(), apart.fullest().memory.total()) << layout;
  }
}

/// Any rank of a stage slows all of it; others wait.
SimulatedStep simulate_as(const Settings& settings, int64_t num_ranks, const Software& software) {
  const StepWork work(small_machine(), {.software = software});
  return simulate_step(settings, num_ranks, work, flops_of(settings));
}

/// What the host takes for operators is of the device's time only where it takes longer.
TEST(SimulatedStep, IsNoFasterThanItsHost) {
  const Settings settings = settings_to_plan({"--parallel.ep=4"});
  const SimulatedStep plain = simulate(settings, 4);
  EXPECT_EQ(plain.slowest().shares.host, 0);
  double last = plain.seconds;
  for (const double launch : {1.0, 1e3, 1e4}) {
    const SimulatedStep step =
        simulate_as(settings, 4, {.graphs = LaunchGraphs::kNone, .launch_microseconds = launch});
    EXPECT_GT(step.seconds, last) << launch;
    EXPECT_NEAR(step.slowest().shares.total(), step.seconds, 0.02 * step.seconds) << launch;
    last = step.seconds;
  }
  const Software bound{.graphs = LaunchGraphs::kNone, .launch_microseconds = 1e4};
  EXPECT_GT(simulate_as(settings, 4, bound).slowest().shares.host, 0.5 * last);
  Software graphed = bound;
  graphed.graphs = LaunchGraphs::kStatic;
  const double partly = simulate_as(settings, 4, graphed).seconds;
  EXPECT_LT(partly, 0.7 * last);
  EXPECT_GT(partly, plain.seconds);
  graphed.graphs = LaunchGraphs::kAll;
  EXPECT_EQ(simulate_as(settings, 4, graphed).seconds, plain.seconds);
}

TEST(SimulatedStep, TellsComputationByOperator) {
  for (const LayoutCase& one : layout_cases()) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(one.overrides, " ")));
    const StepShares shares =
        simulate(settings_to_plan(one.overrides), one.num_ranks).slowest().shares;
    double sum = 0;
    for (const auto& [name, seconds] : shares.computed_by) sum += seconds;
    EXPECT_LE(sum, shares.computed);
    EXPECT_GT(sum, 0.8 * shares.computed);
    EXPECT_GT(shares.computed_by.at("grouped_matmul"), 0);
  }
}

TEST(SimulatedStep, PipelinedExchangesAreHiddenUnderTheirProducts) {
  const Settings settings = settings_to_plan({"--parallel.tp=4"});
  const SimulatedStep apart = simulate(settings, 4);
  const SimulatedStep pieces = simulate_as(settings, 4, {.pipelined = {"tp"}});
  EXPECT_LT(pieces.slowest().shares.exposed_by.at("tp"),
            apart.slowest().shares.exposed_by.at("tp"));
  EXPECT_LT(pieces.seconds, apart.seconds);
}

TEST(SimulatedStep, StoredScoresTakeTime) {
  const Settings settings = settings_to_plan({});
  EXPECT_GT(simulate_as(settings, 1, {.stores_scores = true}).seconds,
            simulate(settings, 1).seconds);
}

TEST(SimulatedStep, IsSlowerWithSlowRanks) {
  const Settings settings = settings_to_plan({"--parallel.pp=2", "--parallel.ep=2"});
  const auto simulate_with = [&](const std::map<int64_t, Slowdown>& slow) {
    return simulate_step(settings, 4, StepWork(small_machine(), {.slow_ranks = slow}), 0);
  };
  const Layout layout(settings.parallel.layout, 4);
  std::vector<int64_t> last_stage;
  for (int64_t rank = 0; rank < 4; ++rank) {
    if (layout.coordinate(rank, Axis::kPp) == 1) last_stage.push_back(rank);
  }
  const SimulatedStep even = simulate_with({});
  const SimulatedStep slow = simulate_with({{last_stage[1], {.computing = 2}}});
  EXPECT_GT(slow.seconds, 1.5 * even.seconds);
  EXPECT_LT(slow.seconds, 2 * even.seconds);
  EXPECT_EQ(slow.slowest().rank, last_stage[0]);
  EXPECT_NEAR(slow.stages[1].shares.computed, 2 * even.stages[1].shares.computed,
              2e-2 * even.seconds);
  EXPECT_NEAR(slow.stages[0].shares.computed, even.stages[0].shares.computed, 1e-2 * even.seconds);
  EXPECT_GT(slow.stages[0].shares.idle, even.stages[0].shares.idle + 0.3 * even.seconds);
  const SimulatedStep links = simulate_with({{0, {.links = 3}}});
  EXPECT_GT(links.stages[0].shares.exposed, 2 * even.stages[0].shares.exposed);
  EXPECT_EQ(simulate_with({{0, {}}}).seconds, even.seconds);
}

TEST(SimulatedStep, RecomputationTakesTime) {
  const Settings settings = settings_to_plan({});
  const Settings lean = settings_to_plan({"--train.recompute=all"});
  const SimulatedStep kept = simulate(settings, 1);
  const SimulatedStep recomputed = simulate(lean, 1);
  EXPECT_EQ(kept.flops, recomputed.flops) << "the model's";
  EXPECT_GT(recomputed.seconds, 1.1 * kept.seconds);
  EXPECT_LT(recomputed.seconds, 1.5 * kept.seconds);
  EXPECT_LT(recomputed.fullest().memory.total(), kept.fullest().memory.total());
}

/// Steps wait for what the host updates behind the passes, at the rate of its memory, which ranks
/// of a node share.
TEST(SimulatedStep, WaitsForUpdatesOnTheHost) {
  const Settings settings = settings_to_plan(
      {"--optim.offload=true", "--optim.update=host", "--optim.bucket_bytes=100000"});
  Hardware machine = small_machine();
  machine.on_host = false;
  const auto simulated = [&](double gbs, int64_t num_ranks) {
    machine.host_update_gbs = gbs;
    return simulate_step(settings, num_ranks, StepWork(machine), flops_of(settings));
  };
  const auto update_bytes = [&](int64_t num_ranks) {
    double bytes = 0;
    const PlannedRank planned = plan_rank(settings, 0, num_ranks);
    for (const Task& task : plan_step(settings, planned).tasks)
      bytes += task.action == TaskAction::kUpdate ? static_cast<double>(task.bytes) : 0;
    return bytes;
  };
  const double fast = simulated(1e4, 1).seconds;
  EXPECT_LT(fast, simulated(1, 1).seconds);
  for (const int64_t num_ranks : {1, 2}) {
    const SimulatedStep slow = simulated(0.02, num_ranks);
    const SimulatedStep slower = simulated(0.01, num_ranks);
    const double expected = update_bytes(num_ranks) * static_cast<double>(num_ranks) / 0.02e9;
    EXPECT_NEAR(slower.seconds - slow.seconds, expected, 0.02 * expected);
    const StepShares& shares = slow.stages[0].shares;
    EXPECT_NEAR(shares.total(), slow.seconds, 0.02 * slow.seconds);
  }
}

/// Tasks of a lane follow each other, and a stage never has less than nothing alive.
TEST(PlanTrace, HasTasksInOrderAndMemory) {
  const Settings settings = settings_to_plan({"--parallel.pp=2", "--parallel.ep=2"});
  const StepWork work(small_machine());
  const SimulatedPlans plans = simulate_plans(settings, 4, work, 4);
  const auto trace = nlohmann::json::parse(make_plan_trace(plans));
  std::map<std::pair<int, int>, double> ends;
  std::map<int, int64_t> most;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "X") {
      double& end = ends[{event["pid"], event["tid"]}];
      EXPECT_GE(event["ts"].get<double>(), end - 1e-3) << event["name"];
      end = event["ts"].get<double>() + event["dur"].get<double>();
    } else if (event["ph"] == "C") {
      EXPECT_GE(event["args"]["bytes"].get<int64_t>(), 0);
      most[event["pid"]] = std::max(most[event["pid"]], event["args"]["bytes"].get<int64_t>());
    }
  }
  EXPECT_EQ(most.size(), 2);
  for (const auto& [stage, bytes] : most) EXPECT_GT(bytes, 0);
  EXPECT_GE(ends.size(), 4) << "two stages that compute and exchange";
}

}  // namespace
}  // namespace tessera
