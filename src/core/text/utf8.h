#pragma once

#include <cstddef>
#include <string_view>

namespace tessera {

/// Where the first byte stands that is not part of valid UTF-8 (RFC 3629: no overlong forms, no
/// surrogates, at most U+10FFFF), or text.size() when all of it is valid.
size_t valid_utf8_prefix(std::string_view text);

bool is_ascii(std::string_view text);

}  // namespace tessera
