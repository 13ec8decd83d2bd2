#pragma once

#include "train/setup/settings.h"

namespace tessera {

/// Refuses keys of precision.* that the run's train.precision has no use for, and what does not go
/// together with it. Throws UserError, naming both.
void validate_precision(const Settings& settings);

}  // namespace tessera
