#include "comm/launch/launch_signals.h"

#include <initializer_list>

namespace tessera {

LaunchSignals::LaunchSignals() {
  sigemptyset(&all_);
  for (const int signal : {SIGINT, SIGTERM}) sigaddset(&all_, signal);
  // A blocked signal would come although it is ignored.
  struct sigaction hangup {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&all_, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &all_, &before_);
}

LaunchSignals::~LaunchSignals() {
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

}  // namespace tessera
