#include "train/plan/context_times.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "data/token_file_writer.h"
#include "train/testing/tiny_run.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

TEST(ContextTimes, CountPairsOfRanks) {
  const std::vector<int32_t> whole = {0, 8};
  EXPECT_THAT(pairs_of_ring(whole, {.row_length = 8}), ElementsAre(36));
  // Chunks of two tokens: the first and last, the two in the middle.
  EXPECT_THAT(pairs_of_ring(whole, {.row_length = 8, .ring = 2}), ElementsAre(18, 18));
  const std::vector<int32_t> packed = {0, 4, 8};
  EXPECT_THAT(pairs_of_ring(packed, {.row_length = 8, .ring = 2}), ElementsAre(10, 10));
  const std::vector<int32_t> uneven = {0, 6, 8};
  EXPECT_THAT(pairs_of_ring(uneven, {.row_length = 8, .ring = 2}), ElementsAre(6, 18));
  EXPECT_THAT(pairs_of_ring(packed, {.row_length = 8, .ring = 2, .by_sequence = true}),
              ElementsAre(10, 10));
}

/// One document in a hundred is fifty times as long as the others.
std::shared_ptr<const TokenFile> write_heavy_tail(const std::string& prefix) {
  TokenFileWriter writer(prefix, 64);
  for (int i = 0; i < 1000; ++i) {
    const std::vector<int32_t> document(i % 100 == 3 ? 4000 : 80, 7);
    writer.append(document);
    writer.end_document();
  }
  writer.finish();
  return std::make_shared<const TokenFile>(prefix, 64);
}

TEST(ContextTimes, HeavyTailsTakeLessWithDegreesOfTheirOwn) {
  const testing::TemporaryFolder folder;
  Settings settings = testing::tiny_settings(folder);
  settings.model.vocab_size = 64;
  settings.model.moe.balance_scope = BalanceTokens::kSequence;
  settings.data.sequence_length = 4096;
  settings.data.split_documents = true;
  settings.train.micro_batch = 1;
  settings.train.global_batch = 8;
  settings.parallel.layout = {.cp = 2, .dp = 2, .ep = 4};
  settings.parallel.dynamic_cp = true;
  const BatchSource source(write_heavy_tail(folder.file("tokens")),
                           {.sequence_length = 4096,
                            .micro_batch_size = 1,
                            .num_micro_batches = 8,
                            .split_documents = true,
                            .packing = Packing::kBestFit},
                           Split::kTrain);
  ContextCosts costs = simulate_costs(settings, 4, load_hardware("epyc-core"));
  EXPECT_GT(costs.token, 0);
  EXPECT_GT(costs.pair, 0);
  EXPECT_GT(costs.exchange, 0);
  costs = {.token = 1, .pair = 1};  // attention is nearly all
  settings.parallel.layout.cp = 1;
  settings.parallel.layout.dp = 4;
  const ContextComparison step = compare_contexts(settings, 4, source, costs, 0);
  EXPECT_EQ(step.longest, 4000);
  EXPECT_EQ(step.fixed.micro_batches, 2);
  EXPECT_EQ(step.fixed.groups, (std::map<int64_t, int64_t>{{1, 8}}));
  EXPECT_GT(step.ratio(), 1.35);
  EXPECT_LE(step.dynamic.mean_seconds, step.dynamic.seconds * 1.0001);
  EXPECT_LE(step.fixed.mean_seconds, step.fixed.seconds * 1.0001);
}

}  // namespace
}  // namespace tessera
