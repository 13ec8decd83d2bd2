#pragma once

#include <algorithm>
#include <span>

#include "ops/paged_attention/kept_rows.h"
#include "ops/paged_attention/pages.h"

namespace tessera {

/// On the host, the sequences of the tokens in hand, whose cu_seqlens and page_table are the inputs
/// from `first` on. Rows of pages are at least -1.
class KeptTokens {
 public:
  KeptTokens(KeptRows kept, const KernelArgs& args, int positions, int first)
      : kept_(kept), positions_(args.in(positions).span<int32_t>()) {
    if (kept != KeptRows::kPaged) return;
    bounds_ = args.in(first).span<int32_t>();
    table_ = args.in(first + 1).span<int32_t>();
    width_ = args.in(first + 1).shape[1];
  }

  int64_t count() const { return std::ssize(positions_); }
  int64_t position(int64_t token) const { return positions_[token]; }
  /// -1: the token is of none, and only fills.
  int64_t sequence(int64_t token) const {
    if (kept_ != KeptRows::kPaged) return 0;
    return token < bounds_.back() ? std::ranges::upper_bound(bounds_, token) - bounds_.begin() - 1
                                  : -1;
  }
  /// Of the token's sequence; null where there are none.
  const int32_t* pages(int64_t token) const {
    return kept_ == KeptRows::kPaged ? table_.data() + sequence(token) * width_ : nullptr;
  }
  /// The first token in hand of the token's sequence.
  int64_t first_in_hand(int64_t token) const {
    if (kept_ == KeptRows::kPacked) return token - position(token);
    return kept_ == KeptRows::kCached ? 0 : bounds_[sequence(token)];
  }
  /// The row of a position of the token's sequence.
  int64_t row(int64_t token, int64_t position_of_row) const {
    if (kept_ == KeptRows::kPacked) return token - position(token) + position_of_row;
    if (kept_ == KeptRows::kCached) return position_of_row;
    const int64_t page = table_[sequence(token) * width_ + position_of_row / kPageTokens];
    return page < 0 ? -1 : page * kPageTokens + position_of_row % kPageTokens;
  }
  /// The row of an entry that its sequence's tokens were compressed to (CompressWindows), of so
  /// many tokens each.
  int64_t entry_row(int64_t token, int64_t entry, int64_t rate) const {
    return kept_ == KeptRows::kPacked ? (token - position(token)) / rate + entry
                                      : row(token, entry);
  }
  /// Refuses positions that are not those of sequences' tokens, before any other is asked for.
  void check(const Operator& op) const {
    check_shape(op, bounds_.empty() || bounds_.back() <= count(),
                "cu_seqlens ends at {}, after the {} tokens", bounds_.empty() ? 0 : bounds_.back(),
                count());
    for (int64_t token = 0; token < count(); ++token) {
      const bool paged = kept_ == KeptRows::kPaged;
      const int64_t most = paged                        ? width_ * kPageTokens - 1
                           : kept_ == KeptRows::kPacked ? token
                                                        : position(token);
      check_shape(op, position(token) >= 0 && position(token) <= most,
                  "token {} has position {}; sequences begin with position 0", token,
                  position(token));
    }
  }

 private:
  KeptRows kept_;
  std::span<const int32_t> positions_;
  std::span<const int32_t> bounds_;
  std::span<const int32_t> table_;
  int64_t width_ = 0;
};

}  // namespace tessera
