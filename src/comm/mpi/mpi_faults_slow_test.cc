// Ranks that die, fail, come late or are stopped, for real. mpirun takes seconds to end a job that
// fails, whatever the ranks do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/testing/run_program.h"

namespace tessera {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

// From the fault to the end of all processes.
constexpr double kEndSeconds = 30;

class MpiFaults : public testing::Test {
 protected:
  void SetUp() override {
    if (!have_mpirun()) GTEST_SKIP() << "Open MPI's mpirun is not installed";
  }
};

TEST_F(MpiFaults, EightRanksPassAllChecks) {
  const ProgramResult result = run_ranks(8, "all");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST_F(MpiFaults, ManyRanksLoseOne) {
  const ProgramResult result = run_ranks(8, "lose");
  EXPECT_NE(result.code, 0);
  EXPECT_LT(result.seconds, kEndSeconds);
  EXPECT_EQ(count_text(result.output, " s for all_reduce 1 of group \"world\""), 7)
      << result.output;
}

TEST_F(MpiFaults, ALateRankIsNamed) {
  const ProgramResult result = run_ranks(4, "late 60");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_LT(result.seconds, kEndSeconds);
  EXPECT_THAT(result.output, ContainsRegex("missing rank [0-9 ]*3: the time limit is 3 s"));
}

// A rank that is stopped holds nobody for longer than the time limit, wherever the others wait for
// it: while MPI starts, while groups are made, and after the work.
void expect_ends(const std::string& what, const std::string& message) {
  const ProgramResult result = run_ranks(3, what);
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_LT(result.seconds, kEndSeconds);
  EXPECT_THAT(result.output, ContainsRegex("tessera: rank [01] waited [0-9.]+ s " + message +
                                           ": the time limit is 3 s"));
}

TEST_F(MpiFaults, ARankThatStopsBeforeMpiStarts) {
  expect_ends("stop-at-start", "in MPI_Init_thread, for another rank that did not come");
}

TEST_F(MpiFaults, ARankThatStopsWhileGroupsAreMade) {
  expect_ends("stop-in-setup",
              "for barrier 0 of group \"world\" \\(ranks 0 1 2\\), missing rank 2");
}

TEST_F(MpiFaults, ARankThatStopsAtTheEnd) {
  expect_ends("stop-at-end", "for barrier 0 of group \"end\" \\(ranks 0 1 2\\), missing rank 2");
}

TEST_F(MpiFaults, AnExceptionOfOneRankEndsAll) {
  const ProgramResult result = run_ranks(3, "one-fails");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_LT(result.seconds, kEndSeconds);
  EXPECT_EQ(count_text(result.output, "tessera: rank 2: the disk is full"), 1) << result.output;
}

TEST_F(MpiFaults, AMistakeOfAllIsToldOnce) {
  const ProgramResult result = run_ranks(4, "all-fail");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_EQ(count_text(result.output, "a mistake in the configuration"), 1) << result.output;
}

TEST_F(MpiFaults, AMessageOfAnotherSizeIsFound) {
  const ProgramResult result = run_ranks(2, "size");
  EXPECT_EQ(result.code, 1) << result.output;
  EXPECT_THAT(result.output,
              HasSubstr("rank 1: internal error: 400 bytes came from member 0 of the group where "
                        "404 were expected"));
}

TEST_F(MpiFaults, LaunchingSharesTheCores) {
  const ProgramResult result = run_program("env -u OMP_NUM_THREADS " + std::string(kRankProgram) +
                                           "launch 2 environment OMP_NUM_THREADS");
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(result.output, ContainsRegex("rank 0: [1-9]"));
  EXPECT_THAT(result.output, ContainsRegex("rank 1: [1-9]"));
}

TEST_F(MpiFaults, InterruptedLaunchAsksAllRanksToStop) {
  const ProgramResult result = run_and("launch", "kill -INT $p");
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_EQ(count_text(result.output, "saved\n"), 3) << result.output;
}

TEST_F(MpiFaults, TwiceInterruptedLaunchEndsAllRanks) {
  const ProgramResult result =
      run_and("launch",
              "kill -STOP $(sed -n \"s/^process //p\" $out); kill -TERM $p; "
              "sleep 0.3; kill -TERM $p");
  EXPECT_NE(result.code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("alive 0"));
  EXPECT_LT(result.seconds, kEndSeconds);
}

TEST_F(MpiFaults, KilledLaunchLeavesNoRanks) {
  const ProgramResult result = run_and("launch", "kill -KILL $p");
  EXPECT_NE(result.code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("alive 0"));
  EXPECT_LT(result.seconds, kEndSeconds);
}

TEST_F(MpiFaults, KilledMpirunLeavesNoRanks) {
  const ProgramResult result = run_and("launch", "kill -KILL $(pgrep -P $p mpirun)");
  EXPECT_NE(result.code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("alive 0"));
  EXPECT_LT(result.seconds, kEndSeconds);
}

TEST_F(MpiFaults, StoppedMpirunSaysWhatRanksWaitedFor) {
  const ProgramResult result = run_and("launch", "kill -TERM $(pgrep -P $p mpirun)");
  EXPECT_NE(result.code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("(SIGTERM)"));
  EXPECT_THAT(result.output, Not(HasSubstr("saved")));
  EXPECT_THAT(result.output, HasSubstr("alive 0"));
}

}  // namespace
}  // namespace tessera
