#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

/// Bytes that a text such as "80GiB", "1.5 TiB", "500 MB" or "4096 B" names: KiB, MiB, GiB and TiB
/// are powers of 1024, KB, MB, GB and TB powers of 1000, in any case of letters. Throws UserError
/// that names `key` for a number without a unit, an unknown unit, and what is not from 1 byte to
/// 2^60.
int64_t parse_byte_size(std::string_view key, const std::string& text);

}  // namespace tessera
