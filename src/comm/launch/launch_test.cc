#include "comm/launch/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "comm/error.h"

namespace tessera {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

Environment environment_of(Variables variables) {
  return [variables = std::move(variables)](const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

const Variables& open_mpi() {
  static const Variables variables = {{"OMPI_COMM_WORLD_SIZE", "8"},
                                      {"OMPI_COMM_WORLD_RANK", "5"},
                                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}};
  return variables;
}

const Variables& torchrun() {
  static const Variables variables = {{"RANK", "3"},
                                      {"WORLD_SIZE", "4"},
                                      {"LOCAL_RANK", "1"},
                                      {"LOCAL_WORLD_SIZE", "2"},
                                      {"MASTER_ADDR", "node0"},
                                      {"MASTER_PORT", "29500"},
                                      {"TORCHELASTIC_RUN_ID", "x"}};
  return variables;
}

const Variables& slurm() {
  static const Variables variables = {{"SLURM_STEP_ID", "0"},
                                      {"SLURM_PROCID", "2"},
                                      {"SLURM_STEP_NUM_TASKS", "6"},
                                      {"SLURM_LOCALID", "2"}};
  return variables;
}

Variables joined(Variables a, const Variables& b) {
  a.insert(b.begin(), b.end());
  return a;
}

std::string error_of(const Variables& variables) {
  try {
    detect_launch(environment_of(variables));
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Launch, NoLauncher) {
  const LaunchInfo info = detect_launch(environment_of({{"RANK", "3"}, {"SLURM_PROCID", "0"}}));
  EXPECT_EQ(info.launcher, Launcher::kNone);
  EXPECT_EQ(info.num_ranks, 1);
}

TEST(Launch, OpenMpi) {
  Variables variables = open_mpi();
  variables["OMPI_MCA_odls_base_sigkill_timeout"] = "7";
  const LaunchInfo info = detect_launch(environment_of(variables));
  EXPECT_EQ(info.launcher, Launcher::kOpenMpi);
  EXPECT_EQ(info.rank, 5);
  EXPECT_EQ(info.num_ranks, 8);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.num_local_ranks, 4);
  EXPECT_EQ(info.kill_seconds, 7);
}

TEST(Launch, Torchrun) {
  const LaunchInfo info = detect_launch(environment_of(torchrun()));
  EXPECT_EQ(info.launcher, Launcher::kTorchrun);
  EXPECT_EQ(info.rank, 3);
  EXPECT_EQ(info.num_ranks, 4);
  EXPECT_EQ(info.address, "node0");
  EXPECT_EQ(info.port, 29500);
  EXPECT_EQ(info.run, "x");
  EXPECT_FALSE(info.one_machine);
}

TEST(Launch, TorchrunOnOneMachine) {
  Variables variables = torchrun();
  variables["LOCAL_WORLD_SIZE"] = "4";
  EXPECT_TRUE(detect_launch(environment_of(variables)).one_machine);
}

TEST(Launch, TheEnvironmentOfTorchrunWithoutIt) {
  const LaunchInfo info = detect_launch(environment_of({{"RANK", "3"},
                                                        {"WORLD_SIZE", "4"},
                                                        {"LOCAL_RANK", "3"},
                                                        {"MASTER_ADDR", "node0"},
                                                        {"MASTER_PORT", "1"}}));
  EXPECT_EQ(info.launcher, Launcher::kTorchrun);
  EXPECT_EQ(info.port, 1);
  EXPECT_EQ(info.run, "");
  EXPECT_FALSE(info.one_machine);
}

TEST(Launch, ThePortOfTheAgentIsLeftToIt) {
  const auto port = [](const std::string& master, const std::string& store) {
    Variables variables = torchrun();
    variables["MASTER_PORT"] = master;
    variables["TORCHELASTIC_USE_AGENT_STORE"] = store;
    return detect_launch(environment_of(variables)).port;
  };
  EXPECT_EQ(port("29500", "True"), 30500);
  EXPECT_EQ(port("29500", "False"), 29500);
  EXPECT_EQ(port("65535", "True"), 64535);
  Variables variables = torchrun();
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  variables["TESSERA_PORT"] = "41000";
  EXPECT_EQ(detect_launch(environment_of(variables)).port, 41000);
  variables["TESSERA_PORT"] = "0";
  EXPECT_THAT(error_of(variables), HasSubstr("TESSERA_PORT is '0'; a number from 1 to 65535"));
}

TEST(Launch, Slurm) {
  const LaunchInfo info = detect_launch(environment_of(slurm()));
  EXPECT_EQ(info.launcher, Launcher::kSlurm);
  EXPECT_EQ(info.rank, 2);
  EXPECT_EQ(info.num_ranks, 6);
}

TEST(Launch, TheInnerLauncherCounts) {
  const auto launcher = [](const Variables& variables) {
    return detect_launch(environment_of(variables)).launcher;
  };
  EXPECT_EQ(launcher(joined(slurm(), torchrun())), Launcher::kTorchrun);
  EXPECT_EQ(launcher(joined(slurm(), open_mpi())), Launcher::kOpenMpi);
}

TEST(Launch, BadVariablesAreNamed) {
  Variables variables = open_mpi();
  variables["OMPI_COMM_WORLD_RANK"] = "8";
  EXPECT_THAT(error_of(variables), HasSubstr("OMPI_COMM_WORLD_RANK is '8'; a number from 0 to 7"));
  variables = torchrun();
  variables["MASTER_PORT"] = "29500x";
  EXPECT_THAT(error_of(variables), HasSubstr("MASTER_PORT is '29500x'"));
  variables["MASTER_PORT"] = "29500";
  variables["LOCAL_WORLD_SIZE"] = "1";
  EXPECT_THAT(error_of(variables), HasSubstr("LOCAL_WORLD_SIZE is '1'; a number from 2 to 4"));
  variables["LOCAL_WORLD_SIZE"] = "2";
  variables.erase("MASTER_PORT");
  EXPECT_THAT(error_of(variables), HasSubstr("MASTER_PORT is missing"));
}

TEST(Launch, OneOfSeveralThatCannotFindTheOthersIsRefused) {
  const Variables ranks = {{"RANK", "0"}, {"WORLD_SIZE", "2"}};
  EXPECT_THAT(error_of(ranks),
              AllOf(HasSubstr("WORLD_SIZE is 2"),
                    HasSubstr("LOCAL_RANK, MASTER_ADDR, MASTER_PORT are missing")));
  EXPECT_THAT(error_of({{"WORLD_SIZE", "2"}}), HasSubstr("RANK, LOCAL_RANK, MASTER_ADDR"));
  EXPECT_THAT(error_of({{"WORLD_SIZE", "2"},
                        {"LOCAL_RANK", "0"},
                        {"MASTER_ADDR", "node0"},
                        {"MASTER_PORT", "29500"}}),
              HasSubstr("but RANK is missing"));
  EXPECT_THAT(error_of(joined(ranks, {{"LOCAL_RANK", "0"}, {"MASTER_PORT", "29500"}})),
              HasSubstr("but MASTER_ADDR is missing"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"MASTER_ADDR", "node0"}}),
              HasSubstr("WORLD_SIZE is missing"));
}

