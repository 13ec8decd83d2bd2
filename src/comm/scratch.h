#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "core/memory.h"

namespace tessera {

/// Scratch buffers of one size, kept for the next operation: mapping fresh memory costs more than a
/// small reduction. Not thread-safe.
class ScratchPool {
 public:
  /// What the reduction of one operation gets.
  static constexpr int64_t kBytes = int64_t{4} << 20;

  /// Goes back to the pool with the last copy of the pointer.
  std::shared_ptr<Buffer> take() {
    if (free_->empty()) free_->push_back(std::make_unique<Buffer>(kBytes, "a reduction"));
    std::unique_ptr<Buffer> buffer = std::move(free_->back());
    free_->pop_back();
    return {buffer.release(), [free = free_](Buffer* returned) { free->emplace_back(returned); }};
  }

 private:
  using Free = std::vector<std::unique_ptr<Buffer>>;
  std::shared_ptr<Free> free_ = std::make_shared<Free>();
};

}  // namespace tessera
