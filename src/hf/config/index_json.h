#pragma once

#include <nlohmann/json_fwd.hpp>

#include "hf/config/config_json.h"

namespace tessera {

/// Reads the indexer of a family that has `index_topk`. Layers that take the choice of a layer
/// before them (`indexer_types`) are refused.
void read_index(const ConfigJson& config, ModelConfig& model);

/// Sets what read_index reads in the keys of such a family.
void write_index(const ModelConfig& model, nlohmann::json& values);

}  // namespace tessera
