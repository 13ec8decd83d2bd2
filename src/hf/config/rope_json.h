#pragma once

#include <nlohmann/json_fwd.hpp>

#include "hf/config/config_json.h"
#include "model/config/config.h"

namespace tessera {

/// The rotary embedding of a config.json, as transformers' modeling_rope_utils.py understands it:
/// `rope_scaling` before `rope_parameters`, what is inside them before `rope_theta` and
/// `partial_rotary_factor` beside them, "rope_type" before "type". Throws UserError for a type or
/// key that is not supported.
/// Sets the model's rotations, whose windows are known.
void read_rope(const ConfigJson& config, ModelConfig& model);

/// The `rope_parameters` of a rotary embedding.
nlohmann::json write_rope(const RopeConfig& rope, const Family& family);
/// The `rope_parameters` of each type of layer, for families that have them by type.
nlohmann::json write_ropes_by_type(const ModelConfig& model, const Family& family);

/// The same of DeepSeek-V4's two kinds of layers.
nlohmann::json write_compressed_ropes(const ModelConfig& model, const Family& family);
/// The share of a head that compressed attention rotates.
double rotated_share(const ModelConfig& model);

}  // namespace tessera
