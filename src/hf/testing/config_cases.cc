#include "hf/testing/config_cases.h"

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file/file.h"
#include "hf/config/hf_config.h"
#include "hf/testing.h"

namespace tessera::testing {

using nlohmann::json;

json fixture_json(const std::string& name) {
  return json::parse(read_text_file(hf_fixture(name) / "config.json"));
}

ModelConfig parse_config(const json& config) {
  return parse_hf_config(config.dump(), "config.json").model;
}

std::string error_of(const json& config) {
  try {
    parse_config(config);
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

std::string error_with(const std::string& fixture, const char* key, json value) {
  json config = fixture_json(fixture);
  config[key] = std::move(value);
  return error_of(config);
}

}  // namespace tessera::testing
