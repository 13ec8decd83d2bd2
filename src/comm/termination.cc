#include "comm/termination.h"

#include <atomic>

namespace tessera {
namespace {

// A signal handler can reach nothing but static storage, and may run on another thread.
std::atomic<int> g_came = 0;
std::atomic<int> g_unanswered = 0;
static_assert(std::atomic<int>::is_always_lock_free);
void (*g_before)(int) = nullptr;

// Called by the kernel, or by the handler of whoever came after us.
void mark(int signal) {
  struct sigaction current {};
  sigaction(SIGTERM, nullptr, &current);
  if (current.sa_handler == mark && g_before == nullptr) g_unanswered = 1;
  g_came = 1;
  if (g_before != nullptr) g_before(signal);
}

}  // namespace

Termination::Termination() {
  g_came = 0;
  g_unanswered = 0;
  sigaction(SIGTERM, nullptr, &before_);
  const bool plain = (before_.sa_flags & SA_SIGINFO) == 0;
  g_before = plain && before_.sa_handler != SIG_DFL && before_.sa_handler != SIG_IGN
                 ? before_.sa_handler
                 : nullptr;
  struct sigaction action {};
  action.sa_handler = mark;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
}

Termination::~Termination() {
  sigaction(SIGTERM, &before_, nullptr);
}

bool Termination::came() const {
  return g_came != 0;
}

bool Termination::unanswered() const {
  return g_unanswered != 0;
}

}  // namespace tessera
