#include "train/plan/what_if.h"

#include "train/plan/simulated_step.h"

namespace tessera {

WhatIf simulate_what_if(const Settings& settings, int64_t num_ranks, const Hardware& hardware,
                        const SimulationOptions& options) {
  WhatIf result{.computing = {0.5, 1, 2}, .links = {0.25, 0.5, 1, 2, 4}, .steps = {}};
  StageSimulation stages(settings, num_ranks, first_ranks(settings, num_ranks));
  for (const double computing : result.computing) {
    std::vector<WhatIfStep>& row = result.steps.emplace_back();
    for (const double links : result.links) {
      const SimulatedStep step =
          stages.run(StepWork(at_speeds(hardware, computing, links), options), 0);
      row.push_back({.seconds = step.seconds, .exposed = step.slowest().shares.exposed});
    }
  }
  return result;
}

}  // namespace tessera
