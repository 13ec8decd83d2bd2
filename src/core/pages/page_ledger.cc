#include "core/pages/page_ledger.h"

#include <algorithm>

#include "core/error.h"

namespace tessera {

PageLedger::PageLedger(int64_t num_bytes, int64_t page_bytes)
    : page_bytes_(page_bytes), limit_(num_bytes) {
  ensure(num_bytes >= 0 && page_bytes > 0, "pages of {} in {} bytes", page_bytes, num_bytes);
  pages_.resize((num_bytes + page_bytes - 1) / page_bytes);
}

void PageLedger::check_range(int64_t begin, int64_t end) const {
  ensure(0 <= begin && begin <= end && end <= limit_, "bytes {} to {} of {} were wanted", begin,
         end, limit_);
}

std::vector<PageLedger::Piece> PageLedger::need(int64_t begin, int64_t end, int64_t most_pages) {
  check_range(begin, end);
  std::vector<Piece> missing;
  if (begin == end) return missing;
  const int64_t behind = (end + page_bytes_ - 1) / page_bytes_;
  for (int64_t page = begin / page_bytes_; page < behind; ++page) {
    Page& one = pages_[page];
    if (one.state == State::kIdle) {
      one.state = State::kNeeded;
      --num_idle_;
      ++num_needed_;
    }
    if (one.state != State::kNone) continue;
    const int64_t at = page * page_bytes_;
    const bool goes_on = !missing.empty() && missing.back().end == at && page % most_pages != 0;
    if (!goes_on) missing.push_back({at, at});
    missing.back().end = at + page_bytes_;
  }
  return missing;
}

void PageLedger::add(const Piece& piece) {
  const int64_t first = piece.begin / page_bytes_;
  const int64_t behind = piece.end / page_bytes_;
  for (int64_t page = first; page < behind; ++page) {
    ensure(pages_[page].state == State::kNone, "page {} has memory already", page);
    pages_[page] = {State::kNeeded, page == first, 0};
  }
  num_pages_ += behind - first;
  num_needed_ += behind - first;
}

void PageLedger::leave(int64_t begin, int64_t end, int64_t now) {
  check_range(begin, end);
  if (num_needed_ == 0) return;
  const bool to_last = end == limit_;
  const int64_t behind = to_last ? static_cast<int64_t>(pages_.size()) : end / page_bytes_;
  for (int64_t page = (begin + page_bytes_ - 1) / page_bytes_; page < behind; ++page) {
    Page& one = pages_[page];
    if (one.state != State::kNeeded) continue;
    one.state = State::kIdle;
    one.left_at = now;
    ++num_idle_;
    --num_needed_;
  }
}

void PageLedger::keep() {
  for (Page& one : pages_) {
    if (one.state != State::kNone) one.state = State::kKept;
  }
  num_idle_ = 0;
  num_needed_ = 0;
}

/// The first page behind the piece that begins at `page`.
int64_t PageLedger::find_end(int64_t page) const {
  int64_t end = page + 1;
  while (end < std::ssize(pages_) && pages_[end].state != State::kNone && !pages_[end].begins_piece)
    ++end;
  return end;
}

std::vector<PageLedger::Piece> PageLedger::idle() const {
  std::vector<Piece> found;
  if (num_idle_ == 0) return found;
  for (int64_t page = 0; page < std::ssize(pages_);) {
    if (!pages_[page].begins_piece) {
      ++page;
      continue;
    }
    const int64_t end = find_end(page);
    const auto first = pages_.begin() + page;
    const auto last = pages_.begin() + end;
    if (std::all_of(first, last, [](const Page& one) { return one.state == State::kIdle; })) {
      const int64_t left_at = std::ranges::max_element(first, last, {}, &Page::left_at)->left_at;
      found.push_back({page * page_bytes_, end * page_bytes_, left_at});
    }
    page = end;
  }
  return found;
}

void PageLedger::remove(const Piece& piece) {
  const int64_t first = piece.begin / page_bytes_;
  const int64_t behind = piece.end / page_bytes_;
  ensure(pages_.at(first).begins_piece && find_end(first) == behind,
         "pages {} to {} did not come together", first, behind);
  for (int64_t page = first; page < behind; ++page) {
    ensure(pages_[page].state == State::kIdle, "page {} is still needed", page);
    pages_[page] = {};
  }
  num_pages_ -= behind - first;
  num_idle_ -= behind - first;
}

}  // namespace tessera
