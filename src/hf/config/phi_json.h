#pragma once

#include <nlohmann/json_fwd.hpp>

#include "hf/config/config_json.h"
#include "model/config/config.h"

namespace tessera {

/// Reads what Phi-3.5-MoE has beside other families (Family::phimoe), after its router: LayerNorms,
/// a bias of the head and SparseMixer. Throws UserError for what is not supported.
void read_phi(const ConfigJson& config, ModelConfig& model);

/// Sets those keys in the object `values`, after everything else.
void write_phi(const Family& family, const ModelConfig& model, nlohmann::json& values);

}  // namespace tessera
