#pragma once

#include <cstdint>

#include "model/batch/batch_inputs.h"
#include "train/setup/settings.h"

namespace tessera {

/// What the losses of each micro-batch of a step count, of which it has that many with `num_valid`
/// valid labels, all ranks together.
LossScales loss_scales(const Settings& settings, int64_t num_micro_batches, int64_t num_valid);

}  // namespace tessera
