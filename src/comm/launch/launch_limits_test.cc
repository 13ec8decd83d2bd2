#include "comm/launch/launch_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace tessera {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string error_of(const LaunchLimits& limits, int64_t num_ranks = 2, int64_t num_threads = 1) {
  try {
    check_launch(limits, num_ranks, num_threads);
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

std::string rank_error_of(const LaunchLimits& limits, int64_t num_ranks, bool with_mpi) {
  try {
    check_rank(limits, num_ranks, with_mpi);
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

TEST(LaunchLimits, ThisMachinesAllowARank) {
  const LaunchLimits limits = read_launch_limits();
  EXPECT_GT(limits.open_files, 0);
  EXPECT_GT(limits.stack_bytes, 0);
  EXPECT_GT(limits.available_memory, 0);
  EXPECT_LT(limits.available_memory, LaunchLimits::kUnlimited);
}

TEST(LaunchLimits, NoneIsFine) {
  EXPECT_EQ(error_of({}), "no error");
  EXPECT_EQ(error_of({}, 100'000, 1000), "no error");
}

TEST(LaunchLimits, OpenFilesAreForAllRanks) {
  EXPECT_THAT(error_of({.open_files = 16}),
              AllOf(HasSubstr("16 files open (ulimit -n)"), HasSubstr("`ulimit -n 48`")));
  EXPECT_EQ(error_of({.open_files = 48}), "no error");
  EXPECT_THAT(error_of({.open_files = 48}, 3), HasSubstr("mpirun with 3 ranks needs up to 56"));
}

TEST(LaunchLimits, SizeOfFiles) {
  EXPECT_THAT(error_of({.file_bytes = 100 << 10}),
              AllOf(HasSubstr("a file may have 100 KiB (ulimit -f)"), HasSubstr("8192 KiB")));
  EXPECT_EQ(error_of({.file_bytes = 8 << 20}), "no error");
}

TEST(LaunchLimits, AddressSpaceIsForStacksToo) {
  const LaunchLimits limits{.address_space = int64_t{700000} << 10};
  EXPECT_EQ(error_of(limits, 2, 2), "no error");
  EXPECT_THAT(error_of(limits, 2, 64),
              AllOf(HasSubstr("700000 KiB of address space (ulimit -v)"),
                    HasSubstr("a rank of 64 threads under Open MPI needs at least 917504 KiB")));
}

TEST(LaunchLimits, ProcessesInUseCount) {
  const LaunchLimits limits{.tasks = 40, .tasks_in_use = 20};
  EXPECT_EQ(error_of(limits, 2, 3), "no error");
  EXPECT_THAT(error_of(limits, 2, 4),
              AllOf(HasSubstr("40 processes and threads (ulimit -u) and has 20"),
                    HasSubstr("need up to 22 more"), HasSubstr("`ulimit -u 42`")));
}

TEST(LaunchLimits, MemoryOfRanksThatDoNothing) {
  const LaunchLimits limits{.available_memory = int64_t{1} << 30};
  EXPECT_EQ(error_of(limits, 42), "no error");
  EXPECT_THAT(error_of(limits, 99999), HasSubstr("1024 MiB are left: start fewer"));
}

TEST(LaunchLimits, ARankThatSomeoneElseStarted) {
  EXPECT_THAT(rank_error_of({.open_files = 16}, 2, false),
              HasSubstr("one of 2 ranks needs up to 36"));
  EXPECT_EQ(rank_error_of({.file_bytes = 1 << 10}, 2, false), "no error");
  EXPECT_THAT(rank_error_of({.file_bytes = 1 << 10}, 2, true), HasSubstr("ulimit -f"));
}

}  // namespace
}  // namespace tessera
