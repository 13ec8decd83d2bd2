#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/memory.h"

namespace tessera {

/// Scratch buffers of two sizes, kept for the next operation: mapping fresh memory costs more than
/// a small reduction. Not thread-safe.
class ScratchPool {
 public:
  /// The most that the reduction of one operation gets. Several are under way at a time, so more
  /// would add up; and what is less than a large page takes no more than is written to.
  static constexpr int64_t kBytes = int64_t{1} << 20;
  /// What one gets that needs no more, as those of a step's numbers: pages of large buffers are
  /// large, too.
  static constexpr int64_t kSmallBytes = int64_t{64} << 10;

  /// At least `num_bytes`, which are at most kBytes. Goes back to the pool with the last copy of
  /// the pointer.
  std::shared_ptr<Buffer> take(int64_t num_bytes) {
    ensure(num_bytes <= kBytes, "{} bytes of scratch memory for a reduction", num_bytes);
    const bool is_small = num_bytes <= kSmallBytes;
    const std::shared_ptr<Free>& free = is_small ? small_ : large_;
    if (free->empty())
      free->push_back(std::make_unique<Buffer>(is_small ? kSmallBytes : kBytes, "a reduction"));
    std::unique_ptr<Buffer> buffer = std::move(free->back());
    free->pop_back();
    return {buffer.release(), [free](Buffer* returned) { free->emplace_back(returned); }};
  }

 private:
  using Free = std::vector<std::unique_ptr<Buffer>>;
  std::shared_ptr<Free> small_ = std::make_shared<Free>();
  std::shared_ptr<Free> large_ = std::make_shared<Free>();
};

}  // namespace tessera
