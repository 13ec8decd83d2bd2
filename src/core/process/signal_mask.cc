#include "core/process/signal_mask.h"

#include <initializer_list>

namespace tessera {

sigset_t stop_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) sigaddset(&set, signal);
  return set;
}

SignalMask::SignalMask() {
  const sigset_t signals = stop_signals();
  pthread_sigmask(SIG_BLOCK, &signals, &before_);
}

void SignalMask::let_through() const {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, &before_, &blocked);
  pthread_sigmask(SIG_SETMASK, &blocked, nullptr);
}

SignalMask::~SignalMask() {
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

}  // namespace tessera
