#pragma once

#include <span>
#include <string>
#include <vector>

#include "step/simulate_plan.h"

namespace tessera {

/// What a step takes on devices and links of other speeds, in those of the machine:
/// [computing][links].
struct StepSpeeds {
  std::vector<double> computing;
  std::vector<double> links;
  std::vector<std::vector<double>> seconds;
  std::vector<std::vector<double>> exposed;  ///< of exchanges that nothing hides

  bool empty() const { return seconds.empty(); }
};

/// What a page about a step says beside its plans.
struct StepPageInfo {
  std::string title;   ///< the model and its layout
  std::string status;  ///< of what machine the estimates are
  StepSpeeds speeds = {};
};

/// A page that draws the plans of some ranks side by side as a timeline of their lanes:
/// self-contained HTML that loads nothing, light and dark. `times` are the plans' estimates. Where
/// speeds are given, sliders show the step in between them.
std::string make_step_page(std::span<const StepPlan> plans, std::span<const PlanTimes> times,
                           const StepPageInfo& info);

}  // namespace tessera
