#include "tokenizer/tokenizer.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace tessera {
namespace {

TEST(ByteTokenizerTest, RoundTripsEveryByte) {
  const auto tokenizer = make_tokenizer({});
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
  std::vector<int32_t> ids = {tokenizer->end_of_document()};
  tokenizer->encode(text, ids);
  ASSERT_EQ(ids.size(), 257);
  for (int byte = 0; byte < 256; ++byte) EXPECT_EQ(ids[byte + 1], byte);
  EXPECT_EQ(tokenizer->decode(ids), text);
  EXPECT_THROW(tokenizer->decode(std::vector<int32_t>{257}), UserError);
  EXPECT_THROW(tokenizer->decode(std::vector<int32_t>{-1}), UserError);
  EXPECT_THROW(make_tokenizer({.path = "bpe", .end_of_document = {}}), UserError);
}

}  // namespace
}  // namespace tessera
