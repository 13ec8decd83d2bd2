#pragma once

#include <csignal>

namespace tessera {

/// While it lives, a page of a mapped file that cannot be had ends the process with a message that
/// names the file and the exit code for users, not with SIGBUS: the file was cut while it was in
/// use, or its disk failed. SIGBUS of other memory stays as it was. For programs, not for a
/// library. One object at a time.
class LostPageMessage {
 public:
  LostPageMessage();
  ~LostPageMessage();
  LostPageMessage(const LostPageMessage&) = delete;
  LostPageMessage& operator=(const LostPageMessage&) = delete;

 private:
  struct sigaction before_ {};
};

}  // namespace tessera
