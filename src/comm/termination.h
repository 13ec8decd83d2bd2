#pragma once

#include <csignal>

namespace tessera {

/// While it lives, SIGTERM leaves a mark, so that a rank which waits for others can say so before
/// it ends. The handler that was there before is called as well. One object at a time.
class Termination {
 public:
  Termination();
  ~Termination();
  Termination(const Termination&) = delete;
  Termination& operator=(const Termination&) = delete;

  /// SIGTERM came.
  bool came() const;
  /// SIGTERM came, and nobody else's handler was there to react to it.
  bool unanswered() const;

 private:
  struct sigaction before_ {};
};

}  // namespace tessera
