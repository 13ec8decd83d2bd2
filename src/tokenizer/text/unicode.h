#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

inline constexpr char32_t kNumCharacters = 0x110000;

/// A character of a text and the bytes it takes. A byte that starts no valid UTF-8 counts as a
/// character of its own, `valid` being false.
struct Character {
  char32_t code = 0;
  uint32_t num_bytes = 1;
  bool valid = false;
};

/// The character that starts at a position; position < text.size().
Character decode_character(std::string_view text, size_t position);
/// The character that ends at a position; position > 0.
Character decode_character_before(std::string_view text, size_t position);
void append_utf8(char32_t code, std::string& text);

/// How texts are split into words distinguishes no more than this; bytes that are not UTF-8 count
/// as kOther.
enum class CharacterClass : uint8_t { kOther, kLetter, kNumber, kSpace };

/// By Unicode 16: \p{L}, \p{N}, White_Space.
CharacterClass character_class(char32_t code);
inline CharacterClass character_class(const Character& character) {
  return character.valid ? character_class(character.code) : CharacterClass::kOther;
}
/// Letter, mark, decimal digit, connector or join control: what `\w` stands for in the matching of
/// added tokens.
bool is_word_character(const Character& character);

/// A set of characters as sorted ranges, both ends within.
struct CharacterRange {
  char32_t first = 0;
  char32_t last = 0;
};

/// The characters of a general category ("Lu") or of a group of them ("L"); nothing for another
/// name.
std::optional<std::vector<CharacterRange>> category_ranges(std::string_view name);

}  // namespace tessera
