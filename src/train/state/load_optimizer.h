#pragma once

#include <span>

#include "checkpoint/checkpoint.h"
#include "model/weights/parameters.h"
#include "ops/adamw/state_formats.h"
#include "optim/sharded/distributed_optimizer.h"
#include "train/setup/settings.h"

namespace tessera {

/// What an optimizer keeps.
struct KeptState {
  OptimizerKind kind = OptimizerKind::kAdamW;
  StateFormats formats = {};
};

/// Fills the state of an optimizer, which keeps `own`, from a checkpoint of the same weights,
/// already loaded, whatever formats its state was kept in: moments are rounded to nearest or
/// widened; of a master that only one side has as a remainder the other half is the weight's;
/// masters that the checkpoint lacks become the weights. Muon takes AdamW's first moments.
/// `parameters` are the whole model's. Throws UserError where names or shapes are not theirs, and
/// where AdamW would need second moments that Muon does not have.
void load_optimizer(const CheckpointReader& reader, std::span<const ParameterSpec> parameters,
                    const KeptState& own, const DistributedOptimizer& optimizer);

}  // namespace tessera
