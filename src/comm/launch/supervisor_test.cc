#include "comm/launch/supervisor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <sstream>
#include <thread>

#include "comm/launch/launch_signals.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;

/// A process that says something, closes its output and ends some time after that.
pid_t start_child(const std::array<int, 2>& pipe, int code) {
  const pid_t child = fork();
  if (child != 0) return child;
  close(pipe[0]);
  const bool wrote = write(pipe[1], "text", 4) == 4;
  close(pipe[1]);
  usleep(200'000);
  _exit(wrote ? code : 99);
}

/// Where a thread that blocks no signals takes those of children, as a driver's threads may.
TEST(Supervisor, EndsWithMpirunWhoeverTakesSignals) {
  std::atomic<bool> over = false;
  std::thread other([&] {
    while (!over) std::this_thread::sleep_for(1ms);
  });
  std::array<int, 2> pipe{};
  ASSERT_EQ(pipe2(pipe.data(), O_CLOEXEC), 0);
  const LaunchSignals signals;
  const pid_t child = start_child(pipe, 7);
  close(pipe[1]);
  std::ostringstream out;
  const LaunchEnd end = Supervisor(child, signals.all(), FileDescriptor(pipe[0]), out).run();
  over = true;
  other.join();
  EXPECT_EQ(end.code, 7);
  EXPECT_FALSE(end.asked);
  EXPECT_EQ(out.str(), "text");
}

/// The code of a shell for the user's signal, not for that by which ranks are asked to stop.
TEST(Supervisor, EndsAsTheUsersSignalWhereNoRankTrains) {
  for (const int signal : {SIGINT, SIGTERM}) {
    std::array<int, 2> pipe{};
    ASSERT_EQ(pipe2(pipe.data(), O_CLOEXEC), 0);
    const LaunchSignals signals;
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      pause();
      _exit(0);
    }
    close(pipe[1]);
    raise(signal);  // to this thread: others do not block it
    std::ostringstream out;
    const LaunchEnd end = Supervisor(child, signals.all(), FileDescriptor(pipe[0]), out).run();
    EXPECT_EQ(end.code, 128 + signal);
    EXPECT_TRUE(end.asked);
  }
}

TEST(LaunchSignals, AreBlockedAsLongAsTheyLive) {
  sigset_t now;
  {
    const LaunchSignals signals;
    pthread_sigmask(SIG_SETMASK, nullptr, &now);
    EXPECT_EQ(sigismember(&now, SIGINT), 1);
    EXPECT_EQ(sigismember(&signals.before(), SIGINT), 0);
  }
  pthread_sigmask(SIG_SETMASK, nullptr, &now);
  EXPECT_EQ(sigismember(&now, SIGINT), 0);
}

}  // namespace
}  // namespace tessera
