#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace tessera {

/// Nothing but white space.
bool is_blank(std::string_view text);

/// Bytes of a file that are no valid UTF-8, and where the first one is.
struct TextDamage {
  int64_t count = 0;
  int64_t first = 0;
  /// Adds what was found behind this.
  void add(const TextDamage& later);
  bool operator==(const TextDamage&) const = default;
};

/// Looks through a stretch of a text file that begins at byte `offset` of its content and was not
/// cut inside a character. Throws UserError for a NUL byte: the file is no text.
TextDamage check_text(std::string_view text, const std::filesystem::path& path, int64_t offset);

/// Throws UserError when more than one byte in 1000 of a file's `content_bytes` is invalid.
void require_text(const TextDamage& damage, int64_t content_bytes,
                  const std::filesystem::path& path);

}  // namespace tessera
