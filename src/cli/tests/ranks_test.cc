#include <algorithm>
#include <set>

#include "cli/tests/cli_testing.h"
#include "comm/testing/run_program.h"
#include "core/process/processors.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

std::string join(const Arguments& arguments) {
  std::string text;
  for (const std::string& argument : arguments) text += (text.empty() ? "" : " ") + argument;
  return text;
}

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
  const std::string told =
      run_ranks(layout("four", {"--ranks", "4", "--parallel.tp=2", "--parallel.ep=4"})).out;
  const auto one = losses("one");
  const auto four = losses("four");
  ASSERT_EQ(one.size(), 4);
  ASSERT_EQ(four.size(), 4);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(four[i], one[i], 1e-4);
  // Which way tokens take to their experts, and what a step of all ranks sends.
  EXPECT_THAT(told, HasSubstr("dispatcher all_to_all: "));
  EXPECT_THAT(told, HasSubstr("between the ranks, all together (mean of 4):\n"));
  EXPECT_THAT(told, HasSubstr("\n  tp                         all_gather"));
  EXPECT_THAT(told, HasSubstr("\n  ep                         all_to_all"));
}

TEST_F(CliRanks, ReadEachOthersMemoryWithTheSameBits) {
  const Arguments spread = {"--ranks", "4", "--parallel.tp=2", "--parallel.ep=4"};
  run_ranks(layout("read", spread));
  Arguments apart = spread;
  apart.emplace_back("--run.shared_memory=off");
  run_ranks(layout("apart", apart));
  EXPECT_EQ(losses("read"), losses("apart"));
  apart.back() = "--run.shared_memory=on";
  const Finished refused = run_tessera(layout("refused", apart));
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("run.shared_memory"));
}

/// What inspect lists is a schedule to train by; what is chosen is told.
TEST_F(CliRanks, TakeTheScheduleOfAFile) {
  const Arguments stages = {"--ranks", "2", "--parallel.pp=2", "--train.micro_batch=2"};
  run_ranks(layout("built", stages));
  Arguments listed = layout("listed", stages);
  listed.front() = "inspect";
  listed.emplace_back("--schedule");
  write_all(path("order"), succeed(listed).out);
  Arguments with_file = stages;
  with_file.push_back("--train.schedule=" + path("order"));
  run_ranks(layout("file", with_file));
  EXPECT_EQ(losses("file"), losses("built"));
  write_all(path("order"), "stage 0 F0.0 B0.0\n");
  const Finished refused = run_tessera(layout("refused", with_file));
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("order has 1 stages, but the layout has 2"));

  Arguments with_auto = stages;
  with_auto.emplace_back("--train.schedule=auto");
  EXPECT_THAT(run_ranks(layout("auto", with_auto)).out, HasSubstr("schedule as_built, "));
  EXPECT_EQ(losses("auto"), losses("built"));
}

/// A machine that passes for one of two nodes.
TEST_F(CliRanks, RunNearANodeOfMemory) {
  const std::vector<int> own = bound_processors();
  for (const int needed : {0, 1}) {
    if (std::ranges::find(own, needed) == own.end()) GTEST_SKIP() << "no processor " << needed;
  }
  const Variables machine = {{"HWLOC_SYNTHETIC", "numa:2 core:1 pu:1"},
                             {"HWLOC_THISSYSTEM", "1"},
                             {"OMP_NUM_THREADS", "1"}};
  const auto run = [&](const std::string& name, const Arguments& options) {
    const Finished done = ChildProcess(layout(name, options), 0, machine).wait();
    EXPECT_EQ(done.code, 0) << done.err;
    return done.out;
  };
  EXPECT_THAT(run("auto", {"--ranks", "2"}), HasSubstr("rank 0 runs on processors 0\n"));
  EXPECT_THAT(run("none", {"--ranks", "2", "--run.bind=none"}),
              ::testing::Not(HasSubstr("runs on processors")));
  EXPECT_EQ(losses("auto"), losses("none"));
  const Json found = Json::parse(ChildProcess({"doctor", "--json"}, 0, machine).wait().out);
  EXPECT_EQ(found["numa"].dump(), R"([{"node":0,"processors":"0"},{"node":1,"processors":"1"}])");
}

