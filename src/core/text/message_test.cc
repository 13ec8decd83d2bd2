#include "core/text/message.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Message, OneThatFitsStays) {
  for (const size_t size : {0, 1, 2000})
    EXPECT_EQ(shorten_message(std::string(size, 'x')), std::string(size, 'x'));
}

TEST(Message, OfALongOneBeginAndEndStay) {
  const std::string text = "begin" + std::string(100'000, 'x') + "end";
  const std::string shown = shorten_message(text);
  EXPECT_LT(shown.size(), 2100);
  EXPECT_TRUE(shown.starts_with("beginxxx"));
  EXPECT_TRUE(shown.ends_with("xxxend"));
  EXPECT_NE(shown.find(" ... (98008 bytes left out) ... "), std::string::npos) << shown;
}

TEST(Message, NoCharacterIsCut) {
  for (const char* begin : {"", "a", "ab", "abc"}) {
    std::string text = begin;
    for (int i = 0; i < 3000; ++i) text += "\u20ac";  // three bytes
    const std::string shown = shorten_message(text);
    for (size_t i = shown.find("left out"); i < shown.size(); ++i) {
      if (shown[i] == '\xe2') {
        EXPECT_EQ(shown.substr(i, 3), "\u20ac");
      }
    }
    EXPECT_NE(static_cast<unsigned char>(shown[shown.find(" ... (") - 1]), 0xE2);
    EXPECT_EQ(shown.substr(shown.find(") ... ") + 6, 3), "\u20ac");
  }
}

}  // namespace
}  // namespace tessera
