#pragma once

#include <vector>

#include "sim/step_work.h"
#include "train/setup/settings.h"

namespace tessera {

/// What of a step changes where the hardware is faster or slower.
struct WhatIfStep {
  double seconds = 0;
  double exposed = 0;  ///< seconds of exchanges that nothing hides, of the stage that waits least
};

/// Steps of one layout on hardware whose devices and links have other speeds, in those of its
/// description.
struct WhatIf {
  std::vector<double> computing;               ///< speeds of devices and their memory
  std::vector<double> links;                   ///< bandwidths, within nodes and between them
  std::vector<std::vector<WhatIfStep>> steps;  ///< [computing][links]
};

/// Simulates all combinations of speeds from a half to double, links from a quarter to four times.
WhatIf simulate_what_if(const Settings& settings, int64_t num_ranks, const Hardware& hardware,
                        const SimulationOptions& options);

}  // namespace tessera
