#include <sys/ptrace.h>

#include <algorithm>

#include "checkpoint/kill_testing.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using CheckpointKill = FolderTest;

TEST_F(CheckpointKill, AtManyRandomMoments) {
  kill_savers(folder_, 150, 2);
}

enum class Outcome { kKilled, kFinished, kNotAllowed };

/// Saves `step` in a child that is killed when it enters or leaves its `stop`-th system call.
Outcome save_until(const fs::path& root, int64_t step, int64_t stop) {
  const SteppedCheckpoint checkpoint(step);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(77);
    ::raise(SIGSTOP);
    checkpoint.save(root, 1);
    ::_exit(0);
  }
  int status = 0;
  for (int64_t i = 0; ::waitpid(child, &status, 0) == child && WIFSTOPPED(status); ++i) {
    if (i == stop) {
      ::kill(child, SIGKILL);
    } else {
      ::ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
    }
  }
  if (WIFSIGNALED(status)) return Outcome::kKilled;
  return WEXITSTATUS(status) == 0 ? Outcome::kFinished : Outcome::kNotAllowed;
}

/// Kills a save of `step`, over a checkpoint of step 1, at each of its system calls in turn.
void kill_at_every_call(const fs::path& root, int64_t step) {
  int64_t num_kept = 0;
  for (int64_t stop = 1;; ++stop) {
    remove_path(root);
    SteppedCheckpoint(1).save(root, 1);
    const Outcome outcome = save_until(root, step, stop);
    if (outcome == Outcome::kNotAllowed) GTEST_SKIP() << "tracing is not allowed here";
    const int64_t newest = expect_newest_loads(root, 1, step);
    ASSERT_FALSE(::testing::Test::HasFailure()) << "killed at stop " << stop;
    if (outcome == Outcome::kFinished) {
      EXPECT_EQ(newest, step);
      EXPECT_GT(stop, 50) << "tracing saw too few calls to prove anything";
      break;
    }
    num_kept += newest == 1 ? 1 : 0;
  }
  EXPECT_GT(num_kept, 20);
}

TEST_F(CheckpointKill, AtEverySystemCall) {
  kill_at_every_call(folder_ / "root", 2);
}

TEST_F(CheckpointKill, AtEverySystemCallWhenReplacing) {
  kill_at_every_call(folder_ / "root", 1);
}

}  // namespace
}  // namespace tessera
