#include "cli/number_options.h"

#include <cctype>
#include <charconv>
#include <limits>
#include <optional>

#include "core/error.h"

namespace tessera {
namespace {

/// "5GB", "500 MiB" or "1000" in bytes, or nothing.
std::optional<int64_t> parse_size(const std::string& text) {
  constexpr std::string_view kPrefixes = "kmgtp";
  int64_t size = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, size);
  std::string unit;
  for (const char* c = rest; c != end; ++c) {
    if (*c != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
  }
  if (unit.ends_with('b')) unit.pop_back();
  const int64_t base = unit.size() == 2 && unit[1] == 'i' ? 1024 : 1000;
  if (base == 1024) unit.pop_back();
  const size_t prefix = unit.empty() ? 0 : kPrefixes.find(unit) + 1;
  if (error != std::errc() || size < 1 || unit.size() > 1 || (prefix == 0 && !unit.empty()))
    return std::nullopt;
  for (size_t i = 0; i < prefix; ++i) {
    if (size > std::numeric_limits<int64_t>::max() / 2 / base) return std::nullopt;
    size *= base;
  }
  return size;
}

}  // namespace

CLI::Option* add_size(CLI::App& command, const std::string& name, int64_t* field,
                      const std::string& help) {
  const auto take = [name, field](const std::string& text) {
    const auto size = parse_size(text);
    require(size.has_value(),
            "{} must be a number of bytes from 1 to 4000PB, such as 5GB or "
            "500MiB, found \"{}\"",
            name, text);
    *field = *size;
  };
  return command.add_option_function<std::string>(name, take, help)->type_name("SIZE");
}

}  // namespace tessera
