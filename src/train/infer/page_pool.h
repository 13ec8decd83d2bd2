#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

/// Which pages of a cache, or slots for states, are free. Not thread-safe.
class PagePool {
 public:
  explicit PagePool(int64_t num_pages);
  int64_t num_pages() const { return num_pages_; }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  /// REQUIRES as many free ones.
  std::vector<int32_t> take(int64_t count);
  void give_back(const std::vector<int32_t>& pages);

 private:
  int64_t num_pages_;
  std::vector<int32_t> free_;
};

}  // namespace tessera
