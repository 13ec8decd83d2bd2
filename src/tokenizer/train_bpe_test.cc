#include "tokenizer/train_bpe.h"

#include <gtest/gtest.h>
#include <omp.h>

#include "core/error.h"
#include "tokenizer/bpe_tokenizer.h"
#include "tokenizer/random_text.h"

namespace tessera {
namespace {

DocumentSource source_of(const std::vector<std::string>& documents) {
  return [&documents](const std::function<void(std::string_view)>& use) {
    for (const std::string& document : documents) use(document);
  };
}

std::vector<std::string> some_documents(size_t count) {
  Random random(3, 0);
  std::vector<std::string> documents;
  for (size_t i = 0; i < count; ++i) documents.push_back(random_text(random, 200));
  return documents;
}

std::unique_ptr<Tokenizer> open(const std::string& json) {
  TokenizerDescription description = parse_tokenizer_json(json, "trained");
  const int32_t end = find_token(description, "<|endoftext|>");
  return make_bpe_tokenizer(std::move(description), end);
}

class TrainBpe : public ::testing::TestWithParam<std::string> {};

TEST_P(TrainBpe, GivesATokenizerThatKnowsEveryText) {
  const std::vector<std::string> documents = some_documents(50);
  const BpeTrainingOptions options{.vocab_size = 600, .split = GetParam()};
  const auto tokenizer = open(train_bpe(options, source_of(documents)));
  EXPECT_EQ(tokenizer->vocab_size(), 600);
  EXPECT_EQ(tokenizer->end_of_document(), 0);
  Random random(4, 0);
  for (int i = 0; i < 500; ++i) {
    std::string text = random_text(random, random.next_below(30));
    if (GetParam() != "qwen") text += "\xFF\xC3 \xE2\x82";  // it normalizes, so text may change
    std::vector<int32_t> ids;
    tokenizer->encode(text, ids);
    if (GetParam() != "qwen") {
      EXPECT_EQ(tokenizer->decode(ids), text);
    }
    EXPECT_LE(ids.size(), 2 * text.size());
  }
}

TEST_P(TrainBpe, DoesNotDependOnOrderOrThreads) {
  std::vector<std::string> documents = some_documents(60);
  const BpeTrainingOptions options{.vocab_size = 500, .split = GetParam()};
  const int threads = omp_get_max_threads();
  const std::string expected = train_bpe(options, source_of(documents));
  std::ranges::reverse(documents);
  omp_set_num_threads(3);
  EXPECT_EQ(train_bpe(options, source_of(documents)), expected);
  omp_set_num_threads(threads);
}

INSTANTIATE_TEST_SUITE_P(All, TrainBpe, ::testing::Values("gpt2", "qwen", "llama3"));

TEST(TrainBpeTest, MergesTheMostFrequentPairFirst) {
  const std::vector<std::string> documents = {"low low low lower lowest newer newer wider"};
  const auto tokenizer =
      open(train_bpe({.vocab_size = 262, .min_frequency = 2}, source_of(documents)));
  std::vector<int32_t> ids;
  tokenizer->encode("low", ids);
  // "lo" and "low" are among the first merges: five of the eight words have them.
  ASSERT_EQ(ids.size(), 1U);
  EXPECT_EQ(tokenizer->decode(ids), "low");
}

TEST(TrainBpeTest, EndsWhenNoPairIsFrequentEnough) {
  const std::vector<std::string> documents = {"abcdef ghijkl"};
  const auto tokenizer =
      open(train_bpe({.vocab_size = 1000, .min_frequency = 2}, source_of(documents)));
  EXPECT_EQ(tokenizer->vocab_size(), 257);
}

TEST(TrainBpeTest, LeavesSpecialTokensOut) {
  const std::vector<std::string> documents(100, "<|endoftext|>");
  EXPECT_THROW(train_bpe({.vocab_size = 300}, source_of(documents)), UserError);
}

TEST(TrainBpeTest, RefusesOptionsThatCannotBeMet) {
  const std::vector<std::string> documents = {"text"};
  const auto train = [&](const BpeTrainingOptions& options) {
    return train_bpe(options, source_of(documents));
  };
  EXPECT_THROW(train({.vocab_size = 256}), UserError);
  EXPECT_THROW(train({.split = "gtp2"}), UserError);
  EXPECT_THROW(train({.min_frequency = 0}), UserError);
  EXPECT_THROW(train({.special_tokens = {"<s>", "<s>"}}), UserError);
  EXPECT_THROW(train({.special_tokens = {"a"}}), UserError);
}

}  // namespace
}  // namespace tessera
