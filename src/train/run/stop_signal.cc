#include "train/run/stop_signal.h"

#include <fmt/format.h>

#include <atomic>

namespace tessera {
namespace {

// A signal handler can reach nothing but static storage, and may run on another thread.
std::atomic<int> g_received = 0;
static_assert(std::atomic<int>::is_always_lock_free);
void (*g_old_terminate)(int) = nullptr;

void mark(int signal) {
  if (g_received == SIGINT && signal == SIGINT) {
    std::signal(SIGINT, SIG_DFL);
    std::raise(SIGINT);
  }
  g_received = signal;
  if (signal == SIGTERM && g_old_terminate != nullptr) g_old_terminate(signal);
}

}  // namespace

StopSignal::StopSignal() {
  g_received = 0;
  sigaction(SIGTERM, nullptr, &old_terminate_);
  const auto old = old_terminate_.sa_handler;
  g_old_terminate = old == SIG_DFL || old == SIG_IGN ? nullptr : old;
  struct sigaction action {};
  action.sa_handler = mark;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, &old_interrupt_);
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGUSR1, &action, &old_user_);
  // nohup has it ignored, and means it.
  sigaction(SIGHUP, nullptr, &old_hangup_);
  if (old_hangup_.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
}

StopSignal::~StopSignal() {
  sigaction(SIGINT, &old_interrupt_, nullptr);
  sigaction(SIGTERM, &old_terminate_, nullptr);
  sigaction(SIGUSR1, &old_user_, nullptr);
  sigaction(SIGHUP, &old_hangup_, nullptr);
}

int StopSignal::received() const {
  return g_received;
}

std::string describe_stop(int64_t signal, int64_t step, bool saved) {
  return fmt::format(
      "stopped by signal {} after step {}; {}", signal, step,
      saved ? "the same command continues" : "nothing is saved, since run.save is false");
}

}  // namespace tessera
