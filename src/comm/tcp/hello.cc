#include "comm/tcp/hello.h"

#include <algorithm>

#include "core/error.h"

namespace tessera {

RunName make_run_name(const std::string& name) {
  RunName run{};
  std::copy_n(name.begin(), std::min(name.size(), run.size()), run.begin());
  return run;
}

Verdict judge(const Hello& hello, const Hello& expected) {
  if (hello.version != expected.version) return Verdict::kOtherVersion;
  if (hello.run != expected.run || hello.token != expected.token) return Verdict::kOtherRun;
  if (hello.num_ranks != expected.num_ranks) return Verdict::kOtherSize;
  return Verdict::kWelcome;
}

std::string describe_refusal(Verdict verdict, const Hello& hello) {
  switch (verdict) {
    case Verdict::kOtherVersion:
      return "it is of another version of Tessera: start all ranks with the same program";
    case Verdict::kOtherRun:
      return "it belongs to another run: give each run a port (MASTER_PORT or TESSERA_PORT) and a "
             "name (torchrun --rdzv-id) of its own";
    case Verdict::kOtherSize:
      return fmt::format("its run does not have {} ranks: set the same WORLD_SIZE for all",
                         hello.num_ranks);
    case Verdict::kRankTaken:
      return fmt::format("rank {} is there already: set a RANK of its own for each", hello.rank);
    case Verdict::kWelcome:
      break;
  }
  return "its answer is not understood";
}

}  // namespace tessera
