#include "core/text/message.h"

#include <fmt/format.h>

namespace tessera {
namespace {

constexpr size_t kMost = 2000;
constexpr size_t kEnd = 500;

/// The begin of the UTF-8 character that holds this byte.
size_t character_at(const std::string& text, size_t position) {
  while (position > 0 && (static_cast<unsigned char>(text[position]) & 0xC0U) == 0x80U) --position;
  return position;
}

}  // namespace

std::string shorten_message(const std::string& text) {
  if (text.size() <= kMost) return text;
  const size_t first = character_at(text, kMost - kEnd);
  const size_t last = character_at(text, text.size() - kEnd);
  return fmt::format("{} ... ({} bytes left out) ... {}", text.substr(0, first), last - first,
                     text.substr(last));
}

}  // namespace tessera
