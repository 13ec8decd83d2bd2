#pragma once

#include <string>

#include "train/plan/simulated_step.h"

namespace tessera {

/// Plans with their times for trace viewers that read Chrome's JSON (Perfetto, chrome://tracing):
/// each stage is a process there, each lane a row, and what is alive of a stage's memory a counter.
std::string make_plan_trace(const SimulatedPlans& plans);

}  // namespace tessera
