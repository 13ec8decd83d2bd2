#pragma once

#include <span>

#include "checkpoint/checkpoint.h"
#include "model/run/parameters.h"
#include "ops/adamw/state_formats.h"
#include "optim/distributed_optimizer.h"

namespace tessera {

/// Fills the state of an optimizer, which keeps `master` beside BF16 weights, from a checkpoint of
/// the same weights, already loaded, whatever formats its state was kept in: moments are rounded to
/// nearest or widened; of a master that only one side has as a remainder the other half is the
/// weight's; masters that the checkpoint lacks become the weights. `parameters` are the whole
/// model's. Throws UserError where names or shapes are not theirs.
void load_optimizer(const CheckpointReader& reader, std::span<const ParameterSpec> parameters,
                    MasterKind master, const DistributedOptimizer& optimizer);

}  // namespace tessera
