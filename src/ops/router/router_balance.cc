#include "ops/router/router_balance.h"

#include <algorithm>
#include <numeric>

namespace tessera {
BalanceSegments::BalanceSegments(std::span<const int32_t> cu_seqlens, int64_t num_tokens)
    : cu_seqlens_(cu_seqlens), num_tokens_(num_tokens) {
  ensure(!cu_seqlens.empty() && cu_seqlens.front() == 0 && cu_seqlens.back() == num_tokens &&
             std::ranges::is_sorted(cu_seqlens),
         "router: cu_seqlens must rise from 0 to the {} tokens", num_tokens);
}

int64_t BalanceSegments::of(int64_t token) const {
  if (cu_seqlens_.empty()) return 0;
  return std::ranges::upper_bound(cu_seqlens_, token) - cu_seqlens_.begin() - 1;
}

void count_experts(std::span<const int32_t> expert_idx, std::span<float> counts) {
  std::ranges::fill(counts, 0.0F);
  for (const int32_t expert : expert_idx) {
    if (expert >= 0) counts[expert] += 1.0F;
  }
}

void counts_to_fractions(std::span<float> counts, int64_t group_size) {
  const float sum = std::accumulate(counts.begin(), counts.end(), 0.0F);
  const float scale = sum > 0 ? 1.0F / sum : 0.0F;
  for (float& count : counts) count *= scale;
  if (group_size == 1) return;
  for (size_t first = 0; first < counts.size(); first += group_size) {
    const auto group = counts.subspan(first, group_size);
    std::ranges::fill(group, std::accumulate(group.begin(), group.end(), 0.0F));
  }
}

void balance_fractions(const BalanceCounts& c, std::span<float> fractions) {
  if (c.segments.size() == 1 && !c.counts_E.empty()) {
    std::ranges::copy(c.counts_E, fractions.begin());
    return counts_to_fractions(fractions, c.group_size);
  }
  const int64_t num_experts = std::ssize(fractions) / std::max<int64_t>(c.segments.size(), 1);
#pragma omp parallel for schedule(static)
  for (int64_t s = 0; s < c.segments.size(); ++s) {
    const size_t first = c.segments.begin(s) * c.top_k;
    const size_t last = c.segments.end(s) * c.top_k;
    const auto row = fractions.subspan(s * num_experts, num_experts);
    count_experts(c.expert_idx_TK.subspan(first, last - first), row);
    counts_to_fractions(row, c.group_size);
  }
}

}  // namespace tessera
