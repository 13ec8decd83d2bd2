#pragma once

#include <nlohmann/json_fwd.hpp>

#include "hf/config/config_json.h"
#include "model/config/config.h"

namespace tessera {

// What a configuration of Gemma 4 says beside what others do.

/// Reads it where the family is that one; to be called behind the windows and before the experts.
void read_gemma(const ConfigJson& config, ModelConfig& model);
/// Reads what its experts have, where there are any.
void read_gemma_experts(const ConfigJson& config, ModelConfig& model);

/// Writes it over the values of other families' keys.
void write_gemma(const Family& family, const ModelConfig& model, nlohmann::json& values);

}  // namespace tessera
