#include "model/build/sequence_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/planned_world.h"
#include "model/run/model_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using testing::tiny_config;

constexpr int64_t kLength = 24;

StageGroups groups_of(int64_t rank, int64_t cp, int64_t tp = 1, int64_t inner = 1) {
  ParallelSpec parallel;
  parallel.layout.tp = tp;
  parallel.layout.cp = cp;
  if (inner > 1) {
    parallel.context = ContextExchange::kHierarchical;
    parallel.context_inner = inner;
  }
  const auto world = make_planned_world(rank, cp * tp);
  return join_stage_groups(*world, Layout(parallel.layout, cp * tp), parallel);
}

/// How often each head is some rank's.
std::vector<int64_t> count_owners(int64_t num_heads, int64_t cp, int64_t inner) {
  std::vector<int64_t> owners(num_heads);
  for (int64_t rank = 0; rank < cp; ++rank) {
    const IndexRange own = sequence_heads(groups_of(rank, cp, 1, inner), num_heads);
    for (int64_t head = own.begin; head < own.end(); ++head) ++owners[head];
  }
  return owners;
}

TEST(SequenceExchange, EveryHeadIsSomeRanks) {
  EXPECT_EQ(count_owners(8, 4, 1), std::vector<int64_t>(8, 1));
  EXPECT_EQ(count_owners(8, 4, 2), std::vector<int64_t>(8, 1));
  EXPECT_EQ(count_owners(12, 6, 3), std::vector<int64_t>(12, 1));
  EXPECT_EQ(count_owners(2, 4, 2), std::vector<int64_t>(2, 2));
  EXPECT_EQ(count_owners(1, 3, 1), std::vector<int64_t>(1, 3));
  EXPECT_EQ(sequence_heads(groups_of(0, 1), 5), (IndexRange{0, 5}));
}

void expect_refused(const ModelConfig& config, int64_t cp, int64_t tp, const char* message) {
  EXPECT_THAT([&] { check_shares(config, testing::tiny_shape(2, kLength), groups_of(0, cp, tp)); },
              ThrowsMessage<UserError>(HasSubstr(message)));
}

void expect_accepted(const ModelConfig& config, int64_t cp, int64_t tp) {
  EXPECT_NO_THROW(check_shares(config, testing::tiny_shape(2, kLength), groups_of(0, cp, tp)));
}

TEST(SequenceExchange, RefusesHeadsOfDeltaRulesThatRanksCannotShare) {
  ModelConfig config = tiny_config();
  config.delta_layers = {0};
  config.delta = {.num_key_heads = 2, .num_value_heads = 4};
  expect_accepted(config, 4, 1);
  expect_accepted(config, 2, 2);
  expect_refused(config, 3, 1,
                 "parallel.cp 3 does not divide delta.num_value_heads 4, which its ranks exchange "
                 "for tokens where layers hand a state from token to token; the nearest that does "
                 "is 2 or 4");
  expect_refused(config, 4, 2,
                 "parallel.cp 4 does not divide delta.num_value_heads over "
                 "parallel.tp, 2, which");
  config.delta = {.num_key_heads = 6, .num_value_heads = 12};
  expect_refused(config, 4, 1,
                 "parallel.cp 4 neither divides delta.num_key_heads 6 nor is a multiple of it");
}

TEST(SequenceExchange, RefusesHeadsAndChannelsThatRanksCannotShare) {
  ModelConfig mamba = tiny_config();
  mamba.mamba_layers = {0};
  mamba.mamba = {.num_heads = 6, .head_size = 4, .num_groups = 3, .state_size = 4};
  expect_accepted(mamba, 3, 1);
  expect_accepted(mamba, 6, 1);
  expect_refused(mamba, 2, 1, "parallel.cp 2 neither divides mamba.num_groups 3 nor");
  expect_refused(mamba, 4, 1, "parallel.cp 4 does not divide mamba.num_heads 6,");
  ModelConfig conv = tiny_config();
  conv.conv_layers = {0};
  expect_accepted(conv, 4, 2);
  expect_refused(conv, 3, 1, "parallel.cp 3 does not divide model.hidden_size 16,");
}

TEST(SequenceExchange, RefusesSequencesOverTensorParallelRanks) {
  ModelConfig config = tiny_config();
  config.conv_layers = {0};
  StageGroups groups = groups_of(0, 1, 2);
  EXPECT_NO_THROW(check_shares(config, testing::tiny_shape(2, kLength), groups));
  groups.policy.replicated_attention = true;
  EXPECT_THAT(
      [&] { check_shares(config, testing::tiny_shape(2, kLength), groups); },
      ThrowsMessage<UserError>(HasSubstr("the layers of model.conv_layers hand a state from "
                                         "token to token; spread heads instead")));
}

}  // namespace
}  // namespace tessera
