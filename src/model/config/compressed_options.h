#pragma once

#include "model/config/config.h"

namespace tessera {

/// Binds the keys of [compressed].
void add_compressed_options(ConfigSchema& schema, CompressedConfig& compressed);

/// Refuses compressed attention that cannot be, and sizes of it without it.
void validate_compressed(const ModelConfig& config);

}  // namespace tessera
