#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Where a process runs, in a form that ranks exchange as bytes.
struct ProcessName {
  std::array<char, 128> machine{};  ///< boot and pid namespace; equal where pids can be compared
  int64_t pid = 0;

  static ProcessName of_this_process();
};

/// Sees the processes of other ranks on this machine end, and the launcher's.
class ProcessWatch {
 public:
  /// `names` by rank.
  explicit ProcessWatch(const std::vector<ProcessName>& names);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  /// "rank 3 (process 1234) has ended", or nothing while all run.
  std::optional<std::string> lost() const;

 private:
  struct Peer {
    int64_t rank = 0;
    int64_t pid = 0;
    int descriptor = -1;  ///< readable when the process has ended
  };
  std::vector<Peer> peers_;
  pid_t parent_;
};

}  // namespace tessera
