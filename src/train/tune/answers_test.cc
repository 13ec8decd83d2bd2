#include "train/tune/answers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "train/testing/tiny_run.h"
#include "train/tune/answers_testing.h"

namespace tessera {
namespace {

/// Tokenizers that begin a text with a space do not begin an answer with one more.
TEST(EncodedAnswers, GoOnBehindTheirPrompts) {
  for (const char* name : {"sp_bpe_llama.model", "sentencepiece_style.json"}) {
    const auto path = std::filesystem::path(TESSERA_TEST_DATA) / "tokenizers" / name;
    const auto tokenizer = make_tokenizer({.path = path.string()});
    std::vector<int32_t> prompt, expected;
    tokenizer->encode("the day", prompt);
    tokenizer->encode("the day and the night", expected);
    expected.push_back(tokenizer->end_of_document());
    const Answer answer = encode_answer(*tokenizer, "the day", " and the night");
    EXPECT_EQ(answer.tokens, expected) << name;
    EXPECT_EQ(answer.first, std::ssize(prompt)) << name;
  }
}

/// Every answer is one stretch of a micro-batch, none longer than a row, whose work in attention is
/// about that of others.
TEST(AnswerBatches, ArePackedWholeAndEvenly) {
  const testing::TemporaryFolder folder;
  Settings own = testing::tiny_settings(folder);
  own.train.objective = Objective::kGrpo;
  own.data.packing = Packing::kBestFit;
  own.train.micro_batch = 3;
  own.train.global_batch = 48;
  own.data.sequence_length = 40;
  const auto answers = testing::draw_answers(48, 40);
  std::vector<std::vector<float>> weights;
  for (const Answer& answer : answers) weights.emplace_back(answer.num_tokens(), 1.0F);
  for (const int64_t fewest : {1, 16}) {
    const auto batches = AnswerBatches(own, fewest, 255, answers).weigh(weights);
    EXPECT_TRUE(fewest == 16 ? batches.size() == 16 : batches.size() < 14) << batches.size();
    std::multiset<std::vector<int32_t>> expected, found;
    for (const Answer& answer : answers)
      expected.insert({answer.tokens.begin(), answer.tokens.end() - 1});
    std::vector<double> work;
    for (const Batch& batch : batches) {
      ASSERT_EQ(batch.tokens.size(), 120U);
      ASSERT_EQ(batch.labels.size(), 120U);
      ASSERT_EQ(batch.cu_seqlens.back(), 120);
      work.push_back(0);
      int64_t num_valid = 0;
      for (size_t i = 1; i < batch.cu_seqlens.size(); ++i) {
        const int32_t begin = batch.cu_seqlens[i - 1];
        const int32_t end = batch.cu_seqlens[i];
        ASSERT_LT(begin, end);
        ASSERT_LE(end - begin, 40);
        for (int32_t at = begin; at < end; ++at) {
          EXPECT_EQ(batch.positions[at], at - begin);
          EXPECT_EQ(batch.weights[at] != 0, batch.labels[at] != kNoLabel);
          num_valid += batch.labels[at] != kNoLabel ? 1 : 0;
        }
        if (batch.tokens[begin] == 255) continue;
        found.insert({batch.tokens.begin() + begin, batch.tokens.begin() + end});
        work.back() += std::pow(end - begin, 2);
      }
      EXPECT_EQ(batch.num_valid, num_valid);
    }
    EXPECT_EQ(found, expected);
    if (fewest == 1) {
      EXPECT_LE(std::ranges::max(work) - std::ranges::min(work), 40 * 40);
    }
  }
}

}  // namespace
}  // namespace tessera
