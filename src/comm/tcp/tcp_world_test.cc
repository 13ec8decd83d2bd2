// Ranks that are processes, started as torchrun starts them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/testing/run_program.h"

namespace tessera {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;

ProgramResult run_torchrun(int num_ranks, const std::string& arguments,
                           const std::string& environment = "") {
  return run_program(environment + " " + kRankProgram + "torchrun " + std::to_string(num_ranks) +
                     " " + arguments);
}

class TcpRanks : public testing::TestWithParam<int> {};

TEST_P(TcpRanks, PassAllChecks) {
  const ProgramResult result = run_torchrun(GetParam(), "all");
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_EQ(result.output, "");
}

INSTANTIATE_TEST_SUITE_P(Ranks, TcpRanks, testing::Range(1, 9));

class TcpHosts : public testing::TestWithParam<std::string> {};

/// Ranks that are each told to be alone on their machines look rank 0 up by its name.
TEST_P(TcpHosts, RanksOfSeveralMachinesMeet) {
  const ProgramResult result =
      run_torchrun(3, "all", "LOCAL_WORLD_SIZE=1 MASTER_ADDR=" + GetParam());
  EXPECT_EQ(result.code, 0) << result.output;
}

INSTANTIATE_TEST_SUITE_P(Names, TcpHosts, testing::Values("127.0.0.1", "localhost", "$(hostname)"));

TEST(TcpWorld, HostsMayHaveIpv6Addresses) {
  if (run_program("grep -q 00000000000000000000000000000001 /proc/net/if_inet6").code != 0)
    GTEST_SKIP() << "no IPv6 here";
  const ProgramResult result = run_torchrun(3, "all", "LOCAL_WORLD_SIZE=1 MASTER_ADDR=::1");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST(TcpWorld, ALostRankEndsTheOthers) {
  const ProgramResult result = run_program(kRankProgram + "alone 3 lose");
  EXPECT_EQ(result.code, 137) << result.output;
  for (const std::string rank : {"0", "1"}) {
    EXPECT_THAT(result.output,
                ContainsRegex("tessera: rank " + rank +
                              " waited [0-9.]+ s for all_reduce 1 of group \"world\" "
                              "\\(ranks 0 1 2\\), missing rank 2: rank 2 .*(has ended|closed "
                              "its connection|reset by peer)"));
  }
}

TEST(TcpWorld, AnExceptionOfOneRankEndsAll) {
  const ProgramResult result = run_program(kRankProgram + "alone 3 one-fails");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_EQ(count_text(result.output, "tessera: rank 2: the disk is full"), 1) << result.output;
  for (const std::string rank : {"0", "1"}) {
    EXPECT_THAT(result.output, ContainsRegex("rank " + rank +
                                             " waited .* missing rank [0-9 ]*2: rank 2 at .* "
                                             "ended the job with exit code 2"));
  }
}

TEST(TcpWorld, AMistakeOfAllIsToldOnce) {
  const ProgramResult result = run_program(kRankProgram + "alone 4 all-fail");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_EQ(result.output, "tessera: rank 0: a mistake in the configuration\n");
}

TEST(TcpWorld, AMessageOfAnotherSizeIsFound) {
  const ProgramResult result = run_torchrun(2, "size");
  EXPECT_EQ(result.code, 1) << result.output;
  EXPECT_THAT(result.output,
              HasSubstr("rank 1: internal error: 400 bytes came from member 0 of the group where "
                        "404 were expected"));
}

TEST(TcpWorld, ALateRankIsNamed) {
  const ProgramResult result = run_torchrun(4, "late 60");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_LT(result.seconds, 30);
  EXPECT_THAT(result.output, HasSubstr("the time limit is 3 s"));
  // Whoever reaches the limit first ends the others.
  EXPECT_THAT(result.output, ContainsRegex("missing rank [0-9 ]*3: (the time limit is 3 s|rank "
                                           "[0-2] .*ended)"));
}

TEST(TcpWorld, ARankThatNeverComesIsNamed) {
  const ProgramResult result = run_program("WORLD_SIZE=4 " + kRankProgram + "alone 3 late 0");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_LT(result.seconds, 30);
  EXPECT_THAT(result.output,
              ContainsRegex("rank 0 waited 3\\.[0-9] s for rank 3 to connect to .*:[0-9]+ and "
                            "gave up: the time limit is 3 s"));
}

TEST(TcpWorld, AFirstRankThatNeverComesIsNamed) {
  const ProgramResult result =
      run_program("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=1 " +
                  kRankProgram + "late 0");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_THAT(result.output, ContainsRegex("rank 1 waited [23]\\.[0-9] s for rank 0 at localhost:1 "
                                           "and gave up: .*:1: Connection refused"));
}

TEST(TcpWorld, AnUnknownHostIsNamed) {
  const ProgramResult result = run_program(
      "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=no.such.host.invalid MASTER_PORT=1 " +
      kRankProgram + "late 0");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_THAT(result.output, HasSubstr("host no.such.host.invalid: no address is known"));
}

TEST(TcpWorld, ATakenPortIsNamed) {
  // The agent's own, which it does not say that it uses.
  const ProgramResult result =
      run_torchrun(2, "all", "TORCHELASTIC_USE_AGENT_STORE=False LOCAL_WORLD_SIZE=1");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_THAT(result.output, ContainsRegex("rank 0 cannot listen at .*: Address already in use.*"
                                           "set TESSERA_PORT to a free port"));
}

TEST(TcpWorld, AStoppedJobSaysWhatRanksWaitedFor) {
  const ProgramResult result = run_and("torchrun", "kill -TERM $p");
  EXPECT_NE(result.code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("(SIGTERM)"));
  EXPECT_THAT(result.output, HasSubstr("alive 0"));
}

TEST(TcpWorld, AKilledAgentLeavesNoRanks) {
  const ProgramResult result = run_and("torchrun", "kill -KILL $p");
  EXPECT_NE(result.code, 0) << result.output;
  EXPECT_THAT(result.output, ContainsRegex("the launcher .* has ended"));
  EXPECT_THAT(result.output, HasSubstr("alive 0"));
}

TEST(TcpWorld, AKilledAgentLeavesNoRanksThatJoin) {
  // The output ends when the last of its writers has ended.
  const ProgramResult result = run_program("WORLD_SIZE=4 " + kRankProgram +
                                           "torchrun 3 all & p=$!; sleep 1; kill -KILL $p; wait");
  EXPECT_LT(result.seconds, 20);
  EXPECT_THAT(result.output, ContainsRegex("the launcher .* ended while the ranks were joining"));
}

TEST(TcpWorld, AHungRankIsEndedByTheAgent) {
  // One is stopped, so that it cannot end itself; another is killed.
  const ProgramResult result =
      run_and("torchrun", "set -- $(sed -n \"s/^process //p\" $out); kill -STOP $1; kill -KILL $2");
  EXPECT_NE(result.code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("missing rank"));
  EXPECT_THAT(result.output, HasSubstr("alive 0"));
}

TEST(TcpWorld, AskedToStopAllRanksEndInOrder) {
  const ProgramResult result = run_and("torchrun", "kill -USR1 $(sed -n \"s/^process //p\" $out)");
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_EQ(count_text(result.output, "saved\n"), 3) << result.output;
  EXPECT_THAT(result.output, HasSubstr("alive 0"));
}

}  // namespace
}  // namespace tessera
