#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <type_traits>

#include "core/config/config.h"

namespace tessera {

/// An option that is a number, read and refused as a key of the configuration is.
template <typename T>
CLI::Option* add_number(CLI::App& command, const std::string& name, T* field,
                        const std::string& help, Range range) {
  using Read = std::conditional_t<std::is_floating_point_v<T>, double, int64_t>;
  const auto take = [name, field, range](const std::string& text) {
    auto value = static_cast<Read>(*field);
    ConfigSchema schema;
    schema.add(name.substr(2), &value, "", range);
    schema.override_argument(name + "=" + text);
    *field = static_cast<T>(value);
  };
  return command.add_option_function<std::string>(name, take, help)
      ->type_name(std::is_same_v<Read, double> ? "FLOAT" : "INT")
      ->default_str(fmt::format("{}", *field));
}

/// An option that is a number of bytes: "5GB", "500 MiB" or "1000".
CLI::Option* add_size(CLI::App& command, const std::string& name, int64_t* field,
                      const std::string& help);

}  // namespace tessera
