#pragma once

#include <span>
#include <vector>

#include "step/plan_clock.h"

namespace tessera {

/// What a machine does in a second, for estimates.
struct MachineRates {
  double flops = 1e12;
  double memory_bytes = 1e11;
  double link_bytes = 1e10;         ///< what a rank sends
  double host_bytes = 5e10;         ///< to the host's memory, and as many back at the same time
  double host_update_bytes = 1e11;  ///< of the host's memory, where its threads update
  double exchange_seconds = 1e-5;   ///< what each exchange takes beside its bytes
  double kernel_seconds = 0;        ///< what each operator takes beside its work
};

/// Estimates, which show proportions: of an ordinary machine's two cores, or of an H100 with fast
/// links.
MachineRates estimated_rates(bool on_host);

/// Runs the plans of ranks side by side (run_clocks) with durations from the tasks' costs.
/// Exchanges inside of a run all begin it, and are over before it computes.
std::vector<PlanTimes> simulate_plans(std::span<const StepPlan> plans, const MachineRates& rates);

}  // namespace tessera
