#pragma once

#include <csignal>

namespace tessera {

/// While it lives, the signals by which a process is asked to stop (those of SignalThread) do not
/// come to this thread, nor to those that it starts: their handlers must not run where oneDNN
/// computes. For a library: what came meanwhile is handled when it ends.
class SignalMask {
 public:
  SignalMask();
  ~SignalMask();
  SignalMask(const SignalMask&) = delete;
  SignalMask& operator=(const SignalMask&) = delete;

  /// What came meanwhile is handled now. Call it where this thread computes nothing.
  void let_through() const;

 private:
  sigset_t before_{};  ///< what was blocked
};

/// The signals that ask a process to stop: SIGINT, SIGTERM, SIGHUP, SIGUSR1.
sigset_t stop_signals();

}  // namespace tessera
