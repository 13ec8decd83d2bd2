#pragma once

#include "model/config/config.h"

namespace tessera {

/// Binds the keys of [model] about residual streams.
void add_residual_options(ConfigSchema& schema, ModelConfig& config);

/// Refuses what streams do not go with; part of validate().
void validate_residual(const ModelConfig& config);

}  // namespace tessera
