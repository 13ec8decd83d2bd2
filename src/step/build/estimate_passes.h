#pragma once

#include <vector>

#include "model/run/saved_placement.h"
#include "step/build/step_runs.h"
#include "step/simulate_plan.h"

namespace tessera {

/// Seconds that a program takes by estimate: of each node what takes longer, its arithmetic or its
/// way through memory, and its start. Exchanges besides go on, one behind the other, beside what
/// stands between their start and their first use. Ragged values have the rows of balanced routing
/// where the program knows them, otherwise their bounds.
double estimate_seconds(const Executable& executable, const MachineRates& rates);

/// Seconds of a rank's runs of a step, one behind the other, by estimate; messages and exchanges of
/// weights and gradients, and waiting for other stages, are left out. Copies of what `placement`
/// offloads, at `rates.host_bytes`, are waited for where they are not over, and take their bytes
/// from what computation has of the memory's rate: measured, 20 GB of copies slow a step of 580 ms
/// by 10 ms (docs/log.md).
double estimate_passes(const std::vector<StepRun>& runs, const StagePrograms& programs,
                       const SavedPlacement& placement, const MachineRates& rates);

}  // namespace tessera
