#include "train/setup/rank_binding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> share(const std::string& machine, RankBinding mode,
                               const std::vector<int>& near) {
  std::vector<std::string> texts;
  for (const auto& processors : share_processors(parse_numa_nodes(machine), mode, near))
    texts.push_back(format_ranges(processors));
  return texts;
}

constexpr const char* kTwoSockets = "numa:2 core:4 pu:2";

TEST(ShareProcessors, GivesANodeToItsRanks) {
  EXPECT_THAT(share(kTwoSockets, RankBinding::kNuma, {-1, -1}), ElementsAre("0-7", "8-15"));
  EXPECT_THAT(share(kTwoSockets, RankBinding::kNuma, {-1, -1, -1}),
              ElementsAre("0-7", "0-7", "8-15"));
  EXPECT_THAT(share(kTwoSockets, RankBinding::kNuma, {-1}), ElementsAre("0-15"));
  EXPECT_THAT(share("numa:4 core:2 pu:1", RankBinding::kNuma, {-1, -1}), ElementsAre("0-3", "4-7"));
}

TEST(ShareProcessors, GoesWhereTheGpusAre) {
  EXPECT_THAT(share(kTwoSockets, RankBinding::kNuma, {1, 1, 0}),
              ElementsAre("8-15", "8-15", "0-7"));
  EXPECT_THAT(share(kTwoSockets, RankBinding::kCores, {1, 0, 1}),
              ElementsAre("8-11", "0-7", "12-15"));
  EXPECT_THAT(share(kTwoSockets, RankBinding::kNuma, {7, 7}), ElementsAre("0-7", "8-15"))
      << "a node that has no processors";
}

TEST(ShareProcessors, SharesCoresEvenly) {
  EXPECT_THAT(share(kTwoSockets, RankBinding::kCores, {-1, -1, -1, -1}),
              ElementsAre("0-3", "4-7", "8-11", "12-15"));
  EXPECT_THAT(share("numa:1 core:5 pu:1", RankBinding::kCores, {-1, -1}),
              ElementsAre("0-1", "2-4"));
  EXPECT_THAT(share("numa:1 core:2 pu:1", RankBinding::kCores, {-1, -1, -1}),
              ElementsAre("0", "0", "1"))
      << "more ranks than cores";
  EXPECT_THAT(share(kTwoSockets, RankBinding::kCores, {-1}), ElementsAre("0-15"));
}

}  // namespace
}  // namespace tessera
