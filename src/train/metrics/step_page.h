#pragma once

#include <span>
#include <string>

#include "step/simulate_plan.h"

namespace tessera {

/// What a page about a step says beside its plans.
struct StepPageInfo {
  std::string title;   ///< the model and its layout
  std::string status;  ///< of what machine the estimates are
};

/// A page that draws the plans of some ranks side by side as a timeline of their lanes:
/// self-contained HTML that loads nothing, light and dark. `times` are the plans' estimates.
std::string make_step_page(std::span<const StepPlan> plans, std::span<const PlanTimes> times,
                           const StepPageInfo& info);

}  // namespace tessera
