#include <list>

#include "cli/tests/cli_testing.h"
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

  /// The same where the last rank has further options and variables; TEST_PROGRAM among these is
  /// the program that it runs.
  std::list<ChildProcess> start(const Arguments& arguments, const Arguments& last_options,
                                const Variables& last_variables = {}) const {
    const int64_t port = find_free_port();
    std::list<ChildProcess> ranks;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      Arguments own = arguments;
      Variables variables = torchrun_environment(rank, kRanks, port);
      if (rank == kRanks - 1) {
        own.insert(own.end(), last_options.begin(), last_options.end());
        variables.insert(last_variables.begin(), last_variables.end());
      }
      ranks.emplace_back(own, 0, variables);
    }
    return ranks;
  }

  /// The same where the last rank runs in another folder.
  std::list<ChildProcess> start_in(const Arguments& arguments, const std::string& folder,
                                   const std::string& last_folder) const {
    const int64_t port = find_free_port();
    std::list<ChildProcess> ranks;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      Variables variables = torchrun_environment(rank, kRanks, port);
      variables["TEST_FOLDER"] = rank == kRanks - 1 ? last_folder : folder;
      ranks.emplace_back(arguments, 0, variables);
    }
    return ranks;
  }

  /// All ranks are refused, and rank 0 alone says why.
  static void expect_told_once(std::list<ChildProcess> ranks,
                               const std::vector<std::string>& parts) {
    bool first = true;
    for (ChildProcess& rank : ranks) {
      const Finished finished = rank.wait();
      if (first) {
        expect_error(finished, parts);
      } else {
        EXPECT_EQ(finished.code, 2);
        EXPECT_EQ(finished.err, "");
      }
      first = false;
    }
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
  expect_told_once(start(layout("run", {"--ranks", "2"})), {"this process is a rank already"});
}

/// A rank that differs from the others, and what they say.
struct Different {
  const char* name;
  Arguments options;
  std::vector<std::string> parts;
};

class CliDifferentRank : public CliTorchrun, public ::testing::WithParamInterface<Different> {};

TEST_P(CliDifferentRank, IsNamedAtOnceBeforeAnythingIsWritten) {
  const auto before = snapshot(folder_);
  expect_told_once(start(layout("run", {}), GetParam().options), GetParam().parts);
  EXPECT_EQ(snapshot(folder_), before);
}

INSTANTIATE_TEST_SUITE_P(
    Keys, CliDifferentRank,
    ::testing::Values(
        Different{"LearningRate",
                  {"--optim.learning_rate=0.5"},
                  {"optim.learning_rate is 0.01 on ranks 0-2 and 0.5 on rank 3"}},
        Different{"SeedAndBeta",
                  {"--run.seed=7", "--optim.beta1=0.5"},
                  {"run.seed is 1 on ranks 0-2 and 7 on rank 3", "optim.beta1 is 0.9",
                   "start all ranks with the same configuration"}},
        Different{"Layout", {"--parallel.tp=2"}, {"parallel.tp is 1", "and 2 on rank 3"}},
        Different{"TimeLimit", {"--run.comm_timeout=30"}, {"run.comm_timeout is"}},
        Different{"SharedMemory", {"--run.shared_memory=off"}, {"run.shared_memory is"}},
        Different{"Trace", {"--trace=t.json"}, {"--trace is not given on ranks 0-2 and t.json"}},
        Different{"UnknownKey", {"--optim.learnin_rate=1"}, {"rank 3: ", "optim.learnin_rate"}},
        Different{"UnreadableValue", {"--optim.beta1=x"}, {"rank 3: ", "optim.beta1"}},
        Different{"BadFlag",
                  {"--ranks=abc"},
                  {"rank 3: --ranks must be an integer", "found the string \"abc\""}},
        Different{"NoFile", {"no-such.toml"}, {"rank 3: ", "no-such.toml"}}),
    [](const auto& info) { return std::string(info.param.name); });

