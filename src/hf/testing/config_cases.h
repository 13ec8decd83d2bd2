#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "model/config/config.h"

/// Configurations of Hugging Face's as tests change them.
namespace tessera::testing {

/// The config.json of a fixture.
nlohmann::json fixture_json(const std::string& name);

/// The model that parse_hf_config reads.
ModelConfig parse_config(const nlohmann::json& config);

/// The message of its error, or "no error".
std::string error_of(const nlohmann::json& config);

/// The message of reading a fixture with one key changed.
std::string error_with(const std::string& fixture, const char* key, nlohmann::json value);

}  // namespace tessera::testing
