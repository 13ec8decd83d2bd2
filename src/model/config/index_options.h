#pragma once

#include "model/config/config.h"

namespace tessera {

/// Binds the keys of [index].
void add_index_options(ConfigSchema& schema, IndexConfig& index);

/// Refuses an indexer that cannot be.
void validate_index(const ModelConfig& config);

}  // namespace tessera
