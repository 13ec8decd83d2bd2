#pragma once

#include <nlohmann/json_fwd.hpp>

#include "hf/config/config_json.h"
#include "model/config/config.h"

namespace tessera {

/// Reads the layers with Kimi Delta Attention and their sizes, where the family has these
/// (Family::kimi_delta): published files say them in `linear_attn_config`, which counts layers from
/// 1, those of transformers by `layer_types` and keys of their own. Throws UserError for what is
/// not supported.
void read_kimi(const ConfigJson& config, ModelConfig& model);

/// Sets those keys in the object `values`, both ways, after everything else.
void write_kimi(const Family& family, const ModelConfig& model, nlohmann::json& values);

}  // namespace tessera
