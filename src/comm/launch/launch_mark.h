#pragma once

#include <string>

#include "core/file/file.h"

namespace tessera {

/// How a process that starts ranks by mpirun learns that they were connected: rank 0 sends it a
/// datagram, at a name that stands in the environment.
class LaunchMark {
 public:
  /// Where the system has no such sockets there is no name, and nothing ever comes.
  LaunchMark();
  /// For kVariable of the ranks' environment.
  const std::string& name() const { return name_; }
  bool came() const;

  static constexpr const char* kVariable = "TESSERA_LAUNCH_MARK";

 private:
  FileDescriptor socket_;
  std::string name_;
};

/// Tells the process that started this rank, whose mark has that name, that the ranks are
/// connected.
void send_launch_mark(const std::string& name);

}  // namespace tessera
