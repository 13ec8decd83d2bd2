#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/slice.h"
#include "core/tensor.h"

namespace tessera {

/// The memory of several tensors of one device seen as one range of bytes, one tensor's after the
/// other's.
class ScatteredBytes {
 public:
  explicit ScatteredBytes(std::span<const Tensor> tensors);

  int64_t num_bytes() const { return num_bytes_; }
  /// The bytes themselves where the tensors lie so in memory, without gaps; else null.
  std::byte* contiguous() const { return contiguous_; }
  /// Whose memory it is where the host does not reach it; else null.
  Device* device() const { return device_; }
  /// Copies bytes [range.begin, range.end()) to, or from, `memory` of the same device, in the order
  /// of its work.
  void read(IndexRange range, std::byte* memory) const;
  void write(IndexRange range, const std::byte* memory) const;

 private:
  struct Piece {
    std::byte* data = nullptr;
    IndexRange bytes;
  };

  /// Calls visit(address, offset from range.begin, bytes) for each run in memory.
  template <typename Visit>
  void for_each_run(IndexRange range, const Visit& visit) const;

  std::vector<Piece> pieces_;
  int64_t num_bytes_ = 0;
  std::byte* contiguous_ = nullptr;
  Device* device_ = nullptr;
};

}  // namespace tessera
