#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/config/config.h"

namespace tessera {

/// What is wrong with a decimal number as typed that an integer (64 bits) or a real number cannot
/// hold: "must be at most 9223372036854775807, found 18446744073709551616". "" where it can be
/// held, and for text that is no decimal number: what that means is not decided here.
std::string describe_unheld(std::string_view text, bool is_integer, const Range& range);

/// The value of a decimal number such as 12, -1.5 or 1e3, the nearest there is; nothing for other
/// text.
std::optional<double> parse_decimal(std::string_view text);

}  // namespace tessera
