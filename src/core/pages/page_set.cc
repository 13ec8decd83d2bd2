#include "core/pages/page_set.h"

#include "core/error.h"

namespace tessera {

PageSet::PageSet(int64_t num_bytes, int64_t page_bytes)
    : page_bytes_(page_bytes), limit_(num_bytes) {
  ensure(num_bytes >= 0 && page_bytes > 0, "a set of pages of {} in {} bytes", page_bytes,
         num_bytes);
  has_.resize((num_bytes + page_bytes - 1) / page_bytes);
}

void PageSet::add(int64_t begin, int64_t end) {
  ensure(0 <= begin && begin <= end && end <= limit_, "bytes {} to {} of {} were wanted", begin,
         end, limit_);
  if (begin == end) return;
  const int64_t behind = (end + page_bytes_ - 1) / page_bytes_;
  for (int64_t page = begin / page_bytes_; page < behind; ++page) {
    if (has_[page]) continue;
    has_[page] = true;
    ++num_pages_;
  }
}

}  // namespace tessera
