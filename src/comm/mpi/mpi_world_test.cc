#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/testing/run_program.h"

namespace tessera {
namespace {

using testing::HasSubstr;

class MpiWorld : public testing::Test {
 protected:
  void SetUp() override {
    if (!have_mpirun()) GTEST_SKIP() << "Open MPI's mpirun is not installed";
  }
};

TEST_F(MpiWorld, TwoRanksPassAllChecks) {
  const ProgramResult result = run_ranks(2, "all");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST_F(MpiWorld, ThreeRanksPassAllChecks) {
  const ProgramResult result = run_ranks(3, "all");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST_F(MpiWorld, ALostRankEndsTheOthers) {
  const ProgramResult result = run_ranks(3, "lose");
  EXPECT_NE(result.code, 0);
  for (const std::string rank : {"0", "1"}) {
    EXPECT_THAT(result.output,
                testing::ContainsRegex("tessera: rank " + rank +
                                       " waited [0-9.]+ s for all_reduce 1 of group \"world\" "
                                       "\\(ranks 0 1 2\\), missing rank 2: rank 2 \\(process [0-9]+"
                                       "\\) has ended"));
  }
}

TEST_F(MpiWorld, MissingPluginIsNamed) {
  // In a folder of a folder of its own: `../lib` is looked into as well.
  const ProgramResult result = run_program(
      "D=$(mktemp -d) && mkdir $D/bin && cp " TESSERA_BINARY
      "/comm_test_rank $D/bin && OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 "
      "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 $D/bin/comm_test_rank all; "
      "code=$?; rm -r $D; exit $code");
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.output, HasSubstr("libtessera_mpi.so"));
  EXPECT_THAT(result.output, HasSubstr("install libopenmpi-dev"));
}

TEST_F(MpiWorld, AnotherNumberOfRanksIsRefused) {
  // As when srun's tasks do not find one another: MPI starts with one rank.
  const ProgramResult result = run_program(
      "env -u OMPI_COMM_WORLD_SIZE SLURM_STEP_ID=0 SLURM_PROCID=0 "
      "SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=0 OMPI_ALLOW_RUN_AS_ROOT=1 "
      "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_ess_singleton_isolated=1 " TESSERA_BINARY
      "/comm_test_rank all");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_THAT(result.output, HasSubstr("started 4 ranks, but MPI joined 1"));
}

}  // namespace
}  // namespace tessera
