#pragma once

#include <cstddef>
#include <vector>

#include "core/memory.h"

namespace tessera {

/// Where micro-batches wait for a device, in memory that it and the host reach: a place for each of
/// a step, in their order. A place has two blocks, and the device learns from a word which of them
/// to read when it comes to it. So the host may fill the spare blocks for the next step while the
/// device reads the others, and work that the device repeats reads what the host chose last. Not
/// thread-safe, but blocks may be filled by other threads.
class Staging {
 public:
  Staging() = default;
  Staging(int64_t block_bytes, Device& device) : block_bytes_(block_bytes), device_(&device) {}

  /// The block of the next place, to be filled before bring().
  std::byte* next() { return next_place().read; }
  /// The next place, which must be the one with this number, exchanges its blocks: its spare one is
  /// filled.
  void next_from_spare(size_t number);
  /// The other block of a place that a step came to. REQUIRES that the device is past the step
  /// before that.
  std::byte* spare(size_t number) const { return places_.at(number).spare; }
  /// Copies the first block that was not brought, when the device comes to it.
  void bring(std::byte* to);
  /// The device is past the first block that was not released.
  void release() { ++num_released_; }
  /// Goes back to the first place. REQUIRES that the device is past all blocks.
  void clear() { num_staged_ = num_brought_ = num_released_ = 0; }

 private:
  struct Place {
    Buffer memory;  ///< the word, with the blocks behind it
    std::byte* read = nullptr;
    std::byte* spare = nullptr;

    void tell_device() const { *reinterpret_cast<std::byte**>(memory.data()) = read; }
  };
  Place& next_place();
  Place make_place() const;

  int64_t block_bytes_ = 0;
  Device* device_ = nullptr;
  std::vector<Place> places_;
  size_t num_staged_ = 0;
  size_t num_brought_ = 0;
  size_t num_released_ = 0;
};

}  // namespace tessera
