#pragma once

#include "model/config/config.h"

namespace tessera {

/// Binds the keys of [model] that say how layers mix tokens.
void add_attention_options(ConfigSchema& schema, ModelConfig& config);

/// Refuses layers with a window that cannot differ so from those without, and value heads that
/// cannot be.
void validate_attention(const ModelConfig& config);

}  // namespace tessera
