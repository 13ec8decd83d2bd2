#include "hf/hf_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "hf/testing.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json fixture_json(const std::string& name) {
  std::ifstream file(hf_fixture(name) / "config.json");
  return json::parse(file);
}

ModelConfig parse(const json& config) {
  return parse_hf_config(config.dump(), "config.json").model;
}

std::string error_of(const json& config) {
  try {
    parse(config);
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

TEST(HfConfig, ReadsEveryFixture) {
  for (const std::string& name : hf_fixtures()) {
    SCOPED_TRACE(name);
    EXPECT_NO_THROW(read_hf_config(hf_fixture(name)));
  }
}

}  // namespace
}  // namespace tessera
