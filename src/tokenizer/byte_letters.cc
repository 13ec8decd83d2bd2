#include <array>

#include "tokenizer/text/unicode.h"
#include "tokenizer/tokenizer_json.h"

namespace tessera {
namespace {

/// GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes, in order,
/// for the characters from U+0100 on.
struct ByteLetters {
  std::array<char32_t, 256> letters{};
  std::array<int, 512> bytes{};  ///< by letter; -1: none

  constexpr ByteLetters() {
    bytes.fill(-1);
    char32_t next = 256;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable =
          (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      letters[byte] = printable ? static_cast<char32_t>(byte) : next++;
      bytes[letters[byte]] = byte;
    }
  }
};
constexpr ByteLetters kByteLetters;

}  // namespace

bool decode_byte_letters(std::string_view token, std::string& bytes) {
  bytes.clear();
  for (size_t i = 0; i < token.size();) {
    const Character character = decode_character(token, i);
    const bool known = character.valid && character.code < kByteLetters.bytes.size() &&
                       kByteLetters.bytes[character.code] >= 0;
    if (!known) return false;
    bytes += static_cast<char>(kByteLetters.bytes[character.code]);
    i += character.num_bytes;
  }
  return true;
}

std::string encode_byte_letters(std::string_view bytes) {
  std::string letters;
  for (const char byte : bytes) {
    append_utf8(kByteLetters.letters[static_cast<unsigned char>(byte)], letters);
  }
  return letters;
}

}  // namespace tessera
