#include "cli/cli_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// Ranks that mpirun starts on this machine.
class CliRanks : public CliTest {
 protected:
  void SetUp() override {
    if (std::system("command -v mpirun > /dev/null 2>&1") != 0) GTEST_SKIP() << "no mpirun";
  }

  Arguments layout(const std::string& run, const Arguments& options) const {
    Arguments all = train(run, {"--train.global_batch=8", "--train.steps=4"});
    all.insert(all.end(), options.begin(), options.end());
    return all;
  }

  /// Runs what must succeed; mpirun may have something to say about the machine.
  static Finished run_ranks(const Arguments& arguments) {
    Finished finished = run_tessera(arguments);
    EXPECT_EQ(finished.code, 0) << finished.err;
    return finished;
  }

  std::vector<double> losses(const std::string& run) const {
    std::vector<double> all;
    for (const auto& step : read_steps(run)) all.push_back(step["loss"]);
    return all;
  }
};

TEST_F(CliRanks, GiveTheLossesOfOneRank) {
  run_ranks(layout("one", {}));
  run_ranks(layout("four", {"--ranks", "4", "--parallel.tp=2", "--parallel.ep=4"}));
  const auto one = losses("one");
  const auto four = losses("four");
  ASSERT_EQ(one.size(), 4);
  ASSERT_EQ(four.size(), 4);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(four[i], one[i], 1e-4);
}

TEST_F(CliRanks, ShardingInTwoLevelsGivesTheLossesOfOneRank) {
  run_ranks(layout("one", {}));
  run_ranks(layout("hybrid", {"--ranks", "4", "--train.micro_batch=2", "--optim.shard=full",
                              "--optim.shard_group=2"}));
  run_ranks(
      layout("tied", {"--ranks", "4", "--train.micro_batch=2", "--parallel.pp=2", "--parallel.ep=2",
                      "--model.tie_embeddings=true", "--optim.shard=full"}));
  run_ranks(layout("nodes", {"--ranks", "4", "--train.micro_batch=2", "--optim.reduce_group=2"}));
  const auto one = losses("one");
  ASSERT_EQ(one.size(), 4);
  for (const std::string run : {"hybrid", "tied", "nodes"}) {
    const auto found = losses(run);
    ASSERT_EQ(found.size(), one.size()) << run;
    for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(found[i], one[i], 1e-4) << run;
  }
}

TEST_F(CliRanks, AnotherNumberOfRanksContinuesAFullyShardedRun) {
  run_ranks(layout("run", {"--ranks", "3", "--train.global_batch=6", "--train.micro_batch=1",
                           "--train.steps=2", "--optim.schedule=constant", "--optim.shard=full"}));
  const Finished resumed = run_ranks(layout("run", {"--optim.schedule=constant"}));
  EXPECT_THAT(resumed.out, HasSubstr("continuing after step 2 of 4"));
  EXPECT_THAT(resumed.out, HasSubstr("optim.shard was \"full\" when the checkpoint was written"));
}

TEST_F(CliRanks, AnotherNumberOfRanksContinues) {
  run_ranks(layout(
      "run", {"--ranks", "4", "--parallel.pp=2", "--train.steps=2", "--optim.schedule=constant"}));
  const Finished resumed = run_ranks(layout("run", {"--optim.schedule=constant"}));
  EXPECT_THAT(resumed.out, HasSubstr("continuing after step 2 of 4"));
  EXPECT_EQ(losses("run").size(), 4);
}

/// mpirun's terminals are not the user's: what goes to a file is plain lines, also of a single
/// rank. Rank 0 writes a sample of text as one rank does.
TEST_F(CliRanks, WritePlainLinesAndASample) {
  for (const std::string ranks : {"1", "2"}) {
    const std::string run = "run-" + ranks;
    const Finished finished =
        run_ranks(layout(run, {"--ranks", ranks, "--parallel.tp=" + ranks, "--run.report=true"}));
    EXPECT_THAT(finished.out, HasSubstr("4/4"));
    EXPECT_EQ(finished.out.find_first_of("\r\x1b"), std::string::npos) << finished.out;
    EXPECT_THAT(finished.out, ::testing::Not(HasSubstr("no sample")));
    EXPECT_THAT(read_all(path(run + "/report.html")), HasSubstr("<h2>Generated text</h2>"));
  }
}

TEST_F(CliRanks, AMistakeIsToldOnceBeforeRanksStart) {
  expect_refused(layout("run", {"--ranks", "4", "--parallel.tp=3"}), {"tp 3", "4 ranks"});
}

/// Dispatch and combine are under way while the shared expert and, backwards, weight gradients are
/// computed: between the start of an exchange and the end of its wait stands computation.
TEST_F(CliRanks, TheTraceShowsComputationUnderExchanges) {
  run_ranks(layout("run", {"--ranks", "2", "--parallel.ep=2", "--parallel.dispatcher=all_to_all",
                           "--moe.shared_inner_size=16", "--trace=" + path("trace.json")}));
  const auto trace = nlohmann::json::parse(read_all(path("trace.json")));
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<nlohmann::json> exchanges;
    std::vector<nlohmann::json> computed;
    for (const auto& event : trace["traceEvents"]) {
      if (event["ph"] != "X" || event["pid"] != rank) continue;
      const std::string name = event["name"];
      if (event["tid"] == 2 && name == "all_to_all_v") exchanges.push_back(event);
      if (event["tid"] == 1 && (name == "linear" || name == "linear_wgrad"))
        computed.push_back(event);
    }
    const auto hides = [&](const nlohmann::json& exchange) {
      const double begin = exchange["ts"];
      const double end = begin + exchange["dur"].get<double>();
      return std::ranges::any_of(computed, [&](const nlohmann::json& event) {
        return event["ts"] >= begin &&
               event["ts"].get<double>() + event["dur"].get<double>() <= end;
      });
    };
    EXPECT_GT(exchanges.size(), 0);
    EXPECT_GT(std::ranges::count_if(exchanges, hides), 0);
  }
}

}  // namespace
}  // namespace tessera
