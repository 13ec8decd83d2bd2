#include "train/infer/page_pool.h"

#include <numeric>

#include "core/error.h"

namespace tessera {

PagePool::PagePool(int64_t num_pages)
    : num_pages_(num_pages), free_(static_cast<size_t>(num_pages)) {
  std::iota(free_.rbegin(), free_.rend(), 0);
}

std::vector<int32_t> PagePool::take(int64_t count) {
  ensure(count >= 0 && count <= num_free(), "{} pages of {} free ones", count, num_free());
  const std::vector<int32_t> pages(free_.end() - count, free_.end());
  free_.resize(free_.size() - static_cast<size_t>(count));
  return pages;
}

void PagePool::give_back(const std::vector<int32_t>& pages) {
  free_.insert(free_.end(), pages.begin(), pages.end());
  ensure(num_free() <= num_pages_, "{} free pages of {}", num_free(), num_pages_);
}

}  // namespace tessera
