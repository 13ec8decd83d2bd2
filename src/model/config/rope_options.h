#pragma once

#include "model/config/config.h"

namespace tessera {

/// Binds the keys of [rope].
void add_rope_options(ConfigSchema& schema, RopeConfig& rope);

/// Refuses rotations that cannot be.
void validate_rope(const ModelConfig& config);

}  // namespace tessera
