#pragma once

#include <nlohmann/json_fwd.hpp>

#include "hf/config/config_json.h"
#include "model/config/config.h"

namespace tessera {

/// The layers that a file of a family with MambaRule::kNemotron lists. Throws UserError where it
/// lists none.
int64_t count_mamba_layers(const ConfigJson& config);

/// Reads what a family with Mamba-2 (Family::mamba) has of its own, after everything else. Throws
/// UserError for what is not supported.
void read_mamba(const ConfigJson& config, ModelConfig& model);

/// Sets those keys in the object `values`, after everything else.
void write_mamba(const Family& family, const ModelConfig& model, nlohmann::json& values);

}  // namespace tessera
