#include "core/page_set.h"

#include "core/error.h"

namespace tessera {

PageSet::PageSet(int64_t num_bytes, int64_t page_bytes)
    : page_bytes_(page_bytes), limit_(num_bytes) {
  ensure(num_bytes >= 0 && page_bytes > 0, "a set of pages of {} in {} bytes", page_bytes,
         num_bytes);
  has_.resize((num_bytes + page_bytes - 1) / page_bytes);
}

void PageSet::add(int64_t begin, int64_t end, const Run& added) {
  ensure(0 <= begin && begin <= end && end <= limit_, "bytes {} to {} of {} were wanted", begin,
         end, limit_);
  if (begin == end) return;
  const int64_t behind = (end + page_bytes_ - 1) / page_bytes_;
  for (int64_t page = begin / page_bytes_; page < behind;) {
    if (has_[page]) {
      ++page;
      continue;
    }
    const int64_t first = page;
    while (page < behind && !has_[page]) ++page;
    if (added) added(first * page_bytes_, page * page_bytes_);
    for (int64_t i = first; i < page; ++i) has_[i] = true;
    num_pages_ += page - first;
  }
}

}  // namespace tessera
