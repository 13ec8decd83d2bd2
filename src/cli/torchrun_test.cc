#include <list>

#include "cli/cli_testing.h"
#include "comm/testing/torch_agent.h"

namespace tessera {
namespace {

/// Ranks with the environment that torchrun gives them.
class CliTorchrun : public CliTest {
 protected:
  static constexpr int64_t kRanks = 4;

  /// One process for each rank, by rank.
  std::list<ChildProcess> start(const Arguments& arguments) const {
    const int64_t port = find_free_port();
    std::list<ChildProcess> ranks;
    for (int64_t rank = 0; rank < kRanks; ++rank)
      ranks.emplace_back(arguments, 0, torchrun_environment(rank, kRanks, port));
    return ranks;
  }

  Arguments layout(const std::string& run, const Arguments& options) const {
    Arguments all = train(run, {"--train.global_batch=8", "--train.steps=4"});
    all.insert(all.end(), options.begin(), options.end());
    return all;
  }

  std::vector<double> losses(const std::string& run) const {
    std::vector<double> all;
    for (const auto& step : read_steps(run)) all.push_back(step["loss"]);
    return all;
  }
};

TEST_F(CliTorchrun, GivesTheLossesOfOneRank) {
  succeed(layout("one", {}));
  for (ChildProcess& rank : start(layout("four", {"--parallel.tp=2", "--parallel.ep=4"}))) {
    const Finished finished = rank.wait();
    EXPECT_EQ(finished.code, 0);
    EXPECT_EQ(finished.err, "");
  }
  const auto one = losses("one");
  const auto four = losses("four");
  ASSERT_EQ(one.size(), 4);
  ASSERT_EQ(four.size(), 4);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(four[i], one[i], 1e-4);
}

TEST_F(CliTorchrun, AKilledRankEndsTheOthers) {
  auto ranks = start(layout("run", {"--parallel.tp=2", "--train.steps=100000"}));
  ASSERT_NE(ranks.front().read_line_with("step "), "");
  ranks.back().send(SIGKILL);
  int64_t rank = 0;
  for (ChildProcess& process : ranks) {
    const Finished finished = process.wait();
    if (rank == kRanks - 1) break;
    EXPECT_EQ(finished.code, 2);
    EXPECT_THAT(finished.err, ::testing::ContainsRegex("tessera: rank " + std::to_string(rank) +
                                                       " waited [0-9.]+ s for .* of group \""));
    ++rank;
  }
}

TEST_F(CliTorchrun, SigtermToAllSavesAndEnds) {
  auto ranks = start(layout("run", {"--parallel.ep=2", "--train.steps=100000"}));
  ASSERT_NE(ranks.front().read_line_with("step "), "");
  for (ChildProcess& process : ranks) process.send(SIGTERM);
  for (ChildProcess& process : ranks) {
    const Finished finished = process.wait();
    EXPECT_EQ(finished.code, 0) << finished.err;
  }
  EXPECT_EQ(checkpoints("run").size(), 1);
}

TEST_F(CliTorchrun, RanksStartNoRanks) {
  auto ranks = start(layout("run", {"--ranks", "2"}));
  for (ChildProcess& process : ranks)
    expect_error(process.wait(), {"this process is a rank already"});
}

}  // namespace
}  // namespace tessera
