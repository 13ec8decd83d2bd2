#pragma once

#include <csignal>
#include <cstdint>
#include <string>

namespace tessera {

/// While it lives, SIGINT, SIGTERM, SIGHUP (a lost terminal; not where it was ignored before, as by
/// nohup) and SIGUSR1 (which launch_local_ranks sends to its ranks for any of them) only leave a
/// mark, so that the training loop can save and end cleanly; a second SIGINT ends the process at
/// once. A handler of SIGTERM that was there before is called as well. One object at a time.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  /// The signal that came, or 0.
  int received() const;

 private:
  struct sigaction old_interrupt_ {};
  struct sigaction old_terminate_ {};
  struct sigaction old_user_ {};
  struct sigaction old_hangup_ {};
};

/// What a run that a signal stopped says: whether anything is `saved`.
std::string describe_stop(int64_t signal, int64_t step, bool saved);

}  // namespace tessera
