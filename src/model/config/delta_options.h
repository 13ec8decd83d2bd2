#pragma once

#include "model/config/config.h"

namespace tessera {

/// Binds the keys of [delta].
void add_delta_options(ConfigSchema& schema, DeltaConfig& delta);

/// Refuses layers with Gated DeltaNet that cannot be.
void validate_delta(const ModelConfig& config);

}  // namespace tessera