TEST_F(CliRanks, AFailureNamesItsRankOnce) {
  write_all(path("occupied"), "a file");
  const Finished failed = run_tessera(layout("occupied", {"--ranks", "2"}));
  EXPECT_EQ(failed.code, 2);
  EXPECT_THAT(failed.err, HasSubstr("tessera: rank 0: "));
  EXPECT_THAT(failed.err, ::testing::Not(HasSubstr("rank 0: rank 0: ")));
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

/// Rank 0 holds the folder for all, and where it is lost all end together.
TEST_F(CliRanks, OwnTheirFolderTogether) {
  const Arguments endless = {"--ranks",
                             "2",
                             "--train.steps=100000000",
                             "--optim.schedule=constant",
                             "--train.validation_interval=0",
                             "--run.checkpoint_interval=0"};
  ChildProcess first(layout("run", endless));
  ASSERT_NE(first.read_line_with("  7/"), "");
  for (const Arguments& second : {endless, Arguments{}}) {
    const Finished refused = run_tessera(layout("run", second));
    EXPECT_EQ(refused.code, 2) << refused.err;
    EXPECT_THAT(refused.err, HasSubstr(path("run") + " is in use by another run: process "));
  }
  std::filesystem::rename(path("run"), path("moved"));
  const Finished finished = first.wait();
  EXPECT_EQ(finished.code, 2);
  EXPECT_THAT(finished.err, HasSubstr(path("run") + " was moved to " + path("moved")));
  ASSERT_EQ(checkpoints("moved").size(), 1);
  const int64_t step = std::atoll(checkpoints("moved")[0].substr(5).c_str());
  EXPECT_GE(step, 7);
  EXPECT_EQ(read_steps("moved").size(), step);
}

TEST_F(CliRanks, ANumberOfRanksThatCannotBeIsNamed) {
  for (const std::string ranks : {"-1", "abc", "1.5", "99999999999", "1e400"}) {
    for (const std::string command : {"train", "verify", "inspect"})
      expect_refused({command, "--ranks=" + ranks}, {"--ranks must be", "found", ranks});
  }
}

/// Limits that `limits` sets for a run of two ranks, and all that it says: one line.
std::string refusal_under(const std::string& limits, const Arguments& arguments) {
  const ProgramResult result =
      run_program(limits + "; exec " TESSERA_PROGRAM " " + join(arguments), 60);
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_EQ(std::ranges::count(result.output, '\n'), 1) << result.output;
  return result.output;
}

TEST_F(CliRanks, LimitsOfTheSystemAreNamedBeforeRanksStart) {
  const Arguments arguments = layout("run", {"--ranks=2"});
  EXPECT_THAT(refusal_under("ulimit -n 16", arguments), HasSubstr("16 files open (ulimit -n)"));
  EXPECT_THAT(refusal_under("ulimit -f 100", arguments), HasSubstr("(ulimit -f), but Open MPI"));
}

/// Open MPI adds pages to what ranks that end say.
TEST_F(CliRanks, AFailureIsOneMessage) {
  write_all(path("file"), "");
  const Finished finished =
      run_tessera(layout("run", {"--ranks=2", "--run.folder=" + path("file/run")}));
  EXPECT_EQ(finished.code, 2);
  EXPECT_EQ(std::ranges::count(finished.err, '\n'), 1) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr(path("file")));
}

/// Ranks that the user's own mpirun starts.
TEST_F(CliRanks, ADifferentRankIsNamed) {
  const Arguments arguments = layout("run", {});
  const std::string rank = "-n 1 " TESSERA_PROGRAM " " + join(arguments);
  const ProgramResult result = run_program(
      "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1 mpirun --quiet "
      "--oversubscribe --bind-to none " +
          rank + " : " + rank + " --optim.learning_rate=0.5 : " + rank,
      60);
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(result.output,
            "tessera: optim.learning_rate is 0.01 on ranks 0 2 and 0.5 on rank 1; start all ranks "
            "with the same configuration\n");
  EXPECT_FALSE(std::filesystem::exists(path("run")));
}

/// What one rank's part of a trace says.
class RankTrace {
 public:
  RankTrace(const nlohmann::json& trace, int rank) {
    for (const auto& event : trace["traceEvents"]) {
      if (event["ph"] != "X" || event["pid"] != rank) continue;
      const Span span{event["ts"], event["ts"].get<double>() + event["dur"].get<double>()};
      const auto& args = event["args"];
      if (args.contains("group")) {
        const std::string group = args["group"];
        communications_[group + " " + event["name"].get<std::string>()].push_back(span);
        bytes_ += args["bytes"].get<int64_t>();
      } else if (!event["name"].get<std::string>().starts_with("wait for ")) {
        const std::string program = args["program"];
        computed_[program.ends_with(".backward") ? "backward" : "forward"].push_back(span);
      }
    }
  }

