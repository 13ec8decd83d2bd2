#include "core/text/utf8.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace tessera {
namespace {

std::string encode(uint32_t code) {
  const auto tail = [](uint32_t bits) { return static_cast<char>(0x80 | (bits & 0x3F)); };
  if (code < 0x80) return {static_cast<char>(code)};
  if (code < 0x800) return {static_cast<char>(0xC0 | code >> 6), tail(code)};
  if (code < 0x10000) return {static_cast<char>(0xE0 | code >> 12), tail(code >> 6), tail(code)};
  return {static_cast<char>(0xF0 | code >> 18), tail(code >> 12), tail(code >> 6), tail(code)};
}

TEST(Utf8Test, AcceptsEveryCharacterAndNoSurrogate) {
  for (uint32_t code = 0; code < 0x110000; ++code) {
    const std::string text = encode(code);
    const bool surrogate = code >= 0xD800 && code < 0xE000;
    ASSERT_EQ(valid_utf8_prefix(text), surrogate ? 0 : text.size()) << code;
  }
  EXPECT_EQ(valid_utf8_prefix(encode(0x110000)), 0);
}

TEST(Utf8Test, RefusesBrokenSequencesWhereTheyStand) {
  for (const std::string bad :
       {"\x80", "\xC0\x80", "\xC1\xBF", "\xC3", "\xC3(", "\xE0\x9F\xBF", "\xE2\x82",
        "\xF0\x8F\xBF\xBF", "\xF0\x9F\x98", "\xF5\x80\x80\x80", "\xFE", "\xFF"}) {
    for (const size_t before : {0, 1, 7, 8, 9, 20}) {
      const std::string text = std::string(before, 'a') + bad + std::string(9, 'b');
      EXPECT_EQ(valid_utf8_prefix(text), before);
    }
  }
  EXPECT_EQ(valid_utf8_prefix(""), 0);
}

}  // namespace
}  // namespace tessera
