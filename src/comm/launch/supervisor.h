#pragma once

#include <signal.h>
#include <sys/types.h>

#include <optional>
#include <ostream>
#include <string>

#include "core/file/file.h"

namespace tessera {

/// How mpirun ended.
struct LaunchEnd {
  int code = 0;        ///< as a shell's: 128 + the signal that ended it, a rank or this process
  bool asked = false;  ///< by a signal to this process

  /// 0 where none did.
  int signal() const;
};

/// Stands between the user and mpirun until that has ended: passes signals on one way and what the
/// ranks print the other.
class Supervisor {
 public:
  /// `signals` are blocked in this process; `printed` is the reading end of mpirun's standard
  /// output, and `out` stands for this process's.
  Supervisor(pid_t mpirun, const sigset_t& signals, FileDescriptor printed, std::ostream& out);

  LaunchEnd run();

 private:
  void take_signal();
  void pass_on(int signal);
  /// Reads once what the ranks printed; false where nothing is there now.
  bool take_text();
  void wait();
  int code_of(int status) const;

  pid_t mpirun_;
  /// Readable once mpirun has ended. SIGCHLD might be taken by a thread that does not block it.
  FileDescriptor ended_;
  FileDescriptor signals_;
  FileDescriptor printed_;
  std::ostream& out_;
  std::string text_;  ///< read, but not yet written
  std::optional<int> code_;
  int asked_by_ = 0;        ///< the first signal to this process
  bool abandoned_ = false;  ///< asked to end when only text was left
};

}  // namespace tessera
