// Ranks that are lost at random moments of their exchanges, hundreds of times: whoever is left ends
// in time and says for whom it waited, and nothing of them stays on the machine.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>

#include "comm/testing/run_program.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// The processes that have memory of Tessera's ranks mapped.
int count_mapped() {
  int found = 0;
  for (const auto& process : fs::directory_iterator("/proc")) {
    std::ifstream maps(process.path() / "maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find("memfd:tessera_ranks") != std::string::npos) ++found;
    }
  }
  return found;
}

int count_files(const std::string& folder) {
  const fs::directory_iterator files(folder);
  return static_cast<int>(std::distance(begin(files), end(files)));
}

TEST(ShmFaults, HundredsOfKillsAreNamedByAllOthers) {
  constexpr int kKills = 300;
  const int files = count_files("/dev/shm");
  for (int i = 0; i < kKills; ++i) {
    const int ranks = 2 + i % 3;
    const std::string last = std::to_string(ranks - 1);
    const ProgramResult result =
        run_program(kRankProgram + "alone " + std::to_string(ranks) + " lose-in-exchange 9", 30);
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
  EXPECT_EQ(count_mapped(), 0);
  EXPECT_EQ(count_files("/dev/shm"), files);
}

TEST(ShmFaults, StopsAreNamedWhenTheTimeIsUp) {
  constexpr int kStops = 10;
  for (int i = 0; i < kStops; ++i) {
    const ProgramResult result = run_program(kRankProgram + "torchrun 3 lose-in-exchange 19", 60);
    ASSERT_NE(result.code, 0) << result.output;
    ASSERT_LT(result.seconds, 30) << result.output;
    ASSERT_TRUE(std::regex_search(result.output, std::regex("missing rank [0-9 ]*2: ")))
        << result.output;
  }
  EXPECT_EQ(count_mapped(), 0);
}

}  // namespace
}  // namespace tessera
