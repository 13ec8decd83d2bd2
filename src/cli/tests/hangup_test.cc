#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "cli/tests/cli_testing.h"
#include "core/testing/case_share.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// So many that a busy machine's signals come before the last.
constexpr int kSteps = testing::kCaseShare == 1 ? 400 : 200;

/// As under a shell, whatever this test runs under.
void expect_hangups() {
  std::signal(SIGHUP, SIG_DFL);
}
void ignore_hangups() {
  std::signal(SIGHUP, SIG_IGN);
}

/// A lost terminal, which the system tells by SIGHUP.
class CliHangup : public CliTest {
 protected:
  Arguments run(const std::string& name, const Arguments& more = {}) const {
    Arguments all =
        train(name, {fmt::format("--train.steps={}", kSteps), "--train.global_batch=4"});
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  static bool has_mpirun() { return std::system("command -v mpirun > /dev/null 2>&1") == 0; }

  /// Stops a run by hang-ups, twice in a moment as a closed terminal does, and lets the same
  /// command finish it.
  void hang_up_and_continue(const Arguments& arguments) const {
    ChildProcess child(arguments, 0, {}, expect_hangups);
    ASSERT_NE(child.read_line_with("  5/"), "");
    child.send(SIGHUP);
    child.send(SIGHUP);
    const Finished stopped = child.wait();
    EXPECT_EQ(stopped.code, 0) << stopped.err;
    EXPECT_THAT(stopped.out, HasSubstr("stopped by signal"));
    EXPECT_THAT(stopped.out, HasSubstr("saved "));
    const Finished continued = run_tessera(arguments);
    EXPECT_EQ(continued.code, 0) << continued.err;
    EXPECT_THAT(continued.out, HasSubstr("continuing after step "));
  }

  void expect_finished(const std::string& name) const {
    EXPECT_EQ(read_steps(name).size(), kSteps);
    EXPECT_EQ(checkpoints(name).back(), fmt::format("step-{:08}", kSteps));
  }
};

TEST_F(CliHangup, SavesAndTheSameCommandContinues) {
  hang_up_and_continue(run("one"));
  expect_finished("one");
}

TEST_F(CliHangup, OfTheLaunchingProcessSavesOnAllRanks) {
  if (!has_mpirun()) GTEST_SKIP() << "no mpirun";
  hang_up_and_continue(run("two", {"--ranks", "2"}));
  expect_finished("two");
}

TEST_F(CliHangup, IsIgnoredWhereItWasBefore) {
  std::vector<Arguments> runs = {run("one")};
  if (has_mpirun()) runs.push_back(run("two", {"--ranks", "2"}));
  for (const Arguments& arguments : runs) {
    ChildProcess child(arguments, 0, {}, ignore_hangups);
    ASSERT_NE(child.read_line_with("  5/"), "");
    child.send(SIGHUP);
    const Finished finished = child.wait();
    EXPECT_EQ(finished.code, 0) << finished.err;
    EXPECT_THAT(finished.out, ::testing::Not(HasSubstr("stopped by signal")));
  }
  expect_finished("one");
}

/// The real thing: the process leads a session on a terminal whose other end goes away.
TEST_F(CliHangup, OfATerminalThatIsGoneSaves) {
  FileDescriptor terminal(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(terminal && ::grantpt(terminal.get()) == 0 && ::unlockpt(terminal.get()) == 0);
  const std::string name = ::ptsname(terminal.get());
  ChildProcess child(run("tty", {"--train.steps=100000"}), 0, {{"TERM", "xterm"}}, [&name] {
    expect_hangups();
    ::setsid();
    const int screen = ::open(name.c_str(), O_RDWR);
    ::ioctl(screen, TIOCSCTTY, 0);
    for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
      ::dup2(screen, descriptor);
    ::close(screen);
  });
  std::string seen;
  char buffer[256];
  while (seen.find("  5/") == std::string::npos) {
    const ssize_t count = ::read(terminal.get(), buffer, sizeof(buffer));
    ASSERT_GT(count, 0) << seen;
    seen.append(buffer, count);
  }
  terminal.reset();
  EXPECT_EQ(child.wait().code, 0);
  EXPECT_FALSE(checkpoints("tty").empty());
}

TEST_F(CliHangup, RanksGoOnWithoutAReader) {
  if (!has_mpirun()) GTEST_SKIP() << "no mpirun";
  ChildProcess child(run("two", {"--ranks", "2"}));
  ASSERT_NE(child.read_line_with("  5/"), "");
  child.stop_reading();
  const Finished finished = child.wait();
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("nobody reads it any more; training goes on"));
  expect_finished("two");
}

TEST_F(CliHangup, RanksGoOnWithAFullDiskBehindTheirOutput) {
  if (!has_mpirun()) GTEST_SKIP() << "no mpirun";
  ChildProcess child(run("two", {"--ranks", "2"}), 0, {},
                     [] { ::dup2(::open("/dev/full", O_WRONLY), STDOUT_FILENO); });
  const Finished finished = child.wait();
  EXPECT_EQ(finished.code, 1);
  EXPECT_THAT(finished.err, HasSubstr("No space left on device"));
  expect_finished("two");
}

}  // namespace
}  // namespace tessera
