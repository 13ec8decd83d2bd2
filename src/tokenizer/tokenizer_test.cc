#include "tokenizer/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// Tokenizers with the ids and texts that they must give: NAME.json or NAME.model beside
/// NAME.expected.json.
std::vector<fs::path> tokenizer_fixtures() {
  std::vector<fs::path> folders = {fs::path(TESSERA_TEST_DATA) / "tokenizers"};
  if (const char* more = std::getenv("TESSERA_TOKENIZER_FIXTURES")) folders.emplace_back(more);
  std::set<fs::path> found;
  for (const fs::path& folder : folders) {
    for (const auto& entry : fs::directory_iterator(folder)) {
      fs::path expected = entry.path();
      if (!path_exists(expected.replace_extension(".expected.json"))) continue;
      if (entry.path().extension() == ".json" || entry.path().extension() == ".model") {
        found.insert(entry.path());
      }
    }
  }
  return {found.begin(), found.end()};
}

class TokenizerFixture : public ::testing::TestWithParam<fs::path> {
 protected:
  TokenizerFixture() : tokenizer_(make_tokenizer({.path = GetParam().string()})) {
    fs::path expected = GetParam();
    cases_ = json::parse(read_text_file(expected.replace_extension(".expected.json")));
  }

  std::vector<int32_t> encode(const std::string& text) const {
    std::vector<int32_t> ids;
    tokenizer_->encode(text, ids);
    return ids;
  }

  std::unique_ptr<Tokenizer> tokenizer_;
  json cases_;
};

TEST_P(TokenizerFixture, GivesTheIds) {
  ASSERT_FALSE(cases_.empty());
  for (const json& sample : cases_) {
    EXPECT_EQ(encode(sample["text"]), sample["ids"].get<std::vector<int32_t>>()) << sample["text"];
  }
}

TEST_P(TokenizerFixture, DecodesToTheText) {
  for (const json& sample : cases_) {
    const auto ids = sample["ids"].get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer_->decode(ids), sample["decoded"].get<std::string>());
  }
}

TEST_P(TokenizerFixture, CutsWithoutChangingIds) {
  std::string text;
  for (const json& sample : cases_)
    text += sample["text"].get<std::string>() + "\nSome more text\n";
  const std::vector<int32_t> whole = encode(text);
  size_t num_cuts = 0;
  for (size_t limit = 1; limit < text.size(); limit += text.size() / 50 + 7) {
    const size_t at = tokenizer_->cut(text, limit);
    ASSERT_GT(at, 0U);
    ASSERT_LE(at, text.size());
    num_cuts += at < text.size() ? 1 : 0;
    std::vector<int32_t> ids = encode(text.substr(0, at));
    if (at < text.size()) tokenizer_->encode_continuation(text.substr(at), ids);
    ASSERT_EQ(ids, whole) << "cut at " << at;
  }
  // Those of the repository are of kinds that are known, except for sums of log-probabilities,
  // whose rounding depends on the whole text.
  const bool known = GetParam().string().starts_with(TESSERA_TEST_DATA) &&
                     GetParam().string().find("unigram") == std::string::npos;
  if (known) {
    EXPECT_GT(num_cuts, 0U);
  }
}

INSTANTIATE_TEST_SUITE_P(All, TokenizerFixture, ::testing::ValuesIn(tokenizer_fixtures()),
                         [](const auto& info) { return info.param.stem().string(); });

}  // namespace
}  // namespace tessera
