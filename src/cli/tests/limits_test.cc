#include <sys/resource.h>

#include "cli/tests/cli_testing.h"

namespace tessera {
namespace {

std::function<void()> limit(__rlimit_resource resource, rlim_t most) {
  return [resource, most] {
    const rlimit both{most, most};
    ::setrlimit(resource, &both);
  };
}

/// What a process may have, as `ulimit` and OpenMP's variables say.
class CliLimits : public CliTest {
 protected:
  static Finished run_limited(const Arguments& arguments, const std::function<void()>& prepare) {
    return ChildProcess(arguments, 0, {}, prepare).wait();
  }
  static Finished run_with(const std::string& name, const std::string& value) {
    return ChildProcess({"doctor"}, 0, {}, [&] { ::setenv(name.c_str(), value.c_str(), 1); })
        .wait();
  }
};

TEST_F(CliLimits, AnAbsurdNumberOfThreadsIsRefused) {
  expect_error(run_with("OMP_NUM_THREADS", "100000"),
               {"OMP_NUM_THREADS", "100000 threads", "processors"});
  for (const char* value : {"abc", "0", "-3", "2,x", "4 cores", "99999999999999999999"}) {
    // OpenMP's library says a line of its own before the program begins.
    const Finished finished = run_with("OMP_NUM_THREADS", value);
    EXPECT_EQ(finished.code, 2) << value;
    EXPECT_THAT(finished.err,
                ::testing::HasSubstr(std::string("tessera: OMP_NUM_THREADS is \"") + value +
                                     "\"; expected a number of threads from 1 on\n"));
  }
  for (const char* value : {"64", "", " 2 ", "2, 1"})
    EXPECT_EQ(run_with("OMP_NUM_THREADS", value).code, 0) << value;
}

TEST_F(CliLimits, ThreadsThatCannotBeStartedAreTold) {
  expect_error(
      run_with("OMP_STACKSIZE", "100000G"),
      {"only 1 of 4 threads could be started (2 that compute)", "OMP_STACKSIZE", "97.66 TiB"});
}

TEST_F(CliLimits, SmallStacksAreRefused) {
  expect_error(run_with("OMP_STACKSIZE", "16k"), {"OMP_STACKSIZE", "16 KiB", "512 KiB"});
  expect_error(run_limited({"--help"}, limit(RLIMIT_STACK, rlim_t{100} << 10)),
               {"stack", "100 KiB", "512 KiB", "ulimit -s"});
}

/// A soft limit can be raised by the process itself.
TEST_F(CliLimits, ASmallSoftLimitOnTheStackIsRaised) {
  const auto soft = [] {
    rlimit limits{};
    ::getrlimit(RLIMIT_STACK, &limits);
    limits.rlim_cur = rlim_t{100} << 10;
    ::setrlimit(RLIMIT_STACK, &limits);
  };
  const Finished finished = run_limited(train("run"), soft);
  EXPECT_EQ(finished.code, 0) << finished.err;
}

TEST_F(CliLimits, TheLargestFileIsNamed) {
  const auto prepare = [] {
    std::signal(SIGXFSZ, SIG_DFL);
    limit(RLIMIT_FSIZE, 100 << 10)();
  };
  const Finished finished = run_limited(train("run"), prepare);
  expect_error(finished, {"File too large", "limit", "100 KiB (ulimit -f)"});
}

TEST_F(CliLimits, OpenFilesAreNamed) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizer opens files to look at memory";
#endif
  const auto set_limit = limit(RLIMIT_NOFILE, 4);
  const Finished finished = run_limited(train("run"), [&] {
    ::close_range(STDERR_FILENO + 1, ~0U, 0);  // what this test's own parent left open
    set_limit();
  });
  expect_error(finished, {"Too many open files", "the limit is 4 (ulimit -n)"});
}

TEST_F(CliLimits, MemoryIsNamed) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizer maps more than any limit";
#endif
  const Arguments large = {"--model.hidden_size=512", "--moe.inner_size=512",
                           "--model.num_layers=8", "--moe.num_experts=64", "--run.device=cpu"};
  expect_error(run_limited(train("run", large), limit(RLIMIT_AS, rlim_t{3} << 30)),
               {"out of memory", "the address space is limited to 3 GiB (ulimit -v)"});
  expect_error(run_limited({"doctor"}, limit(RLIMIT_DATA, rlim_t{40} << 20)),
               {"the data segment is limited to 40 MiB (ulimit -d)", "64 MiB more are needed"});
}

}  // namespace
}  // namespace tessera
