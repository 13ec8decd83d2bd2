// Ranks that are processes of this machine and read each other's memory, joined by TCP.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/shm/memory_access.h"
#include "comm/testing/run_program.h"

namespace tessera {
namespace {

using testing::ContainsRegex;

ProgramResult run_torchrun(int num_ranks, const std::string& arguments) {
  return run_program(kRankProgram + "torchrun " + std::to_string(num_ranks) + " " + arguments);
}

class ShmRanks : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (const std::string why = why_memory_is_not_shared(); !why.empty()) GTEST_SKIP() << why;
  }
};

TEST_P(ShmRanks, PassAllChecks) {
  const ProgramResult result = run_torchrun(GetParam(), "read");
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_EQ(result.output, "");
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShmRanks, testing::Values(2, 3, 4, 5, 8));

TEST(ShmWorld, SomeMayBeOutOfReach) {
  const ProgramResult result = run_torchrun(5, "mixed");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST(ShmWorld, RanksMayKeepTheirMemoryToThemselves) {
  const ProgramResult result = run_torchrun(3, "off");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST(ShmWorld, AKilledRankIsNamedByAllOthers) {
  const ProgramResult result = run_program(kRankProgram + "alone 3 lose-in-exchange 9");
  EXPECT_EQ(result.code, 137) << result.output;
  EXPECT_LT(result.seconds, 20);
  for (const std::string rank : {"0", "1"}) {
    EXPECT_THAT(result.output, ContainsRegex("tessera: rank " + rank +
                                             " waited [0-9.]+ s for all_[a-z_]+ [0-9]+ of group "
                                             "\"world\" \\(ranks 0 1 2\\), missing rank [0-9 ]*2: "
                                             "rank 2 .*(has ended|closed its connection)"));
  }
}

TEST(ShmWorld, AStoppedRankIsNamedWhenTheTimeIsUp) {
  const ProgramResult result = run_torchrun(3, "lose-in-exchange 19");
  EXPECT_NE(result.code, 0) << result.output;
  EXPECT_LT(result.seconds, 30);
  EXPECT_THAT(result.output,
              ContainsRegex("missing rank [0-9 ]*2: (the time limit is 3 s|rank [01] .*ended)"));
}

}  // namespace
}  // namespace tessera