TEST(Launch, ARankBeyondTheNumberOfRanksIsRefused) {
  EXPECT_THAT(error_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
              HasSubstr("RANK is '2'; a number from 0 to 1 is expected"));
  EXPECT_THAT(error_of({{"RANK", "1"}, {"WORLD_SIZE", "1"}}), HasSubstr("RANK is '1'"));
  EXPECT_THAT(error_of({{"WORLD_SIZE", "0"}}), HasSubstr("WORLD_SIZE is '0'"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "two"}}), HasSubstr("WORLD_SIZE is 'two'"));
}

TEST(Launch, VariablesOfOneRankMeanNothing) {
  for (const Variables& variables :
       {Variables{{"RANK", "7"}}, Variables{{"WORLD_SIZE", "1"}},
        Variables{{"RANK", "0"}, {"WORLD_SIZE", "1"}}, Variables{{"LOCAL_RANK", "1"}},
        Variables{{"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}},
        Variables{{"PMI_SIZE", "1"}, {"PMI_RANK", "0"}}, Variables{{"PMI_SIZE", "many"}}}) {
    const LaunchInfo info = detect_launch(environment_of(variables));
    EXPECT_EQ(info.launcher, Launcher::kNone);
    EXPECT_EQ(info.num_ranks, 1);
  }
}

TEST(Launch, RanksOfOtherLaunchersAreRefused) {
  for (const std::string size :
       {"PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE"})
    EXPECT_THAT(error_of({{size, "4"}}), HasSubstr(size + " is 4: "));
  EXPECT_THAT(error_of({{"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "x"}}),
              HasSubstr("nothing says how many ranks there are"));
  // Those that come with a launcher that is known mean no more.
  EXPECT_EQ(detect_launch(environment_of(joined(slurm(), {{"PMI_SIZE", "6"}}))).launcher,
            Launcher::kSlurm);
}

TEST(Launch, ASlurmTaskThatDoesNotKnowHowManyThereAreIsRefused) {
  Variables variables = slurm();
  variables.erase("SLURM_STEP_NUM_TASKS");
  EXPECT_THAT(error_of(variables), HasSubstr("SLURM_STEP_NUM_TASKS is missing"));
  variables["SLURM_PROCID"] = "0";  // a batch script
  EXPECT_EQ(detect_launch(environment_of(variables)).launcher, Launcher::kNone);
}

TEST(Launch, CommandOfMpirun) {
  const std::string path = process_environment()("PATH").value_or("");
  Variables variables = {{"PATH", "/nowhere:" + path}};
  try {
    const LaunchCommand launch =
        mpirun_command(4, {"tessera", "train"}, environment_of(variables), 16);
    EXPECT_THAT(launch.arguments[0], HasSubstr("/mpirun"));
    EXPECT_THAT(std::vector(launch.arguments.begin() + 1, launch.arguments.end()),
                ElementsAre("--quiet", "--oversubscribe", "--bind-to", "none", "-n", "4", "tessera",
                            "train"));
    EXPECT_THAT(launch.environment, testing::Contains(testing::Pair("OMP_NUM_THREADS", "4")));
  } catch (const UserError&) {
    GTEST_SKIP() << "mpirun is not installed";
  }
  variables["OMP_NUM_THREADS"] = "2";
  const LaunchCommand launch = mpirun_command(4, {"tessera"}, environment_of(variables), 16);
  EXPECT_THAT(launch.environment,
              testing::Not(testing::Contains(testing::Pair("OMP_NUM_THREADS", testing::_))));
}

TEST(Launch, MissingMpirun) {
  try {
    mpirun_command(2, {"tessera"}, environment_of({{"PATH", "/nowhere"}}), 2);
    FAIL();
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr("install Open MPI"));
  }
}

TEST(RunRank, ASingleRankPassesExceptionsOn) {
  const auto world = make_single_world();
  EXPECT_EQ(run_rank(*world, [] { return 3; }), 3);
  EXPECT_THROW(run_rank(*world, []() -> int { user_error("no"); }), UserError);
}

TEST(CommError, SaysWhoWaitedForWhom) {
  FailedWait wait;
  wait.rank = 2;
  wait.kind = CommKind::kAllGather;
  wait.number = 17;
  wait.group = "tp";
  wait.ranks = {0, 2};
  wait.missing = {0};
  wait.seconds = 30.04;
  wait.reason = "the time limit is 30 s";
  EXPECT_EQ(describe(wait),
            "rank 2 waited 30.0 s for all_gather 17 of group \"tp\" (ranks 0 2), missing rank "
            "0: the time limit is 30 s");
}

}  // namespace
}  // namespace tessera
