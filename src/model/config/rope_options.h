#pragma once

#include <string_view>

#include "model/config/config.h"

namespace tessera {

/// Binds the keys of [rope], [window_rope] or [compressed_rope].
void add_rope_options(ConfigSchema& schema, RopeConfig& rope, std::string_view section);

/// Refuses rotations that cannot be.
void validate_rope(const ModelConfig& config);

}  // namespace tessera
