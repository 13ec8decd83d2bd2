#pragma once

#include <array>
#include <vector>

#include "step/step_plan.h"

namespace tessera {

/// Memory of a purpose over a step.
struct PurposeMemory {
  int64_t slabs = 0;  ///< as it is taken: every storage for the whole run
  int64_t most = 0;   ///< the most that is alive at a time
};

/// What a step needs of the device's memory, beside what outlives it.
struct StepMemory {
  static constexpr size_t kNumPurposes = 9;
  std::array<PurposeMemory, kNumPurposes> purposes;  ///< by Purpose; state has slabs alone
  int64_t slabs = 0;                                 ///< all but state
  int64_t most = 0;     ///< the most alive at a time: no placement needs less
  int64_t placed = 0;   ///< what a placement by lifetime takes
  TaskId fullest = {};  ///< a task at which the most is alive
};
StepMemory find_step_memory(const StepPlan& plan);

/// The device's bytes that are alive at each task, state left out.
std::vector<int64_t> find_alive_bytes(const StepPlan& plan);

}  // namespace tessera
