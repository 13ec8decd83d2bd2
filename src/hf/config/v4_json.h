#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "hf/config/config_json.h"
#include "model/config/config.h"

namespace tessera {

/// Reads what DeepSeek-V4 has of its own, where the family is that (Family::deepseek_v4): the sizes
/// and layers of compressed attention, residual streams, and layers whose experts a table gives;
/// also by the names that published files have for them. Throws UserError for what is not
/// supported.
void read_v4(const ConfigJson& config, ModelConfig& model);

/// Sets those keys in the object `values`, after everything else.
void write_v4(const Family& family, const ModelConfig& model, nlohmann::json& values);

/// The name that transformers saves a tensor by, which published files begin without "model.". What
/// they name "X.scale" are the scales of the matrix "X.weight", as transformers' loading of FP8 has
/// it (FineGrainedFP8HfQuantizer).
std::string saved_v4_name(const std::string& published);

}  // namespace tessera
