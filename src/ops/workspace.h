#pragma once

#include <cstdint>
#include <span>

#include "core/memory.h"

namespace tessera {

/// The parts of a kernel's scratch memory, one after another, each aligned. Written once as a
/// function of the sizes, it serves both the kernel and its KernelOptions::workspace.
class WorkspaceLayout {
 public:
  /// Adds `count` elements of T and returns where they start, in bytes.
  template <typename T>
  int64_t add(int64_t count) {
    const int64_t offset = num_bytes_;
    num_bytes_ += align_up(count * static_cast<int64_t>(sizeof(T)));
    return offset;
  }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  int64_t num_bytes_ = 0;
};

template <typename T>
T* workspace_part(std::span<std::byte> workspace, int64_t offset) {
  return reinterpret_cast<T*>(workspace.data() + offset);
}

}  // namespace tessera
