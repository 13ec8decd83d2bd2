#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/memory.h"
#include "core/slice.h"

namespace tessera {

/// Host memory for a copy of all that a rank saves, taken once and filled again and again. Not
/// thread-safe.
class Snapshot {
 public:
  /// What it takes for these tensors, with each at an aligned place.
  static int64_t count_bytes(std::span<const NamedSlice> slices);

  explicit Snapshot(int64_t num_bytes);

  /// Copies all, from whatever device they are on. Throws InternalError where the memory is less.
  void take(std::span<const NamedSlice> model, std::span<const NamedSlice> optimizer);
  /// The copies, which stay until the next take().
  std::span<const NamedSlice> model() const { return model_; }
  std::span<const NamedSlice> optimizer() const { return optimizer_; }
  int64_t num_bytes() const { return buffer_.num_bytes(); }

 private:
  std::vector<NamedSlice> copy(std::span<const NamedSlice> slices, int64_t& offset) const;

  Buffer buffer_;
  std::vector<NamedSlice> model_;
  std::vector<NamedSlice> optimizer_;
};

}  // namespace tessera
