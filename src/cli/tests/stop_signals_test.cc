#include <cstring>

#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

/// A bit for each signal that the thread has blocked, from its status in /proc.
uint64_t blocked_signals(const fs::path& task) {
  std::ifstream status(task / "status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("SigBlk:")) return std::stoull(line.substr(7), nullptr, 16);
  }
  ADD_FAILURE() << task << " has no SigBlk";
  return 0;
}

/// Threads of a process that take the signal.
std::vector<pid_t> takers(pid_t process, int signal) {
  std::vector<pid_t> found;
  for (const auto& task : fs::directory_iterator(fmt::format("/proc/{}/task", process))) {
    if ((blocked_signals(task) >> (signal - 1) & 1) == 0)
      found.push_back(std::stoi(task.path().filename().string()));
  }
  return found;
}

/// oneDNN's products of small matrices, with sums as long as this vocabulary's, keep their stack
/// pointer in the heap: a signal's handler on a thread that computes would destroy what lies there.
TEST_F(CliTest, StopSignalsNeverReachThreadsThatCompute) {
  ChildProcess child(train("one", {"--train.steps=1000000"}), 0, {{"OMP_NUM_THREADS", "2"}},
                     [] { std::signal(SIGHUP, SIG_DFL); });
  ASSERT_NE(child.read_line_with("  5/"), "");
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    const std::vector<pid_t> found = takers(child.id(), signal);
    ASSERT_EQ(found.size(), 1) << strsignal(signal);
    EXPECT_NE(found.front(), child.id()) << strsignal(signal);
  }
  child.send(SIGTERM);
  const Finished finished = child.wait();
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.out, HasSubstr("stopped by signal"));
}

}  // namespace
}  // namespace tessera
