#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// The libraries that the dynamic linker loads before the program begins, those that they need
/// included: a line each.
std::string libraries_at_start() {
  Finished finished = ChildProcess({"--help"}, 0, {{"LD_TRACE_LOADED_OBJECTS", "1"}}).wait();
  EXPECT_EQ(finished.code, 0) << finished.err;
  return finished.out;
}

TEST(ProgramStart, LoadsNoLibraryThatFewCommandsNeed) {
  const std::string libraries = libraries_at_start();
  ASSERT_THAT(libraries, HasSubstr("libdnnl"));
  for (const char* large : {"cublas", "cudart", "cudnn", "nccl", "nvrtc", "libcuda.", "libmpi"})
    EXPECT_THAT(libraries, Not(HasSubstr(large)));
}

}  // namespace
}  // namespace tessera
