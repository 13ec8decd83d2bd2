#include "core/text/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace tessera {
namespace {

bool is_continuation(uint8_t byte) {
  return (byte & 0xC0) == 0x80;
}

/// Bytes of the valid sequence at the start of `text`, or 0.
size_t sequence_length(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (!is_continuation(byte(i))) return 0;
  }
  const uint8_t second = byte(1);
  const bool overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
  const bool outside = (lead == 0xED && second > 0x9F) || (lead == 0xF4 && second > 0x8F);
  return overlong || outside ? 0 : length;
}

bool eight_ascii(const char* text) {
  uint64_t word = 0;
  std::memcpy(&word, text, sizeof(word));
  return (word & 0x8080808080808080ULL) == 0;
}

}  // namespace

size_t valid_utf8_prefix(std::string_view text) {
  size_t position = 0;
  while (position < text.size()) {
    if (text.size() - position >= 8 && eight_ascii(text.data() + position)) {
      position += 8;
      continue;
    }
    const size_t length = sequence_length(text.substr(position));
    if (length == 0) break;
    position += length;
  }
  return position;
}

bool is_ascii(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

}  // namespace tessera
