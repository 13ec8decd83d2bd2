#include <sys/ptrace.h>

#include <algorithm>

#include "checkpoint/kill_testing.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using CheckpointKill = FolderTest;

TEST_F(CheckpointKill, AtManyRandomMoments) {
  kill_savers(folder_, 1, 150, 2);
}

TEST_F(CheckpointKill, OneOfSeveralRanksAtManyRandomMoments) {
  kill_savers(folder_, 4, 150, 3);
}

TEST_F(CheckpointKill, OneOfSeveralRanksWhoseThreadsWriteAtManyRandomMoments) {
  kill_savers(folder_, 4, 150, 5, Saving::kInBackground);
}

constexpr int kNoTracing = 77;

enum class Outcome { kKilled, kFinished, kNotAllowed };

/// Follows a traced process and kills it when it enters or leaves its `stop`-th system call.
Outcome follow_until(pid_t process, int64_t stop) {
  int status = 0;
  for (int64_t i = 0; ::waitpid(process, &status, 0) == process && WIFSTOPPED(status); ++i) {
    if (i == stop) {
      ::kill(process, SIGKILL);
    } else {
      ::ptrace(PTRACE_SYSCALL, process, nullptr, nullptr);
    }
  }
  if (WIFSIGNALED(status)) return Outcome::kKilled;
  if (WEXITSTATUS(status) == kNoTracing) return Outcome::kNotAllowed;
  EXPECT_EQ(WEXITSTATUS(status), 0);
  return Outcome::kFinished;
}

/// What the ranks save, and who of them is killed.
struct KilledSave {
  int64_t step = 0;
  int64_t num_ranks = 1;
  size_t killed = 0;
};

/// Saves in processes, one of which is killed at its `stop`-th stop. Some of the others may have
/// returned before they could notice.
Outcome save_until(const fs::path& root, const KilledSave& save, int64_t stop) {
  const SteppedCheckpoint checkpoint(save.step);
  const std::vector<pid_t> ranks = fork_ranks(save.num_ranks, [&](Communicator& world) {
    if (std::cmp_equal(world.rank(), save.killed)) {
      if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(kNoTracing);
      ::raise(SIGSTOP);
    }
    if (save.num_ranks == 1) {
      checkpoint.save(root, 1);
    } else {
      checkpoint.save(root, 1, world);
    }
  });
  const Outcome outcome = follow_until(ranks[save.killed], stop);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (rank == save.killed) continue;
    const int status = wait_for(ranks[rank]);
    EXPECT_TRUE(WIFEXITED(status)) << status;
    EXPECT_TRUE(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kLostPeer) << status;
  }
  return outcome;
}

/// Kills a save, over a checkpoint of step 1, at each of one rank's system calls in turn.
void kill_at_every_call(const fs::path& root, const KilledSave& save) {
  int64_t num_kept = 0;
  for (int64_t stop = 1;; ++stop) {
    remove_path(root);
    SteppedCheckpoint(1).save(root, 1);
    const Outcome outcome = save_until(root, save, stop);
    if (outcome == Outcome::kNotAllowed) GTEST_SKIP() << "tracing is not allowed here";
    const int64_t newest = expect_newest_loads(root, 1, save.step);
    ASSERT_FALSE(::testing::Test::HasFailure()) << "killed at stop " << stop;
    if (outcome == Outcome::kFinished) {
      EXPECT_EQ(newest, save.step);
      EXPECT_GT(stop, 50) << "tracing saw too few calls to prove anything";
      break;
    }
    num_kept += newest == 1 ? 1 : 0;
  }
  EXPECT_GT(num_kept, 20);
}

TEST_F(CheckpointKill, AtEverySystemCall) {
  kill_at_every_call(folder_ / "root", {.step = 2});
}

TEST_F(CheckpointKill, AtEverySystemCallWhenReplacing) {
  kill_at_every_call(folder_ / "root", {.step = 1});
}

TEST_F(CheckpointKill, TheLeadingRankAtEverySystemCall) {
  kill_at_every_call(folder_ / "root", {.step = 2, .num_ranks = 2, .killed = 0});
}

TEST_F(CheckpointKill, AnotherRankAtEverySystemCall) {
  kill_at_every_call(folder_ / "root", {.step = 2, .num_ranks = 2, .killed = 1});
}

}  // namespace
}  // namespace tessera
