#pragma once

#include <string>

#include "model/config/config.h"
#include "sim/routing_counts.h"

namespace tessera {

/// What came to experts in the last steps of a run, given by its folder or its metrics.jsonl.
/// Throws UserError where there is none, or a model of other experts was trained.
RoutingCounts read_routing(const std::string& run, const ModelConfig& model);

}  // namespace tessera
