#include <regex>
#include <thread>

#include "cli/tests/cli_testing.h"
#include "train/state/checkpointing.h"

namespace tessera {
namespace {

/// Process ids of the ranks whose command line names `folder`, by rank.
std::map<int, pid_t> find_ranks(const std::string& folder) {
  std::map<int, pid_t> ranks;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string pid = entry.path().filename().string();
    if (pid.find_first_not_of("0123456789") != std::string::npos) continue;
    if (read_all(entry.path() / "cmdline").find(folder) == std::string::npos) continue;
    const std::string environment = read_all(entry.path() / "environ");
    const std::string key = "OMPI_COMM_WORLD_RANK=";
    const size_t at = environment.find(key);
    if (at != std::string::npos)
      ranks[std::atoi(environment.c_str() + at + key.size())] = std::atoi(pid.c_str());
  }
  return ranks;
}

/// A random rank is killed at a random moment, 20 times; each time the survivors end in time, say
/// why, and leave nothing behind, and the run goes on from its last checkpoint. The same for a rank
/// that hangs.
class CliRanksKill : public CliTest {
 protected:
  static constexpr int64_t kSteps = 400;

  Arguments command(const Arguments& options) const {
    Arguments all = train(
        "run", {"--train.global_batch=4", "--train.micro_batch=1", "--optim.schedule=constant",
                "--run.checkpoint_interval=2", "--train.validation_interval=0",
                "--run.comm_timeout=20", "--train.steps=" + std::to_string(kSteps)});
    all.insert(all.end(), options.begin(), options.end());
    return all;
  }

  Arguments on_four_ranks(Arguments options) const {
    for (const char* option : {"--ranks", "4", "--parallel.ep=2", "--parallel.tp=2"})
      options.emplace_back(option);
    return command(options);
  }

  /// That of the last checkpoint, whose folder ends in it.
  int64_t saved_step() const {
    const std::string name = open_checkpoint(path("run")).reader.path().filename().string();
    return std::stoll(name.substr(name.find_last_of('-') + 1));
  }

  /// A random rank gets the signal at a random moment.
  void strike_one(Random& random, int signal, const Arguments& options, double limit_seconds) {
    ChildProcess child(on_four_ranks(options));
    ASSERT_NE(child.read_line_with("saved "), "") << child.wait().err;
    std::this_thread::sleep_for(std::chrono::milliseconds(random.next_below(300)));
    const auto ranks = find_ranks(path("run"));
    ASSERT_EQ(ranks.size(), 4);
    const auto victim = static_cast<int>(random.next_below(4));
    const auto struck = std::chrono::steady_clock::now();
    ::kill(ranks.at(victim), signal);
    const Finished finished = child.wait();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - struck;
    EXPECT_NE(finished.code, 0);
    EXPECT_LT(took.count(), limit_seconds);
    expect_survivors_say(finished.err, victim);
    EXPECT_TRUE(find_ranks(path("run")).empty()) << "ranks outlive the run";
  }

  /// Each survivor names what it waited for, once.
  static void expect_survivors_say(const std::string& err, int victim) {
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == victim) continue;
      const std::regex line("tessera: rank " + std::to_string(rank) +
                            " waited [0-9.]+ s for [a-z_]+ [0-9]+ of group \"[a-z_0-9.]+\" "
                            "\\(ranks [0-9 ]+\\), missing rank [0-9 ]+: .+");
      EXPECT_EQ(std::distance(std::sregex_iterator(err.begin(), err.end(), line), {}), 1)
          << "rank " << rank << ", rank " << victim << " was struck:\n"
          << err;
    }
  }
};

TEST_F(CliRanksKill, SurvivorsEndAndTheRunGoesOn) {
  if (std::system("command -v mpirun > /dev/null 2>&1") != 0) GTEST_SKIP() << "no mpirun";
  Random random(11, 0);
  for (int kill = 0; kill < 20 && !HasFailure(); ++kill) strike_one(random, SIGKILL, {}, 20);
  const size_t saved = saved_step();
  const int64_t reached = read_steps("run").back()["step"];
  const std::string end = "--train.steps=" + std::to_string(reached + 3);
  // On fewer ranks to the end.
  const Finished resumed = run_tessera(command({"--ranks", "2", "--parallel.ep=2", end}));
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  const auto broken = read_steps("run");
  Arguments whole = on_four_ranks({end});
  whole.push_back("--run.folder=" + path("whole"));
  succeed(whole);
  const auto unbroken = read_steps("whole");
  ASSERT_EQ(broken.size(), unbroken.size());
  for (size_t i = 0; i < broken.size(); ++i) {
    const double expected = unbroken[i]["loss"];
    const double loss = broken[i]["loss"];
    // On the same ranks to the bit; then the first steps on others, before rounding has grown.
    if (i < saved) {
      EXPECT_EQ(loss, expected) << "step " << i + 1;
    } else {
      EXPECT_NEAR(loss, expected, 2e-3 * expected) << "step " << i + 1;
    }
  }
}

TEST_F(CliRanksKill, SurvivorsOfAStoppedRankEndWithinTheTimeLimit) {
  if (std::system("command -v mpirun > /dev/null 2>&1") != 0) GTEST_SKIP() << "no mpirun";
  Random random(12, 0);
  // mpirun leaves ranks some seconds between SIGTERM and SIGKILL.
  constexpr double kEndSeconds = 20;
  for (int i = 0; i < 3 && !HasFailure(); ++i)
    strike_one(random, SIGSTOP, {"--run.comm_timeout=5"}, 5 + kEndSeconds);
}

}  // namespace
}  // namespace tessera
