#include "parallel/dispatch_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>

#include "core/error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

DispatcherKind chosen(int64_t top_k, int64_t ep, int64_t etp = 1, double efficiency = 1.0) {
  return choose_dispatcher(
             {.top_k = top_k, .ep = ep, .etp = etp, .all_to_all_efficiency = efficiency})
      .kind;
}

TEST(DispatchChoice, VolumesAreThePapersDividedByTokensAndWidth) {
  for (const double n : {2.0, 4.0, 8.0}) {
    for (const double k : {1.0, 2.0, 9.0}) {
      const DispatchVolumes volumes = dispatch_volumes(
          {.top_k = static_cast<int64_t>(k), .ep = static_cast<int64_t>(n), .etp = 1});
      const double tokens = 64;  // b·s of all ranks, with h = 1
      EXPECT_DOUBLE_EQ(volumes.all_to_all, 2 * k / n * tokens * (n - 1) / n / (tokens / n));
      EXPECT_DOUBLE_EQ(volumes.all_gather, 2 * tokens * (n - 1) / n / (tokens / n));
    }
  }
}

TEST(DispatchChoice, AllGatherWhereTopKExceedsTheRanks) {
  for (const int64_t ep : {2, 4, 8, 64}) {
    EXPECT_EQ(chosen(1, ep), DispatcherKind::kAllToAll);
    EXPECT_EQ(chosen(ep, ep), DispatcherKind::kAllToAll) << "no worse";
    EXPECT_EQ(chosen(ep + 1, ep), DispatcherKind::kAllGather);
  }
  EXPECT_EQ(chosen(6, 8, 1, 0.75), DispatcherKind::kAllToAll) << "figure 7";
  EXPECT_EQ(chosen(7, 8, 1, 0.75), DispatcherKind::kAllGather) << "figure 7";
}

TEST(DispatchChoice, EtpCountsBothWays) {
  // 2·K·(1/2 + 1) against 2·3.
  EXPECT_EQ(chosen(2, 2, 2), DispatcherKind::kAllToAll);
  EXPECT_EQ(chosen(3, 2, 2), DispatcherKind::kAllGather);
  EXPECT_EQ(chosen(1, 1, 4), DispatcherKind::kAllToAll) << "the same volume";
  EXPECT_EQ(chosen(2, 1, 4), DispatcherKind::kAllGather);
}

/// An all-to-all of bounded sizes moves what its peers may get, not what is routed.
TEST(DispatchChoice, BoundsCountInPlaceOfEvenRouting) {
  const DispatchSizes sizes{.top_k = 2, .ep = 4, .rows_per_peer = 2};
  EXPECT_DOUBLE_EQ(dispatch_volumes(sizes).all_to_all, 2 * 2 * 3);
  EXPECT_EQ(choose_dispatcher(sizes).kind, DispatcherKind::kAllGather);
  EXPECT_DOUBLE_EQ(dispatch_volumes({.top_k = 2, .ep = 4, .etp = 2, .rows_per_peer = 1}).all_to_all,
                   2 * (3 + 4));
  EXPECT_EQ(dispatch_volumes({.top_k = 3, .ep = 4, .rows_per_peer = 0.75}).all_to_all,
            dispatch_volumes({.top_k = 3, .ep = 4}).all_to_all);
}

TEST(DispatchChoice, ARequestDecidesButNotWithoutPeers) {
  const DispatchSizes sizes{.top_k = 9, .ep = 2};
  const DispatchChoice asked = choose_dispatcher(sizes, DispatcherRequest::kAllToAll);
  EXPECT_EQ(asked.kind, DispatcherKind::kAllToAll);
  EXPECT_EQ(asked.to_string(),
            "all_to_all (as asked): 9 rows a token leave a rank, all_gather would move 2");
  EXPECT_EQ(choose_dispatcher({.top_k = 1, .ep = 2}, DispatcherRequest::kAllGather).kind,
            DispatcherKind::kAllGather);
  EXPECT_EQ(choose_dispatcher({.top_k = 9}, DispatcherRequest::kAllGather).kind,
            DispatcherKind::kLocal);
  EXPECT_EQ(choose_dispatcher({.top_k = 9}).to_string(), "local: all experts are here");
  EXPECT_EQ(choose_dispatcher({.top_k = 7, .ep = 8, .all_to_all_efficiency = 0.75}).to_string(),
            "all_gather: 14 rows a token leave a rank, all_to_all would move 12.25; an "
            "all-to-all's count 16.33 at an efficiency of 0.75");
  // The efficiency has no part in what is asked for.
  EXPECT_EQ(choose_dispatcher({.top_k = 9, .ep = 2, .all_to_all_efficiency = 0.75},
                              DispatcherRequest::kAllToAll)
                .to_string(),
            asked.to_string());
}

