#include "core/config/byte_size.h"

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>

#include "core/error.h"

namespace tessera {
namespace {

struct ByteUnit {
  std::string_view name;  ///< in lower case
  double bytes = 1;
};

constexpr double kKibi = 1024;
constexpr double kKilo = 1000;
constexpr std::array<ByteUnit, 9> kByteUnits = {{{"b", 1},
                                                 {"kib", kKibi},
                                                 {"mib", kKibi* kKibi},
                                                 {"gib", kKibi* kKibi* kKibi},
                                                 {"tib", kKibi* kKibi* kKibi* kKibi},
                                                 {"kb", kKilo},
                                                 {"mb", kKilo* kKilo},
                                                 {"gb", kKilo* kKilo* kKilo},
                                                 {"tb", kKilo* kKilo* kKilo* kKilo}}};

[[noreturn]] void refuse_size(std::string_view key, const std::string& text, std::string_view why) {
  throw UserError(fmt::format(
      "{} is \"{}\", {}; give a number with its unit, such as \"80GiB\", \"1.5TiB\" or \"500MB\"",
      key, text, why));
}

std::string lower_unit(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  std::string lower;
  for (const char c : text) lower += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower;
}

}  // namespace

int64_t parse_byte_size(std::string_view key, const std::string& text) {
  const char* const end = text.data() + text.size();
  double number = 0;
  const auto [at, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  if (error != std::errc() || !std::isfinite(number))
    refuse_size(key, text, "which does not begin with a number");
  const std::string unit = lower_unit(std::string_view(at, end - at));
  if (unit.empty()) refuse_size(key, text, "which has no unit");
  for (const ByteUnit& known : kByteUnits) {
    if (known.name != unit) continue;
    const double bytes = std::floor(number * known.bytes);
    if (!(bytes >= 1 && bytes <= 0x1p60)) refuse_size(key, text, "which is no size of a memory");
    return static_cast<int64_t>(bytes);
  }
  refuse_size(key, text, fmt::format("whose unit '{}' is unknown", unit));
}

}  // namespace tessera
