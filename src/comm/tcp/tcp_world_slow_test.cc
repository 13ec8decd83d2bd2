// Many ranks, and long messages.
#include <gtest/gtest.h>

#include "comm/testing/run_program.h"

namespace tessera {
namespace {

TEST(ManyTcpRanks, LoseOne) {
  const ProgramResult result = run_program(kRankProgram + "torchrun 8 lose");
  EXPECT_EQ(result.code, 137) << result.output;
  EXPECT_EQ(count_text(result.output, " s for all_reduce 1 of group \"world\""), 7)
      << result.output;
}

TEST(ManyTcpRanks, MoveGigabytes) {
  const ProgramResult result = run_program(kRankProgram + "torchrun 2 large 1500000000");
  EXPECT_EQ(result.code, 0) << result.output;
}

}  // namespace
}  // namespace tessera
