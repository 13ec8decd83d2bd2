#pragma once

#include "model/config/config.h"

namespace tessera {

/// Of an epsilon beside a mean square: a larger one would hide it.
inline constexpr Range kEpsilonRange = {.min = 0, .max = 1, .min_open = true};

/// Binds the keys of [model] that say how hidden states are normed.
void add_norm_options(ConfigSchema& schema, ModelConfig& config);

/// Refuses impossible combinations of norms, and of the head's bias; part of validate().
void validate_norms(const ModelConfig& config);

}  // namespace tessera
