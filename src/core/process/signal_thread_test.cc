#include "core/process/signal_thread.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <stop_token>
#include <thread>

namespace tessera {
namespace {

// A signal handler can reach nothing but static storage.
std::atomic<pid_t> g_taken_by = 0;
std::atomic<int> g_count = 0;

void note_thread(int /*signal*/) {
  g_taken_by = ::gettid();
  ++g_count;
}

/// Has a handler for a signal while it lives.
class Handler {
 public:
  explicit Handler(int signal) : signal_(signal) {
    g_taken_by = 0;
    g_count = 0;
    struct sigaction action {};
    action.sa_handler = note_thread;
    sigaction(signal, &action, &before_);
  }
  ~Handler() { sigaction(signal_, &before_, nullptr); }

 private:
  int signal_;
  struct sigaction before_ {};
};

/// A thread that computes until it is told to end.
class Busy {
 public:
  pid_t id() const { return id_; }
  Busy() {
    while (id_ == 0) std::this_thread::yield();
  }

 private:
  std::atomic<pid_t> id_ = 0;
  std::jthread thread_{[this](const std::stop_token& stop) {
    id_ = ::gettid();
    while (!stop.stop_requested()) std::this_thread::yield();
  }};
};

void wait_for_count(int count) {
  while (g_count < count) std::this_thread::yield();
}

TEST(SignalThread, TakesTheSignalsOfTheProcess) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    const Handler handler(signal);
    const SignalThread signals;
    const Busy busy;
    for (int i = 1; i <= 50; ++i) {
      ::kill(::getpid(), signal);
      wait_for_count(i);
      EXPECT_NE(g_taken_by, ::gettid());
      EXPECT_NE(g_taken_by, busy.id());
    }
  }
}

TEST(SignalThread, GivesThemBack) {
  const Handler handler(SIGUSR1);
  { const SignalThread signals; }
  ::kill(::getpid(), SIGUSR1);
  wait_for_count(1);
  EXPECT_EQ(g_taken_by, ::gettid());
}

TEST(SignalThread, LeavesWhatWasBlocked) {
  const Handler handler(SIGUSR1);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  {
    const SignalThread signals;
    ::kill(::getpid(), SIGUSR1);
  }
  EXPECT_EQ(g_count, 0);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  wait_for_count(1);
}

}  // namespace
}  // namespace tessera
