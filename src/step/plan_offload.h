#pragma once

#include <vector>

#include "model/run/saved_placement.h"
#include "step/step_runs.h"

namespace tessera {

/// Plans the copies of what a step's layers offload, so that runs need not wait for them: runs and
/// copies take the time that a fast GPU would need at least, stores follow one another, and so do
/// reloads, which go on beside them. Each store begins behind the layer's forward run and has until
/// it must be over by this estimate; each reload begins as late as it may to be there in time, but
/// at least a run ahead. What would have to come back before it is away, such as what the last
/// layer saved, stays where it is. A fast `link_bytes` (OffloadPolicy) makes copies short: less
/// memory, and perhaps waiting.
std::vector<LayerOffload> plan_offload(const StagePrograms& programs,
                                       const std::vector<StepRun>& runs);

}  // namespace tessera
