// Ranks that are lost at random moments of their exchanges, hundreds of times: whoever is left ends
// in time and says for whom it waited, and nothing of them stays on the machine.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>

#include "comm/testing/run_program.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// In the environment of the ranks of this test, among others that run at the same time.
std::string make_mark() {
  return "SHM_FAULTS_TEST=" + std::to_string(getpid());
}

/// The processes of this test's ranks that are still there. Their memory has no names, so it is
/// gone with them.
int count_ranks() {
  int found = 0;
  for (const auto& process : fs::directory_iterator("/proc")) {
    std::ifstream file(process.path() / "environ");
    const std::string environment(std::istreambuf_iterator<char>(file), {});
    if (environment.find(make_mark()) != std::string::npos) ++found;
  }
  return found;
}

TEST(ShmFaults, HundredsOfKillsAreNamedByAllOthers) {
  constexpr int kKills = 300;
  for (int i = 0; i < kKills; ++i) {
    const int ranks = 2 + i % 3;
    const std::string last = std::to_string(ranks - 1);
    const ProgramResult result = run_program(
        make_mark() + " " + kRankProgram + "alone " + std::to_string(ranks) + " lose-in-exchange 9",
        30);
    ASSERT_EQ(result.code, 137) << result.output;
    ASSERT_LT(result.seconds, 15) << result.output;
    // On a busy machine a rank may look only when others have ended because of the first.
    const std::regex said(
        "tessera: rank [0-9]+ waited [0-9.]+ s for [^\n]*missing rank [0-9 ]+: rank");
    const auto begin = std::sregex_iterator(result.output.begin(), result.output.end(), said);
    ASSERT_EQ(std::distance(begin, std::sregex_iterator()), ranks - 1) << result.output;
    ASSERT_TRUE(std::regex_search(result.output, std::regex(": rank " + last + " (at|\\()")))
        << result.output;
  }
  EXPECT_EQ(count_ranks(), 0);
}

TEST(ShmFaults, StopsAreNamedWhenTheTimeIsUp) {
  constexpr int kStops = 10;
  for (int i = 0; i < kStops; ++i) {
    const ProgramResult result =
        run_program(make_mark() + " " + kRankProgram + "torchrun 3 lose-in-exchange 19", 60);
    ASSERT_NE(result.code, 0) << result.output;
    ASSERT_LT(result.seconds, 30) << result.output;
    ASSERT_TRUE(std::regex_search(result.output, std::regex("missing rank [0-9 ]*2: ")))
        << result.output;
  }
  EXPECT_EQ(count_ranks(), 0);
}

}  // namespace
}  // namespace tessera
