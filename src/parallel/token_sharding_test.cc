#include "parallel/token_sharding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/random.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

TEST(TokenSharding, ZigzagOfTwoRowsOverTwoRanks) {
  const TokenSharding sharding{.num_rows = 2, .row_length = 8, .ring = 2};
  EXPECT_THAT(ring_tokens(sharding, 0), ElementsAre(0, 1, 6, 7, 8, 9, 14, 15));
  EXPECT_THAT(ring_tokens(sharding, 1), ElementsAre(2, 3, 4, 5, 10, 11, 12, 13));
}

TEST(TokenSharding, PartsOfOnePlaceOfTheRingAreNeighbours) {
  const TokenSharding sharding{.num_rows = 2, .row_length = 8, .ring = 2, .all_to_all = 2, .tp = 2};
  EXPECT_THAT(local_tokens(sharding, 0, 0, 0), ElementsAre(0, 1));
  EXPECT_THAT(local_tokens(sharding, 0, 0, 1), ElementsAre(6, 7));
  EXPECT_THAT(local_tokens(sharding, 0, 1, 0), ElementsAre(8, 9));
  EXPECT_THAT(local_tokens(sharding, 1, 1, 1), ElementsAre(12, 13));
}

TEST(TokenSharding, WithoutARingTokensStayInOrder) {
  const TokenSharding sharding{.num_rows = 1, .row_length = 9, .all_to_all = 3};
  check_token_sharding(sharding);
  EXPECT_THAT(local_tokens(sharding, 0, 1, 0), ElementsAre(3, 4, 5));
}

TokenSharding random_sharding(Random& random) {
  const auto draw = [&](uint64_t bound) { return static_cast<int64_t>(random.next_below(bound)); };
  TokenSharding sharding{.num_rows = 1 + draw(5),
                         .row_length = 1,
                         .ring = 1 + draw(5),
                         .all_to_all = 1 + draw(4),
                         .tp = 1 + draw(4)};
  const int64_t ranks = sharding.ring * sharding.all_to_all * sharding.tp;
  const int64_t chunks = sharding.ring == 1 ? 1 : 2 * sharding.ring;
  sharding.row_length =
      std::lcm(chunks, ranks / std::gcd(ranks, sharding.num_rows)) * (1 + draw(4));
  return sharding;
}

TEST(TokenSharding, EveryTokenOnceAndEquallyMany) {
  Random random(1, 1);
  for (int i = 0; i < 200; ++i) {
    const TokenSharding sharding = random_sharding(random);
    check_token_sharding(sharding);
    std::vector<int64_t> all;
    for (int64_t r = 0; r < sharding.ring; ++r) {
      std::vector<int64_t> joined;
      for (int64_t u = 0; u < sharding.all_to_all; ++u) {
        for (int64_t t = 0; t < sharding.tp; ++t) {
          const std::vector<int64_t> tokens = local_tokens(sharding, r, u, t);
          EXPECT_EQ(std::ssize(tokens), sharding.tokens_per_rank());
          joined.insert(joined.end(), tokens.begin(), tokens.end());
        }
      }
      EXPECT_EQ(joined, ring_tokens(sharding, r));
      EXPECT_TRUE(std::ranges::is_sorted(joined));
      all.insert(all.end(), joined.begin(), joined.end());
    }
    std::vector<int64_t> expected(sharding.num_rows * sharding.row_length);
    std::iota(expected.begin(), expected.end(), 0);
    std::ranges::sort(all);
    EXPECT_EQ(all, expected);
  }
}

TEST(TokenSharding, RanksOfARingSeeEquallyManyKeys) {
  for (const int64_t ring : {1, 2, 3, 4, 8}) {
    const TokenSharding sharding{.num_rows = 2, .row_length = 2 * ring * 7, .ring = ring};
    const int64_t length = sharding.row_length;
    for (int64_t r = 0; r < ring; ++r) {
      int64_t pairs = 0;
      for (const int64_t token : ring_tokens(sharding, r)) pairs += token % length + 1;
      EXPECT_EQ(pairs, 2 * (length * (length + 1) / 2) / ring);
    }
  }
}

auto refuses(const auto& message) {
  return ThrowsMessage<UserError>(message);
}

TEST(TokenSharding, RefusesRowsThatDoNotDivide) {
  EXPECT_THAT([] { check_token_sharding({.num_rows = 1, .row_length = 100, .ring = 4}); },
              refuses(AllOf(HasSubstr("data.sequence_length 100"), HasSubstr("parallel.cp 4"),
                            HasSubstr("in 8 equal chunks"),
                            HasSubstr("take data.sequence_length 96 or 104, or"),
                            Not(HasSubstr("take train.micro_batch")))));
  EXPECT_THAT([] { check_token_sharding({.num_rows = 1, .row_length = 3, .ring = 2}); },
              refuses(HasSubstr("take data.sequence_length 4, or")));
}

TEST(TokenSharding, RefusesTokensThatDoNotDivide) {
  EXPECT_THAT(
      [] {
        check_token_sharding(
            {.num_rows = 2, .row_length = 16, .ring = 2, .all_to_all = 2, .tp = 3});
      },
      refuses(AllOf(HasSubstr("train.micro_batch 2 x data.sequence_length 16 = 32 tokens"),
                    HasSubstr("parallel.cp 4 (ring 2 x all-to-all 2) x parallel.tp 3 = 12 ranks"),
                    HasSubstr("take data.sequence_length 12 or 24, or train.micro_batch 3"))));
}

/// What a message recommends must be accepted.
TEST(TokenSharding, NearestChoicesAreValidAndNothingBetweenThemIs) {
  const auto accepted = [](const TokenSharding& sharding) {
    try {
      check_token_sharding(sharding);
      return true;
    } catch (const UserError&) {
      return false;
    }
  };
  TokenSharding sharding{.num_rows = 2, .row_length = 1, .ring = 2, .all_to_all = 2, .tp = 3};
  for (sharding.row_length = 1; sharding.row_length < 40; ++sharding.row_length) {
    EXPECT_EQ(accepted(sharding), sharding.row_length % 12 == 0) << sharding.row_length;
  }
}

TEST(TokenSharding, RefusesZeroes) {
  EXPECT_THAT([] { check_token_sharding({.num_rows = 0}); },
              refuses(HasSubstr("train.micro_batch is 0; it must be at least 1")));
}

}  // namespace
}  // namespace tessera
