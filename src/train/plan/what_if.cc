#include "train/plan/what_if.h"

#include "train/plan/simulated_step.h"

namespace tessera {

StepSpeeds simulate_what_if(const Settings& settings, int64_t num_ranks, const Hardware& hardware,
                            const SimulationOptions& options) {
  StepSpeeds result{
      .computing = {0.5, 1, 2}, .links = {0.25, 0.5, 1, 2, 4}, .seconds = {}, .exposed = {}};
  StageSimulation stages(settings, num_ranks, first_ranks(settings, num_ranks));
  for (const double computing : result.computing) {
    std::vector<double>& seconds = result.seconds.emplace_back();
    std::vector<double>& exposed = result.exposed.emplace_back();
    for (const double links : result.links) {
      const SimulatedStep step =
          stages.run(StepWork(at_speeds(hardware, computing, links), options), 0);
      seconds.push_back(step.seconds);
      exposed.push_back(step.slowest().shares.exposed);
    }
  }
  return result;
}

}  // namespace tessera
