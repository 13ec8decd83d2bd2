#pragma once

#include "model/config/config.h"

namespace tessera {

/// Binds the keys of [mamba].
void add_mamba_options(ConfigSchema& schema, MambaConfig& mamba);

/// Refuses layers with Mamba-2, and layers of one part alone, that cannot be.
void validate_mixers(const ModelConfig& config);

}  // namespace tessera
