#pragma once

#include <span>
#include <vector>

#include "step/step_plan.h"

namespace tessera {

/// What a machine does in a second, for estimates.
struct MachineRates {
  double flops = 1e12;
  double memory_bytes = 1e11;
  double link_bytes = 1e10;        ///< what a rank sends
  double host_bytes = 5e10;        ///< to the host's memory, and as many back at the same time
  double exchange_seconds = 1e-5;  ///< what each exchange takes beside its bytes
  double kernel_seconds = 0;       ///< what each operator takes beside its work
};

/// Estimates, which show proportions: of an ordinary machine's two cores, or of an H100 with fast
/// links.
MachineRates estimated_rates(bool on_host);

/// When a task does its work, in seconds; of a start, from there to the end of the exchange.
struct TaskTime {
  double begin = 0;
  double end = 0;
};
using PlanTimes = IdVector<TaskId, TaskTime>;

/// Runs the plans of ranks side by side, each from its first task to its last, with durations from
/// the tasks' costs. An exchange begins when all its ranks that have a plan here started it, and
/// those of one lane follow one another; a message when both its ends did. Throws InternalError
/// where ranks wait forever, with the tasks at which they stand.
std::vector<PlanTimes> simulate_plans(std::span<const StepPlan> plans, const MachineRates& rates);

}  // namespace tessera
