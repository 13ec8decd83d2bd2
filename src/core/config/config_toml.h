#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/config.h"

namespace tessera {

/// A key of a TOML document with its full dotted name; a section has no value.
struct TomlEntry {
  std::string key;
  int64_t line = 0;
  std::optional<ConfigValue> value;
};

/// The sections and keys of a TOML document in the order of their lines. Throws UserError with
/// "name:line:" for broken syntax and for what no configuration value can be (dates, tables in
/// arrays, arrays in arrays).
std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& name);

/// One TOML value, or nothing where the text is not one.
std::optional<ConfigValue> parse_toml_value(std::string_view text);

/// The value as TOML; also valid JSON, as finite numbers, strings and arrays are written the same
/// there.
std::string toml_text(const ConfigValue& value);
std::string toml_text(const ConfigScalar& value);

}  // namespace tessera
