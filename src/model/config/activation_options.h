#pragma once

#include "model/config/config.h"

namespace tessera {

/// Binds the keys of [model] about the activation of MLPs and experts.
void add_activation_options(ConfigSchema& schema, ModelConfig& config);

/// Refuses a limit where nothing is clamped; part of validate().
void validate_activation(const ModelConfig& config);

}  // namespace tessera
