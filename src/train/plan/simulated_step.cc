#include "train/plan/simulated_step.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "train/setup/device_choice.h"
#include "train/setup/step_schedule.h"

namespace tessera {
namespace {

double sum(const std::map<std::string, double>& parts) {
  double all = 0;
  for (const auto& [name, seconds] : parts) all += seconds;
  return all;
}

/// Seconds of the operators that the tasks run, by name.
std::map<std::string, double> computed_by(const PlanWork& work) {
  // In the order of the tasks, so that sums have the same bits in each process.
  std::vector<std::pair<const ProgramTimes*, int64_t>> runs;
  std::map<const ProgramTimes*, size_t> places;
  for (const TaskId id : work.ids()) {
    const ProgramTimes* const program = work[id].program.get();
    if (program == nullptr) continue;
    const auto [place, is_new] = places.try_emplace(program, runs.size());
    if (is_new) runs.emplace_back(program, 0);
    ++runs[place->second].second;
  }
  std::map<std::string, double> all;
  for (const auto& [program, count] : runs) {
    for (const auto& [name, seconds] : program->by_operator)
      all[name] += static_cast<double>(count) * seconds;
  }
  return all;
}

/// What of a rank's step is left over is idle time behind its last task, while others end.
StepShares shares_of(const RankClock& clock, const PlanWork& work, double end) {
  return {.computed = clock.computed,
          .exposed = sum(clock.waited_for_wires),
          .idle = sum(clock.waited_for_ranks) + (end - clock.end),
          .copies = clock.waited_for_copies,
          .host = clock.waited_for_host,
          .exchanged = sum(clock.exchanged),
          .exposed_by = clock.waited_for_wires,
          .computed_by = computed_by(work)};
}

/// What shares come to with all micro-batches, by `whole` of a part with fewer and with more.
template <typename Extend>
StepShares extend_shares(const StepShares& fewer, const StepShares& more, const Extend& whole) {
  StepShares all = more;
  for (double StepShares::*part : {&StepShares::computed, &StepShares::exposed, &StepShares::idle,
                                   &StepShares::copies, &StepShares::host, &StepShares::exchanged})
    all.*part = whole(fewer.*part, more.*part);
  for (std::map<std::string, double> StepShares::*by :
       {&StepShares::exposed_by, &StepShares::computed_by}) {
    for (auto& [name, seconds] : all.*by) {
      const auto before = (fewer.*by).find(name);
      seconds = whole(before == (fewer.*by).end() ? 0 : before->second, seconds);
    }
  }
  return all;
}

/// Micro-batches behind which each further one takes the same time in a pipeline of `stages`: twice
/// those in flight.
int64_t count_to_fill(const Settings& settings, int64_t stages) {
  return (merges_passes(settings.train) ? 4 : 2) * stages;
}

/// Between few micro-batches a step may grow by less than a slow stage computes, while what follows
/// the passes shrinks: no step is shorter than that.
void raise_to_computed(SimulatedStep& step) {
  double least = step.seconds;
  for (const SimulatedStage& stage : step.stages) least = std::max(least, stage.shares.computed);
  const double longer = least - std::exchange(step.seconds, least);
  for (SimulatedStage& stage : step.stages) stage.shares.idle += longer;
}

double end_of(const SimulatedPlans& plans) {
  double end = 0;
  for (const RankClock& clock : plans.clocks) end = std::max(end, clock.end);
  return end;
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
  const bool needs_data = settings.train.objective == Objective::kNextToken;
  if (needs_data && data.text.empty() && data.tokens.empty() && data.blend.empty())
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
  one.train.schedule = kAsBuilt;
  return plan_rank(one, 0, 1, plan_backend(settings, 1), batch_shape(one)).model.model_flops();
}

/// A step's micro-batches for a data-parallel rank, and how many of them are run.
struct StageSimulation::MicroBatches {
  int64_t all = 1;
  int64_t fewer = 1;
  int64_t more = 1;  ///< `fewer` where all are run

