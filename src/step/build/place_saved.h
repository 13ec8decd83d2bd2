#pragma once

#include <vector>

#include "model/run/saved_placement.h"
#include "parallel/pipeline_schedule.h"

namespace tessera {

/// Places what passes save by its lifetimes over a whole step in the order of `steps`: slabs that
/// are never alive at the same time share memory, the largest first at the lowest free offset. Each
/// keeps its address through all micro-batches that have its place. Never more than place_in_line.
/// Parts of layers that plan_offload offloads leave their memory to others between their two lives,
/// and come back to the same address.
SavedPlacement place_saved(const StagePrograms& programs, const std::vector<PipelineStep>& steps);

}  // namespace tessera
