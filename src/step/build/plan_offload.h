#pragma once

#include <vector>

#include "model/run/saved_placement.h"
#include "step/build/step_runs.h"

namespace tessera {

/// Plans the copies of what a step's layers offload, so that runs need not wait for them: runs take
/// the time that a fast GPU would need at least, copies what OffloadPolicy::link_bytes makes of
/// them; stores follow one another, and so do reloads, which go on beside them. Each store begins
/// behind the layer's forward run and is waited for when it must be over by this estimate; each
/// reload begins as late as it may to be there in time, but at least a run ahead. As much is
/// offloaded as can be back in time, the layers with the most time first; the rest stays, such as
/// what the last layer saved. A faster `link_bytes` offloads more, and runs may have to wait.
std::vector<LayerOffload> plan_offload(const StagePrograms& programs,
                                       const std::vector<StepRun>& runs);

}  // namespace tessera
