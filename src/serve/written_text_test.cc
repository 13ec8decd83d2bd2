#include "serve/written_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/random.h"

namespace tessera {
namespace {

/// What a text comes to, and its pieces.
struct Pieces {
  std::vector<std::string> texts;
  std::string whole;
  size_t num_tokens = 0;
  bool stopped = false;
};

/// Writes bytes one by one, up to a stop.
Pieces write_bytes(const std::string& bytes, const std::vector<std::string>& stop) {
  const auto tokenizer = make_byte_tokenizer();
  WrittenText written(*tokenizer, stop);
  Pieces result;
  const auto take = [&](const TextPiece& piece) {
    if (!piece.text.empty()) result.texts.push_back(piece.text);
    result.whole += piece.text;
    result.num_tokens += piece.tokens.size();
    EXPECT_EQ(piece.tokens.size(), piece.offsets.size());
  };
  for (const char byte : bytes) {
    take(written.add({{.id = static_cast<unsigned char>(byte)}, {}}));
    if (written.stopped()) break;
  }
  take(written.finish());
  result.stopped = written.stopped();
  return result;
}

TEST(WrittenText, BytesComeAtOnceWithoutAStop) {
  const Pieces pieces = write_bytes("abc", {});
  EXPECT_THAT(pieces.texts, ::testing::ElementsAre("a", "b", "c"));
  EXPECT_EQ(pieces.num_tokens, 3);
  EXPECT_FALSE(pieces.stopped);
}

TEST(WrittenText, CharactersComeWhole) {
  EXPECT_THAT(write_bytes("a\xC3\xA9\xE2\x82\xACz", {}).texts,
              ::testing::ElementsAre("a", "\xC3\xA9", "\xE2\x82\xAC", "z"));
  EXPECT_EQ(write_bytes("\xF0\x9F\x98", {}).whole, "\xEF\xBF\xBD");  // one cut off at the end
}

TEST(WrittenText, StopStringsEndTheText) {
  const Pieces pieces = write_bytes("one two three", {"tw", "three"});
  EXPECT_EQ(pieces.whole, "one ");
  EXPECT_EQ(pieces.num_tokens, 4);
  EXPECT_TRUE(pieces.stopped);
  EXPECT_EQ(write_bytes("one two", {"two!"}).whole, "one two");  // a beginning alone is no stop
  EXPECT_EQ(write_bytes("aab", {"ab"}).whole, "a");
  EXPECT_EQ(write_bytes("abcabd", {"abd"}).whole, "abc");
  EXPECT_EQ(write_bytes("xyz", {"x"}).whole, "");
}

/// The same text in pieces as at once, for random bytes and stops.
TEST(WrittenText, PiecesMakeUpTheText) {
  Random random(3, 3);
  for (int i = 0; i < 2000; ++i) {
    const auto draw = [&](uint64_t most) {
      std::string text;
      const uint64_t length = random.next_below(most);
      for (uint64_t j = 0; j < length; ++j) text += "ab\xC3\xA9\xE2\x82\xFF"[random.next_below(7)];
      return text;
    };
    const std::string bytes = draw(12);
    std::vector<std::string> stops;
    if (const std::string stop = draw(4); !stop.empty()) stops.push_back(stop);
    const size_t end = stops.empty() ? std::string::npos : bytes.find(stops[0]);
    const Pieces pieces = write_bytes(bytes, stops);
    EXPECT_EQ(pieces.stopped, end != std::string::npos);
    EXPECT_EQ(pieces.whole, to_valid_utf8(bytes.substr(0, end))) << to_valid_utf8(bytes);
    EXPECT_EQ(pieces.num_tokens, std::min(end, bytes.size()));
  }
}

}  // namespace
}  // namespace tessera
