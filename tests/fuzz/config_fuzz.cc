#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/config.h"

namespace {

using namespace tessera;

enum class Kind { kDense, kMoe };

struct Config {
  int64_t size = 1;
  double rate = 0.5;
  bool flag = false;
  Kind kind = Kind::kDense;
  std::string text;
  std::vector<int64_t> sizes;
  std::vector<std::string> texts;
  std::optional<int64_t> limit;
  ConfigSchema schema;

  Config() {
    schema.add("seed", &size, "");
    schema.add("a.rate", &rate, "", between(0, 1));
    schema.add("a.flag", &flag, "");
    schema.add_enum("a.kind", &kind, {{"dense", Kind::kDense}, {"moe", Kind::kMoe}}, "");
    schema.add("a.b.text", &text, "");
    schema.add("a.b.sizes", &sizes, "", at_least(0));
    schema.add("a.b.texts", &texts, "");
    schema.add("a.limit", &limit, "");
  }
};

/// What was accepted must print as TOML that loads again to the same values.
void check_round_trip(const Config& config) {
  Config again;
  again.schema.load_toml_text(config.schema.to_toml(), "printed");
  const auto values = config.schema.resolved();
  const auto values_again = again.schema.resolved();
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].value != values_again[i].value) {
      throw InternalError(values[i].key + " is not printed as it was read");
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  Config config;
  try {
    if (input.starts_with("--")) {
      config.schema.override_argument(input);
    } else {
      config.schema.load_toml_text(input, "fuzz.toml");
    }
  } catch (const UserError&) {
    return 0;
  }
  check_round_trip(config);
  return 0;
}
