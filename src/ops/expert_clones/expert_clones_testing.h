#pragma once

#include <algorithm>
#include <vector>

#include "core/random.h"
#include "ops/expert_clones/clone_plan.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {

using Counts = std::vector<int64_t>;

/// Tokens of every rank for every expert, [P · E]: in all about `mean` for an expert, `factor` of
/// that for the hot one, the rest as a Zipf distribution has it over experts in random order.
inline Counts skewed_counts(const CloneSlots& spec, int64_t mean, int64_t factor, Random& random) {
  const int64_t num_experts = spec.num_experts;
  std::vector<double> shares;
  for (int64_t e = 1; e < num_experts; ++e) shares.push_back(1.0 / static_cast<double>(e));
  for (size_t i = shares.size(); i > 1; --i) std::swap(shares[i - 1], shares[random.next_below(i)]);
  double all = 0;
  for (const double share : shares) all += share;
  const auto hot = static_cast<int64_t>(random.next_below(static_cast<uint64_t>(num_experts)));
  shares.insert(shares.begin() + hot, 0.0);
  const auto rest =
      static_cast<double>(mean * std::max<int64_t>(num_experts - factor, 0)) / (all > 0 ? all : 1);
  Counts counts(static_cast<size_t>(spec.num_ranks * num_experts), 0);
  for (int64_t e = 0; e < num_experts; ++e) {
    int64_t tokens = e == hot ? mean * factor : static_cast<int64_t>(shares[e] * rest);
    for (; tokens > 0; --tokens)
      ++counts[random.next_below(static_cast<uint64_t>(spec.num_ranks)) * num_experts + e];
  }
  return counts;
}

/// Random numbers up to `most`, some 0.
inline Counts random_counts(const CloneSlots& spec, int64_t most, Random& random) {
  Counts counts;
  for (int64_t i = 0; i < spec.num_ranks * spec.num_experts; ++i) {
    const auto count = static_cast<int64_t>(random.next_below(static_cast<uint64_t>(most + 1)));
    counts.push_back(random.next_below(3) == 0 ? 0 : count);
  }
  return counts;
}

inline CloneSlots random_slots(Random& random) {
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
  };
  CloneSlots spec{.num_ranks = 1 + below(8), .slots_per_rank = 1 + below(4)};
  spec.num_experts = spec.num_ranks * (1 + below(6));
  spec.rank = below(spec.num_ranks);
  return spec;
}

/// What a router decided on one rank: for each assignment an expert, or -1, and route_map's view.
struct Assignments {
  std::vector<int32_t> expert_idx;
  std::vector<int32_t> row_of;
  Counts offsets;
};

/// As many of each expert as `counts` say, in random order, and one of no expert.
inline Assignments draw_assignments(const Counts& counts, Random& random) {
  Assignments drawn{.expert_idx = {-1}, .row_of = {}, .offsets = {0}};
  for (int64_t e = 0; e < std::ssize(counts); ++e) {
    drawn.expert_idx.insert(drawn.expert_idx.end(), counts[e], static_cast<int32_t>(e));
    drawn.offsets.push_back(drawn.offsets.back() + counts[e]);
  }
  auto& idx = drawn.expert_idx;
  for (size_t i = idx.size(); i > 1; --i) std::swap(idx[i - 1], idx[random.next_below(i)]);
  Counts next(drawn.offsets.begin(), drawn.offsets.end() - 1);
  for (const int32_t e : idx) drawn.row_of.push_back(e < 0 ? -1 : static_cast<int32_t>(next[e]++));
  return drawn;
}

}  // namespace tessera::testing
