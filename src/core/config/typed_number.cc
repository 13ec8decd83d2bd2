#include "core/config/typed_number.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <system_error>

namespace tessera {
namespace {

std::string_view without_sign(std::string_view text) {
  if (text.starts_with('+') || text.starts_with('-')) text.remove_prefix(1);
  return text;
}

/// Takes the digits at the start of the text away; whether there was one.
bool take_digits(std::string_view& text) {
  const size_t end = std::min(text.find_first_not_of("0123456789"), text.size());
  text.remove_prefix(end);
  return end > 0;
}

bool is_whole(std::string_view text) {
  text = without_sign(text);
  return take_digits(text) && text.empty();
}

bool is_decimal(std::string_view text) {
  text = without_sign(text);
  if (!take_digits(text)) return false;
  if (text.starts_with('.')) {
    text.remove_prefix(1);
    if (!take_digits(text)) return false;
  }
  if (text.starts_with('e') || text.starts_with('E')) {
    text = without_sign(text.substr(1));
    if (!take_digits(text)) return false;
  }
  return text.empty();
}

bool fits_integer(std::string_view text) {
  int64_t number = 0;
  if (text.starts_with('+')) text.remove_prefix(1);
  return std::from_chars(text.data(), text.data() + text.size(), number).ec == std::errc();
}

/// The range with an integer's own bounds where it has none of its own.
std::string describe_bound(bool negative, const Range& range) {
  std::string bound = range.to_string();
  if (std::isfinite(negative ? range.min : range.max)) return bound;
  if (!bound.empty()) bound += " and ";
  return bound + (negative ? fmt::format("at least {}", std::numeric_limits<int64_t>::min())
                           : fmt::format("at most {}", std::numeric_limits<int64_t>::max()));
}

}  // namespace

std::optional<double> parse_decimal(std::string_view text) {
  if (!is_decimal(text)) return std::nullopt;
  return std::strtod(std::string(text).c_str(), nullptr);
}

std::string describe_unheld(std::string_view text, bool is_integer, const Range& range) {
  if (is_integer) {
    if (!is_whole(text) || fits_integer(text)) return "";
    return fmt::format("must be {}, found {}", describe_bound(text.starts_with('-'), range), text);
  }
  const auto number = parse_decimal(text);
  if (!number) return "";
  const std::string limit = range.to_string();
  const std::string expected = limit.empty() ? "a number" : "a number " + limit;
  if (std::isinf(*number))
    return fmt::format("must be {}, found {}, which is beyond {:.2g}", expected, text,
                       std::numeric_limits<double>::max());
  const std::string_view digits = text.substr(0, text.find_first_of("eE"));
  if (*number == 0 && digits.find_first_of("123456789") != std::string_view::npos)
    return fmt::format("must be {}, found {}, which is nearer to 0 than {:.2g}", expected, text,
                       std::numeric_limits<double>::denorm_min());
  return "";
}

}  // namespace tessera
