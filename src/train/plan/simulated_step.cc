#include "train/plan/simulated_step.h"

#include <algorithm>

#include "train/setup/device_choice.h"

namespace tessera {
namespace {

/// A settings' micro-batches in a step of one data-parallel rank, and how many of them to run.
struct MicroBatches {
  int64_t all = 1;
  int64_t fewer = 1;
  int64_t more = 1;  ///< `fewer` where all are run

  /// What comes to `fewer` and `more` comes to so much with all.
  double extend(double with_fewer, double with_more) const {
    if (fewer == more) return with_fewer;
    const double slope = (with_more - with_fewer) / static_cast<double>(more - fewer);
    return with_more + static_cast<double>(all - more) * slope;
  }
};

/// A pipeline is full after as many micro-batches as it has stages; interleaved ones take them in
/// multiples of that.
MicroBatches split_micro_batches(const Settings& settings, int64_t num_ranks) {
  const Layout layout(settings.parallel.layout, num_ranks);
  const int64_t stages = layout.degree(Axis::kPp);
  const int64_t all = settings.train.num_micro_batches() / layout.degree(Axis::kDp);
  const int64_t fewer = 2 * stages + all % stages;
  if (all <= fewer + stages) return {all, all, all};
  return {all, fewer, fewer + stages};
}

Settings with_micro_batches(const Settings& settings, int64_t num_ranks, int64_t count) {
  Settings copy = settings;
  const int64_t data_ranks = Layout(settings.parallel.layout, num_ranks).degree(Axis::kDp);
  copy.train.global_batch = count * data_ranks * settings.train.micro_batch;
  return copy;
}

double sum(const std::map<std::string, double>& parts) {
  double all = 0;
  for (const auto& [name, seconds] : parts) all += seconds;
  return all;
}

/// What of a rank's step is left over is idle time behind its last task, while others end.
StepShares shares_of(const RankClock& clock, double end) {
  return {.computed = clock.computed,
          .exposed = sum(clock.waited_for_wires),
          .idle = sum(clock.waited_for_ranks) + (end - clock.end),
          .copies = clock.waited_for_copies,
          .exchanged = sum(clock.exchanged),
          .exposed_by = clock.waited_for_wires};
}

StepShares extend(const MicroBatches& batches, const StepShares& fewer, const StepShares& more) {
  StepShares all = more;
  for (double StepShares::*part : {&StepShares::computed, &StepShares::exposed, &StepShares::idle,
                                   &StepShares::copies, &StepShares::exchanged})
    all.*part = batches.extend(fewer.*part, more.*part);
  for (auto& [name, seconds] : all.exposed_by) {
    const auto before = fewer.exposed_by.find(name);
    seconds = batches.extend(before == fewer.exposed_by.end() ? 0 : before->second, seconds);
  }
  return all;
}

/// A step of some stages.
struct StagesRun {
  SimulatedPlans plans;
  std::vector<MemoryPrediction> memory;
  double end = 0;
};

StagesRun run_stages(const Settings& settings, int64_t num_ranks, const StepWork& work,
                     const std::vector<int64_t>& ranks) {
  StagesRun result;
  std::vector<PlanWork> works;
  for (const int64_t rank : ranks) {
    const PlannedRank planned = plan_rank(settings, rank, num_ranks);
    result.plans.plans.push_back(plan_step(settings, planned));
    works.push_back(work.find(result.plans.plans.back(), planned.model.programs()));
    result.memory.push_back(predict_memory(settings, planned));
  }
  result.plans.clocks = run_clocks(result.plans.plans, works, work.clock_options());
  for (const RankClock& clock : result.plans.clocks) result.end = std::max(result.end, clock.end);
  return result;
}

}  // namespace

const SimulatedStage& SimulatedStep::fullest() const {
  return *std::ranges::max_element(
      stages, {}, [](const SimulatedStage& stage) { return stage.memory.total(); });
}

const SimulatedStage& SimulatedStep::slowest() const {
  return *std::ranges::min_element(stages, {},
                                   [](const SimulatedStage& stage) { return stage.shares.idle; });
}

void validate_without_data(Settings settings) {
  DataSettings& data = settings.data;
  if (data.text.empty() && data.tokens.empty() && data.blend.empty())
    data.tokens = "tokens in place of data";
  validate(settings);
}

std::vector<int64_t> first_ranks(const Settings& settings, int64_t num_ranks) {
  return Layout(settings.parallel.layout, num_ranks).group(0, Axis::kPp);
}

double flops_of(const Settings& settings) {
  Settings one = settings;
  one.parallel = {};
  one.train.micro_batch = one.train.global_batch = 1;
  one.train.recompute.clear();
  one.train.offload.clear();
  return plan_rank(one, 0, 1, plan_backend(settings, 1), batch_shape(one)).model.model_flops();
}

SimulatedStep simulate_stages(const Settings& settings, int64_t num_ranks, const StepWork& work,
                              double flops, const std::vector<int64_t>& ranks) {
  const MicroBatches batches = split_micro_batches(settings, num_ranks);
  const auto run = [&](int64_t count) {
    return run_stages(with_micro_batches(settings, num_ranks, count), num_ranks, work, ranks);
  };
  const StagesRun fewer = run(batches.fewer);
  const StagesRun more = batches.more > batches.fewer ? run(batches.more) : fewer;
  const auto sequences = static_cast<double>(settings.train.global_batch);
  SimulatedStep step{.seconds = batches.extend(fewer.end, more.end),
                     .flops = flops * sequences,
                     .tokens = sequences * static_cast<double>(settings.data.sequence_length),
                     .num_ranks = num_ranks};
  for (size_t i = 0; i < ranks.size(); ++i) {
    step.stages.push_back({.rank = ranks[i],
                           .memory = more.memory[i],
                           .shares = extend(batches, shares_of(fewer.plans.clocks[i], fewer.end),
                                            shares_of(more.plans.clocks[i], more.end))});
  }
  return step;
}

SimulatedStep simulate_step(const Settings& settings, int64_t num_ranks, const StepWork& work,
                            double flops) {
  return simulate_stages(settings, num_ranks, work, flops, first_ranks(settings, num_ranks));
}

SimulatedPlans simulate_plans(const Settings& settings, int64_t num_ranks, const StepWork& work,
                              int64_t most_micro_batches) {
  const MicroBatches batches = split_micro_batches(settings, num_ranks);
  const int64_t count = std::min(batches.all, std::max(most_micro_batches, batches.fewer));
  return run_stages(with_micro_batches(settings, num_ranks, count), num_ranks, work,
                    first_ranks(settings, num_ranks))
      .plans;
}

}  // namespace tessera