/// Each rank reads its own copy of what has one name.
TEST_F(CliTorchrun, OtherDataIsNamed) {
  std::filesystem::create_directories(path("own"));
  std::string text = read_all(path("text.txt"));
  text[text.size() / 2] = '#';
  write_all(path("own/text.txt"), text);
  std::filesystem::create_directories(path("shared"));
  std::filesystem::copy(path("text.txt"), path("shared/text.txt"));
  Arguments arguments = layout(path("run"), {"--data.text=text.txt"});
  std::erase_if(arguments,
                [](const std::string& word) { return word.starts_with("--run.folder"); });
  arguments.push_back("--run.folder=" + path("run"));
  expect_told_once(start_in(arguments, path("shared"), path("own")),
                   {"data.text (text.txt) is 1 file of", "on ranks 0-2 and 1 file of", "on rank 3",
                    "all ranks must find the same"});
  EXPECT_FALSE(std::filesystem::exists(path("run")));
}

TEST_F(CliTorchrun, CopiesOfTheDataAreAlike) {
  for (const std::string folder : {"shared", "own"}) {
    std::filesystem::create_directories(path(folder));
    std::filesystem::copy(path("text.txt"), path(folder + "/text.txt"));
  }
  for (ChildProcess& rank :
       start_in(layout("run", {"--data.text=text.txt"}), path("shared"), path("own"))) {
    const Finished finished = rank.wait();
    EXPECT_EQ(finished.code, 0) << finished.err;
  }
}

TEST_F(CliTorchrun, AnotherFolderOfTheRunIsNamed) {
  Arguments arguments = layout("run", {"--run.folder=here"});
  expect_told_once(start_in(arguments, path(""), "/"),
                   {"the folder that run.folder starts from is", "on ranks 0-2 and / on rank 3"});
}

TEST_F(CliTorchrun, AnotherEnvironmentIsNamed) {
  expect_told_once(start(layout("run", {}), {}, {{"TESSERA_SOMETHING", "1"}}),
                   {"TESSERA_SOMETHING is unset on ranks 0-2 and \"1\" on rank 3",
                    "start all ranks with the same environment"});
}

TEST_F(CliTorchrun, WhatMayDifferMay) {
  for (ChildProcess& rank :
       start(layout("run", {}), {}, {{"CUDA_VISIBLE_DEVICES", "7"}, {"NCCL_DEBUG", "INFO"}})) {
    const Finished finished = rank.wait();
    EXPECT_EQ(finished.code, 0) << finished.err;
  }
}

TEST_F(CliTorchrun, AnotherBuildIsNamed) {
  std::string program = read_all(TESSERA_PROGRAM);
  const std::string note("\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0", 16);
  const size_t at = program.find(note);
  ASSERT_NE(at, std::string::npos) << "the program has no build ID";
  program[at + note.size()] ^= 1;
  write_all(path("other"), program);
  std::filesystem::permissions(path("other"), std::filesystem::perms::owner_all);
  expect_told_once(start(layout("run", {}), {}, {{"TEST_PROGRAM", path("other")}}),
                   {"the program is Tessera ", "start the same program on all ranks"});
}

/// Without the rest of what torchrun sets, each would train alone.
TEST_F(CliTorchrun, RanksThatCannotMeetAreRefused) {
  const auto before = snapshot(folder_);
  const Variables variables = {{"RANK", "1"}, {"WORLD_SIZE", "2"}};
  expect_error(ChildProcess(layout("run", {}), 0, variables).wait(),
               {"WORLD_SIZE is 2", "LOCAL_RANK, MASTER_ADDR, MASTER_PORT are missing"});
  EXPECT_EQ(snapshot(folder_), before);
  for (const Variables& one : {Variables{{"RANK", "1"}}, Variables{{"WORLD_SIZE", "1"}}})
    EXPECT_EQ(ChildProcess(layout("alone-" + one.begin()->first, {}), 0, one).wait().code, 0);
}

}  // namespace
}  // namespace tessera
