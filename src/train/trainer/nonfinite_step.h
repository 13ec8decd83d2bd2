#pragma once

#include <optional>

#include "optim/loss_scaler.h"
#include "train/setup/settings.h"
#include "train/trainer/step_outcome.h"

namespace tessera {

/// Throws TrainingStopped for a step behind `steps_done` whose loss or gradient is not finite,
/// where the settings say stop, unless a smaller loss scale may mend that: a scale that follows the
/// gradients, and is not yet the smallest. A loss that is not finite is no work of its scale.
void refuse_nonfinite(const Settings& settings, int64_t steps_done,
                      const std::optional<LossScaler>& scaler, const StepOutcome& outcome);

/// What a checkpoint holds of a scale that follows the gradients; nothing of others.
std::optional<LossScaleState> saved_state(const std::optional<LossScaler>& scaler);

}  // namespace tessera