/// By counting all choices of a token.
double counted_reach(const RoutedExperts& routed, int64_t ep) {
  const int64_t each = routed.num_experts / routed.num_groups;
  const int64_t here = routed.num_experts / ep;
  int64_t choices = 0;
  int64_t hits = 0;
  for (uint32_t groups = 0; groups < 1U << routed.num_groups; ++groups) {
    if (std::popcount(groups) != routed.top_groups) continue;
    for (uint32_t experts = 0; experts < 1U << routed.num_experts; ++experts) {
      if (std::popcount(experts) != routed.top_k) continue;
      bool open = true;
      for (int64_t e = 0; e < routed.num_experts; ++e)
        open = open && ((experts >> e & 1U) == 0 || (groups >> (e / each) & 1U) == 1);
      choices += open ? 1 : 0;
      hits += open && (experts & ((1U << here) - 1)) != 0 ? 1 : 0;
    }
  }
  return static_cast<double>(hits) / static_cast<double>(choices);
}

TEST(DispatchChoice, ReachIsTheShareOfChoicesThatNameARank) {
  for (const RoutedExperts& routed :
       {RoutedExperts{12, 1}, RoutedExperts{12, 3}, RoutedExperts{12, 5, 6, 3},
        RoutedExperts{12, 3, 3, 2}, RoutedExperts{12, 4, 4, 2}, RoutedExperts{12, 12}}) {
    for (const int64_t ep : {1, 2, 3, 4, 6, 12}) {
      const int64_t each = routed.num_experts / routed.num_groups;
      const int64_t here = routed.num_experts / ep;
      if (here % each != 0 && each % here != 0) continue;  // estimated as if without groups
      EXPECT_NEAR(reach_of_rank(routed, ep), counted_reach(routed, ep), 1e-12)
          << routed.top_k << " of " << routed.num_groups << " groups over " << ep;
    }
  }
}

TEST(DispatchChoice, DeduplicatedTokensGoOnceToARank) {
  // Six of 64 experts on four ranks: 4.5 rows in an all-to-all each way, 2.49 where each rank gets
  // one.
  const DispatchSizes sizes{.top_k = 6, .ep = 4, .reach = reach_of_rank({64, 6}, 4)};
  const DispatchVolumes volumes = dispatch_volumes(sizes);
  EXPECT_DOUBLE_EQ(volumes.all_to_all, 2 * 4.5);
  EXPECT_NEAR(volumes.deduplicated, 2 * 2.509, 1e-3);
  EXPECT_EQ(choose_dispatcher(sizes, DispatcherRequest::kDeduplicated).to_string(),
            "deduplicated (as asked): 5.018 rows a token leave a rank, all_to_all would move 9");
  EXPECT_DOUBLE_EQ(dispatch_volumes({.top_k = 6, .ep = 1, .etp = 3, .reach = 1}).deduplicated, 4);
}

TEST(DispatchChoice, HierarchicalTokensGoOnceToANode) {
  const RoutedExperts deepseek{.num_experts = 256, .top_k = 8, .num_groups = 8, .top_groups = 4};
  const DispatchSizes sizes{.top_k = 8,
                            .ep = 32,
                            .reach = reach_of_rank(deepseek, 32),
                            .nodes = 4,
                            .node_reach = reach_of_rank(deepseek, 4)};
  const DispatchVolumes volumes = dispatch_volumes(sizes);
  // Of 8 rows three quarters leave a node, where 3 of 4 groups' halves are elsewhere.
  EXPECT_DOUBLE_EQ(volumes.between_nodes, 2 * 3 * sizes.node_reach);
  EXPECT_DOUBLE_EQ(volumes.hierarchical, volumes.between_nodes + 2 * 28 * sizes.reach);
  EXPECT_LT(volumes.between_nodes, 0.4 * 2 * 8 * 0.75);
  EXPECT_THAT(choose_dispatcher(sizes, DispatcherRequest::kHierarchical).to_string(),
              HasSubstr(" leave the node"));
}

TEST(DispatchChoice, RefusesImpossibleSizes) {
  const auto message_of = [](const DispatchSizes& sizes) -> std::string {
    try {
      choose_dispatcher(sizes);
    } catch (const UserError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(message_of({.top_k = 0}), HasSubstr("top-k 0"));
  EXPECT_THAT(message_of({.ep = 0}), HasSubstr("EP 0"));
  EXPECT_THAT(message_of({.ep = 2, .all_to_all_efficiency = 0}), HasSubstr("is 0, expected above"));
}

}  // namespace
}  // namespace tessera
