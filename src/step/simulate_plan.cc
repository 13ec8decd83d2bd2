#include "step/simulate_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

namespace tessera {
namespace {

constexpr MachineRates kHostRates = {.flops = 2e11,
                                     .memory_bytes = 2e10,
                                     .link_bytes = 4e9,
                                     .exchange_seconds = 2e-5,
                                     .kernel_seconds = 1e-6};
constexpr MachineRates kGpuRates = {.flops = 5e14,
                                    .memory_bytes = 2.5e12,
                                    .link_bytes = 1.5e11,
                                    .exchange_seconds = 1.5e-5,
                                    .kernel_seconds = 2e-6};

double exchange_seconds(double count, double bytes, const MachineRates& rates) {
  return count * rates.exchange_seconds + bytes / rates.link_bytes;
}

/// A run, or a part of one, that starts and waits for its exchanges, and then computes; `count` are
/// those of the parts before.
std::shared_ptr<const ProgramTimes> make_run(const StepPlan& plan, const Task& task,
                                             const MachineRates& rates, int32_t& count) {
  ProgramTimes times;
  const int32_t first = count;
  for (const InnerExchanges& inner : task.inside) {
    const auto group = static_cast<int32_t>(times.groups.size());
    const Lane& lane = plan.lanes[inner.lane];
    times.groups.push_back({lane.name, lane.ranks});
    times.moments.push_back({.kind = ProgramMoment::Kind::kStart,
                             .seconds = exchange_seconds(static_cast<double>(inner.count),
                                                         static_cast<double>(inner.bytes), rates),
                             .exchange = count++,
                             .group = group});
  }
  for (int32_t i = first; i < count; ++i)
    times.moments.push_back({.kind = ProgramMoment::Kind::kWait, .exchange = i});
  return std::make_shared<const ProgramTimes>(std::move(times));
}

/// Exchanges of the runs under way, by chunk and place.
using RunCounts = std::map<std::pair<int64_t, int64_t>, int32_t>;

TaskWork work_of(const StepPlan& plan, const Task& task, const MachineRates& rates,
                 RunCounts& counts) {
  const Lane& lane = plan.lanes[task.lane];
  const auto bytes = static_cast<double>(task.bytes);
  if (communicates(lane)) return {.seconds = exchange_seconds(1, bytes, rates)};
  if (lane.kind == LaneKind::kHostUpdates) return {.seconds = bytes / rates.host_update_bytes};
  if (goes_beside(lane)) return {.seconds = bytes / rates.host_bytes};
  TaskWork work{.seconds = std::max(task.flops / rates.flops, bytes / rates.memory_bytes)};
  int32_t& count = counts[{task.subject.chunk, task.subject.place}];
  if (task.subject.part.is_first()) count = 0;
  if (!task.inside.empty()) work.program = make_run(plan, task, rates, count);
  return work;
}

}  // namespace

MachineRates estimated_rates(bool on_host) {
  return on_host ? kHostRates : kGpuRates;
}

std::vector<PlanTimes> simulate_plans(std::span<const StepPlan> plans, const MachineRates& rates) {
  std::vector<PlanWork> works;
  for (const StepPlan& plan : plans) {
    PlanWork& work = works.emplace_back();
    RunCounts counts;
    for (const Task& task : plan.tasks) work.add(work_of(plan, task, rates, counts));
  }
  std::vector<PlanTimes> times;
  for (RankClock& clock : run_clocks(plans, works)) times.push_back(std::move(clock.times));
  return times;
}

}  // namespace tessera