  int64_t bytes() const { return bytes_; }
  /// "GROUP KIND" of all communications.
  std::set<std::string> kinds() const {
    std::set<std::string> all;
    for (const auto& [kind, spans] : communications_) all.insert(kind);
    return all;
  }
  /// How many of these communications have computation of the pass under them, from its start to
  /// its end.
  int64_t count_hidden(const std::string& kind, const std::string& pass) const {
    const auto found = communications_.find(kind);
    if (found == communications_.end()) return 0;
    return std::ranges::count_if(found->second, [&](const Span& communication) {
      return std::ranges::any_of(computed_.at(pass), [&](const Span& node) {
        return node.begin >= communication.begin && node.end <= communication.end;
      });
    });
  }

 private:
  struct Span {
    double begin = 0;
    double end = 0;
  };
  std::map<std::string, std::vector<Span>> communications_;
  std::map<std::string, std::vector<Span>> computed_;
  int64_t bytes_ = 0;
};

/// Traces of two ranks.
class CliTrace : public CliRanks {
 protected:
  /// Runs with the options, by rank.
  std::vector<RankTrace> trace(const std::string& run, const Arguments& options) const {
    Arguments all = {"--ranks", "2", "--trace=" + path("trace.json")};
    all.insert(all.end(), options.begin(), options.end());
    EXPECT_THAT(run_ranks(layout(run, all)).out, HasSubstr("waits of 2 ranks in "));
    const auto parsed = nlohmann::json::parse(read_all(path("trace.json")));
    return {RankTrace(parsed, 0), RankTrace(parsed, 1)};
  }

  struct Hidden {
    std::string kind;
    std::string pass;
  };
  /// The traces of a run in which each of these has computation under it. What the ranks come to at
  /// the same time is under way only for the one that comes first, and on a busy machine for none,
  /// so there are several tries.
  std::vector<RankTrace> trace_hidden(const Arguments& options,
                                      const std::vector<Hidden>& all) const {
    constexpr int kTries = 5;
    std::vector<RankTrace> ranks;
    std::string missing = "no run";
    for (int i = 0; i < kTries && !missing.empty(); ++i) {
      ranks = trace("run-" + std::to_string(i), options);
      missing.clear();
      for (const auto& [kind, pass] : all) {
        if (ranks[0].count_hidden(kind, pass) + ranks[1].count_hidden(kind, pass) == 0)
          missing += fmt::format("{} ({}) ", kind, pass);
      }
    }
    EXPECT_EQ(missing, "") << "in " << kTries << " runs";
    return ranks;
  }
};

/// Dispatch and combine are under way while the shared expert and, backwards, weight gradients are
/// computed; the sums of gradients while layers further back are.
TEST_F(CliTrace, ShowsComputationUnderExchangesAndReductions) {
  const auto ranks = trace_hidden({"--parallel.ep=2", "--parallel.dispatcher=all_to_all",
                                   "--moe.shared_inner_size=16", "--optim.bucket_bytes=2000"},
                                  {{"ep all_to_all", "forward"},
                                   {"ep all_to_all", "backward"},
                                   {"dense_replicas_1 reduce_scatter", "backward"}});
  for (const RankTrace& rank : ranks) {
    EXPECT_GT(rank.bytes(), 0);
    for (const std::string kind :
         {"dense_replicas_1 reduce_scatter", "dense_replicas_1 all_gather", "world all_reduce"})
      EXPECT_THAT(rank.kinds(), ::testing::Contains(kind));
  }
}

/// With full sharding the next layer's weights are on their way while one computes, in both
/// directions, and the sums of the last one's gradients.
TEST_F(CliTrace, ShowsComputationUnderFullShardingsTransfers) {
  trace_hidden({"--optim.shard=full"}, {{"dense_replicas_1.inner all_gather", "forward"},
                                        {"dense_replicas_1.inner all_gather", "backward"},
                                        {"dense_replicas_1.inner reduce_scatter", "backward"}});
}

/// Hidden states are sent while the next micro-batch is computed, and received ahead of the run
/// that reads them where their memory is free.
TEST_F(CliTrace, ShowsComputationUnderAPipelinesSends) {
  const auto ranks =
      trace_hidden({"--parallel.pp=2", "--train.micro_batch=1"}, {{"pp send", "forward"}});
  EXPECT_GT(ranks[1].count_hidden("pp receive", "forward"), 0);
  EXPECT_THAT(ranks[1].kinds(), ::testing::Contains("pp_gradients send"));
}

}  // namespace
}  // namespace tessera
