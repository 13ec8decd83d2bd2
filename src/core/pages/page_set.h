#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

/// Which pages of some bytes are wanted.
class PageSet {
 public:
  /// page_bytes > 0.
  PageSet(int64_t num_bytes, int64_t page_bytes);

  /// Adds the pages that meet [begin, end), which must lie within num_bytes.
  void add(int64_t begin, int64_t end);

  int64_t page_bytes() const { return page_bytes_; }
  /// Of all pages in the set.
  int64_t num_bytes() const { return num_pages_ * page_bytes_; }

 private:
  int64_t page_bytes_;
  int64_t limit_;
  int64_t num_pages_ = 0;
  std::vector<bool> has_;
};

}  // namespace tessera
