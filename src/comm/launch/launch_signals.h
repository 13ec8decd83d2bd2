#pragma once

#include <signal.h>

namespace tessera {

/// Blocks the signals that a launching process waits for instead of being ended by them, in this
/// thread and those that it starts while this lives: a thread that did not block them would take
/// them. SIGHUP is none of them where it is ignored, as under nohup.
class LaunchSignals {
 public:
  LaunchSignals();
  ~LaunchSignals();
  LaunchSignals(const LaunchSignals&) = delete;
  LaunchSignals& operator=(const LaunchSignals&) = delete;

  const sigset_t& all() const { return all_; }
  /// What was blocked before.
  const sigset_t& before() const { return before_; }

 private:
  sigset_t all_{};
  sigset_t before_{};
};

}  // namespace tessera
