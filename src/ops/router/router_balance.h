#pragma once

#include <cstdint>
#include <span>

#include "ops/router/router.h"

namespace tessera {

/// The tokens that the balance loss takes together: all of them, or those of each sequence.
class BalanceSegments {
 public:
  /// One segment of all tokens.
  explicit BalanceSegments(int64_t num_tokens) : num_tokens_(num_tokens) {}
  /// The sequences between consecutive bounds. Throws InternalError unless they rise from 0 to
  /// num_tokens.
  BalanceSegments(std::span<const int32_t> cu_seqlens, int64_t num_tokens);

  int64_t size() const { return cu_seqlens_.empty() ? 1 : std::ssize(cu_seqlens_) - 1; }
  int64_t begin(int64_t segment) const { return bound(segment); }
  int64_t end(int64_t segment) const { return bound(segment + 1); }
  /// The segment of a token.
  int64_t of(int64_t token) const;

 private:
  int64_t bound(int64_t idx) const {
    if (cu_seqlens_.empty()) return idx * num_tokens_;
    return cu_seqlens_[idx];
  }

  std::span<const int32_t> cu_seqlens_;
  int64_t num_tokens_ = 0;
};

/// counts[e] = how often expert e is chosen.
void count_experts(std::span<const int32_t> expert_idx, std::span<float> counts);

/// Divides the counts of experts by their sum (zeros stay) and gives every expert the sum of its
/// group of `group_size`: the f of the balance loss.
void counts_to_fractions(std::span<float> counts_E, int64_t group_size);

/// The fraction of the assignments that each expert, or the group that it is of, has, by segment
/// (zeros where there are none). One segment takes `counts`; several count their own tokens'
/// experts.
struct BalanceCounts {
  const BalanceSegments& segments;
  std::span<const int32_t> expert_idx_TK;
  int64_t top_k = 1;
  std::span<const float> counts_E;
  int64_t group_size = 1;
};
void balance_fractions(const BalanceCounts& counts, std::span<float> fractions);

}  // namespace tessera
