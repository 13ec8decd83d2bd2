#include "model/weights/hash_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace tessera {
namespace {

TEST(HashTable, IdsHaveDistinctExpertsAndExpertsAsManyIds) {
  for (const HashTableSpec& spec :
       {HashTableSpec{.vocab_size = 101, .top_k = 3, .num_experts = 8},
        HashTableSpec{.vocab_size = 7, .top_k = 4, .num_experts = 4},
        HashTableSpec{.vocab_size = 40, .top_k = 1, .num_experts = 1},
        HashTableSpec{.vocab_size = 0, .top_k = 2, .num_experts = 5},
        HashTableSpec{.vocab_size = 1000, .top_k = 6, .num_experts = 256}}) {
    const auto table = draw_hash_table(spec, 5, 9);
    ASSERT_EQ(std::ssize(table), spec.vocab_size * spec.top_k);
    std::vector<int64_t> counts(spec.num_experts);
    for (int64_t id = 0; id < spec.vocab_size; ++id) {
      const auto row = table.begin() + id * spec.top_k;
      EXPECT_EQ(std::ssize(std::set<float>(row, row + spec.top_k)), spec.top_k) << id;
      for (int64_t k = 0; k < spec.top_k; ++k) ++counts.at(static_cast<size_t>(row[k]));
    }
    const auto [least, most] = std::ranges::minmax(counts);
    EXPECT_LE(most - least, 1);
  }
}

TEST(HashTable, IsAFunctionOfSeedAndStream) {
  const HashTableSpec spec{.vocab_size = 50, .top_k = 2, .num_experts = 6};
  EXPECT_EQ(draw_hash_table(spec, 1, 2), draw_hash_table(spec, 1, 2));
  EXPECT_NE(draw_hash_table(spec, 1, 2), draw_hash_table(spec, 2, 2));
  EXPECT_NE(draw_hash_table(spec, 1, 2), draw_hash_table(spec, 1, 3));
}

}  // namespace
}  // namespace tessera
