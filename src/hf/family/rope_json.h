#pragma once

#include <nlohmann/json_fwd.hpp>

#include "hf/family/config_json.h"
#include "model/config/config.h"

namespace tessera {

/// The rotary embedding of a config.json, as transformers' modeling_rope_utils.py understands it:
/// `rope_scaling` before `rope_parameters`, what is inside them before `rope_theta` and
/// `partial_rotary_factor` beside them, "rope_type" before "type". Throws UserError for a type or
/// key that is not supported.
RopeConfig read_rope(const ConfigJson& config);

/// The `rope_parameters` of a rotary embedding.
nlohmann::json write_rope(const RopeConfig& rope, const Family& family);

}  // namespace tessera
