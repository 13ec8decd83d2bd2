#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// What stands inside a PCRE2 character class for the characters of a general category ("L", "Lu")
/// of Unicode 16: PCRE2's own category and what its older Unicode lacks. Nothing for another name.
std::optional<std::string> category_items(std::string_view name);

}  // namespace tessera
