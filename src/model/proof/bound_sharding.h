#pragma once

#include <string>

#include "model/build/ports.h"
#include "model/build/weight_placement.h"
#include "sharding/infer_sharding.h"

namespace tessera {

/// How the values are spread that a program takes and gives by a port.
Sharding port_sharding(Port port, const RankAxes& axes, const StageGroups& groups);
/// A weight of this placement. Adds a fault where that contradicts itself or the axes.
Sharding weight_sharding(const std::string& name, const WeightPlacement& placement,
                         const RankAxes& axes, ShardingFaults& faults);

}  // namespace tessera