  /// What comes to `with_fewer` and `with_more` comes to so much with all.
  double extend(double with_fewer, double with_more) const {
    if (fewer == more) return with_fewer;
    const double slope = (with_more - with_fewer) / static_cast<double>(more - fewer);
    return with_more + static_cast<double>(all - more) * slope;
  }
};

/// At least `least` of them and as many more, in what pipelines take at a time: interleaved ones a
/// multiple of the stages.
StageSimulation::MicroBatches StageSimulation::split(int64_t least) const {
  const int64_t unit =
      settings_.parallel.schedule == PipelineKind::kInterleaved ? layout_.degree(Axis::kPp) : 1;
  const int64_t all = count_micro_batches(settings_, layout_);
  if (step_schedule(settings_.train) == StepSchedule::kFile) return {all, all, all};
  const int64_t fewer = least + (all - least) % unit;
  const int64_t more = fewer + std::max(unit, least / 2);
  if (all <= more) return {all, all, all};
  return {all, fewer, more};
}

StageSimulation::StageSimulation(const Settings& settings, int64_t num_ranks,
                                 std::vector<int64_t> ranks)
    : settings_(settings),
      num_ranks_(num_ranks),
      layout_(settings.parallel.layout, num_ranks),
      ids_(std::move(ranks)) {
  // After so many a pipeline is full, or never.
  const bool takes_all =
      settings.parallel.schedule == PipelineKind::kGpipe || settings.shard.release_gradients;
  const MicroBatches batches = split(count_to_fill(settings, layout_.degree(Axis::kPp)));
  const Settings full = with_micro_batches(takes_all ? batches.all : batches.more);
  for (const int64_t rank : ids_) {
    ranks_.push_back(plan_rank(full, rank, num_ranks));
    memory_.push_back(predict_memory(full, ranks_.back()));
  }
}

int64_t StageSimulation::most_bytes() const {
  return std::ranges::max(memory_, {}, &MemoryPrediction::total).total();
}

int64_t StageSimulation::fullest() const {
  return ids_[std::ranges::max_element(memory_, {}, &MemoryPrediction::total) - memory_.begin()];
}

/// The rank stands for all of its stage, which wait for the slowest of them in every exchange, and
/// at the step's end.
Slowdown StageSimulation::slowdown_of(const SimulationOptions& options, int64_t rank) const {
  Slowdown most;
  for (const auto& [slow, slowdown] : options.slow_ranks) {
    if (layout_.coordinate(slow, Axis::kPp) != layout_.coordinate(rank, Axis::kPp)) continue;
    most.computing = std::max(most.computing, slowdown.computing);
    most.links = std::max(most.links, slowdown.links);
  }
  return most;
}

Settings StageSimulation::with_micro_batches(int64_t count) const {
  Settings copy = settings_;
  copy.train.global_batch = count * layout_.degree(Axis::kDp) * settings_.train.micro_batch;
  return copy;
}

SimulatedPlans StageSimulation::run_plans(const StepWork& work, int64_t micro_batches) {
  const Settings settings = with_micro_batches(micro_batches);
  SimulatedPlans result;
  for (PlannedRank& rank : ranks_) {
    rank.set_micro_batches(settings);
    result.plans.push_back(plan_step(settings, rank));
    result.works.push_back(work.find(result.plans.back(), rank.model.programs(), num_ranks_,
                                     slowdown_of(work.options(), rank.layout.rank())));
  }
  result.clocks = run_clocks(result.plans, result.works, work.clock_options(num_ranks_));
  return result;
}

SimulatedStep StageSimulation::run(const StepWork& work, double flops,
                                   const MicroBatches& batches) {
  const SimulatedPlans fewer = run_plans(work, batches.fewer);
  const SimulatedPlans more = batches.more > batches.fewer ? run_plans(work, batches.more) : fewer;
  const auto whole = [&](double with_fewer, double with_more) {
    return batches.extend(with_fewer, with_more);
  };
  const double ends[] = {end_of(fewer), end_of(more)};
  const auto sequences = static_cast<double>(settings_.train.global_batch);
  SimulatedStep step{.seconds = whole(ends[0], ends[1]),
                     .flops = flops * sequences,
                     .tokens = sequences * static_cast<double>(settings_.data.sequence_length),
                     .num_ranks = num_ranks_};
  for (size_t i = 0; i < ids_.size(); ++i) {
    step.stages.push_back(
        {.rank = ids_[i],
         .memory = memory_[i],
         .shares = extend_shares(shares_of(fewer.clocks[i], fewer.works[i], ends[0]),
                                 shares_of(more.clocks[i], more.works[i], ends[1]), whole)});
  }
  raise_to_computed(step);
  return step;
}

SimulatedStep StageSimulation::run(const StepWork& work, double flops) {
  return run(work, flops, split(count_to_fill(settings_, layout_.degree(Axis::kPp))));
}

SimulatedStep StageSimulation::run_alone(const StepWork& work, double flops) {
  const bool interleaved = settings_.parallel.schedule == PipelineKind::kInterleaved;
  return run(work, flops,
             split(interleaved ? layout_.degree(Axis::kPp) : count_to_fill(settings_, 1)));
}

SimulatedStep simulate_step(const Settings& settings, int64_t num_ranks, const StepWork& work,
                            double flops) {
  return StageSimulation(settings, num_ranks, first_ranks(settings, num_ranks)).run(work, flops);
}

namespace {

SimulatedPlans simulate_plans_of(const Settings& settings, int64_t num_ranks,
                                 std::vector<int64_t> ranks, const StepWork& work,
                                 int64_t most_micro_batches) {
  const Layout layout(settings.parallel.layout, num_ranks);
  const int64_t all = count_micro_batches(settings, layout);
  const int64_t stages = layout.degree(Axis::kPp);
  const bool any_number = step_schedule(settings.train) != StepSchedule::kFile;
  const int64_t least =
      any_number ? std::min(all, count_to_fill(settings, stages) + all % stages) : all;
  return StageSimulation(settings, num_ranks, std::move(ranks))
      .run_plans(work, std::min(all, std::max(most_micro_batches, least)));
}

}  // namespace

SimulatedPlans simulate_plans(const Settings& settings, int64_t num_ranks, const StepWork& work,
                              int64_t most_micro_batches) {
  return simulate_plans_of(settings, num_ranks, first_ranks(settings, num_ranks), work,
                           most_micro_batches);
}

SimulatedPlans simulate_all_plans(const Settings& settings, int64_t num_ranks, const StepWork& work,
                                  int64_t most_micro_batches) {
  std::vector<int64_t> ranks(num_ranks);
  std::iota(ranks.begin(), ranks.end(), 0);
  return simulate_plans_of(settings, num_ranks, std::move(ranks), work, most_micro_batches);
}

}  // namespace tessera
