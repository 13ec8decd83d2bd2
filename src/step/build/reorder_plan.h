#pragma once

#include <vector>

#include "step/step_plan.h"

namespace tessera {

/// The same plan with its tasks in another order: task i is task order[i] of `plan`. Throws
/// InternalError where `order` is no permutation. It does not look whether the order is right.
StepPlan reorder(StepPlan plan, const std::vector<TaskId>& order);

}  // namespace tessera
