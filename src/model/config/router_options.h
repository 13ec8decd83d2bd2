#pragma once

#include "model/config/config.h"

namespace tessera {

/// Binds the keys of [moe] that say how experts are chosen and balanced.
void add_router_options(ConfigSchema& schema, MoeConfig& moe);

/// Refuses impossible combinations of them; part of validate().
void validate_router(const MoeConfig& moe);

/// The same of layers whose experts tables of token ids give.
void validate_hash_layers(const ModelConfig& config);

}  // namespace tessera
