#pragma once

#include <cstddef>
#include <cstdint>

#include "core/file/file.h"

namespace tessera {

/// The memory of another process of this machine.
class PeerMemory {
 public:
  /// `process` is a descriptor of the process (pidfd).
  PeerMemory(int64_t pid, FileDescriptor process);

  enum class Outcome : uint8_t {
    kRead,
    kGone,     ///< the process has ended
    kRefused,  ///< by the system, errno says why
  };
  /// Copies from an address of the process, with this process's OpenMP threads where it is worth
  /// that.
  Outcome read(uint64_t address, void* to, int64_t bytes) const;
  bool has_ended() const;

 private:
  Outcome read_slice(uint64_t address, std::byte* to, int64_t bytes) const;

  int64_t pid_;
  FileDescriptor process_;
};

}  // namespace tessera
