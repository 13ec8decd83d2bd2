#pragma once

#include "sim/step_work.h"
#include "train/metrics/step_page.h"
#include "train/setup/settings.h"

namespace tessera {

/// The step of a layout on hardware whose devices and links are faster or slower than described:
/// all combinations of devices of half to double speed and links of a quarter to four times theirs.
/// What nothing hides is that of the stage that waits least.
StepSpeeds simulate_what_if(const Settings& settings, int64_t num_ranks, const Hardware& hardware,
                            const SimulationOptions& options);

}  // namespace tessera
