#pragma once

#include <cstdint>

#include "model/batch/batch_inputs.h"
#include "train/setup/settings.h"

namespace tessera {

/// What the losses of each micro-batch of a step count, `num_valid` labels being valid in the whole
/// global batch.
LossScales loss_scales(const Settings& settings, int64_t num_valid);

}  // namespace tessera
