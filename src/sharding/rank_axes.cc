#include "sharding/rank_axes.h"

#include <algorithm>

namespace tessera {

RankAxes::RankAxes(const StageGroups& groups, int64_t kv_heads) : kv_heads_(kv_heads) {
  using enum RankAxis;
  const int64_t tp = groups.tp->size();
  const int64_t copies = std::clamp<int64_t>(tp / std::max<int64_t>(kv_heads, 1), 1, tp);
  const int64_t heads = groups.policy.head_inner;
  const int64_t nodes = groups.by_node ? groups.by_node->nodes->size() : 1;
  const int64_t stage = tp * heads * groups.ring->size() * groups.dp->size();
  degrees_ = {copies,
              tp / copies,
              heads,
              groups.ring->size(),
              groups.dp->size(),
              groups.etp->size(),
              groups.ep->size() / nodes,
              nodes,
              stage / (groups.etp->size() * groups.ep->size())};
  for (int i = 0; i < kNumRankAxes; ++i) {
    const auto axis = static_cast<RankAxis>(i);
    if (degree(axis) == 1) continue;
    (factoring_of(axis) == Factoring::kDense ? dense_ : experts_).push_back(axis);
  }
  add_group(groups.tp, {kTpCopies, kTpParts});
  add_group(groups.ring, {kRing});
  add_group(groups.heads, groups.policy.replicated_attention
                              ? std::vector<RankAxis>{kTpCopies, kTpParts, kHeads}
                              : std::vector<RankAxis>{kHeads});
  add_group(groups.micro_batch, {kTpCopies, kTpParts, kHeads, kRing});
  add_group(groups.dp, {kDp});
  add_group(groups.etp, {kEtp});
  add_group(groups.ep, {kEp, kEpNodes});
  add_group(groups.experts, {kEtp, kEp, kEpNodes});
  if (!groups.by_node) return;
  add_group(groups.by_node->nodes, {kEpNodes});
  add_group(groups.by_node->ep, {kEp});
  add_group(groups.by_node->experts, {kEtp, kEp});
}

void RankAxes::add_group(const CommunicatorPtr& group, std::vector<RankAxis> axes) {
  std::erase_if(axes, [this](RankAxis axis) { return degree(axis) == 1; });
  groups_.emplace(group.get(), std::move(axes));
}

const std::vector<RankAxis>* RankAxes::find(const Communicator& group) const {
  const auto found = groups_.find(&group);
  return found == groups_.end() ? nullptr : &found->second;
}

int64_t RankAxes::coordinate(const Layout& layout, int64_t rank, RankAxis axis) const {
  const int64_t tp = layout.coordinate(rank, Axis::kTp);
  const int64_t cp = layout.coordinate(rank, Axis::kCp);
  switch (axis) {
    case RankAxis::kTpCopies:
      return tp % degree(axis);
    case RankAxis::kTpParts:
      return tp / degree(RankAxis::kTpCopies);
    case RankAxis::kHeads:
      return cp % degree(axis);
    case RankAxis::kRing:
      return cp / degree(RankAxis::kHeads);
    case RankAxis::kDp:
      return layout.coordinate(rank, Axis::kDp);
    case RankAxis::kEtp:
      return layout.coordinate(rank, Axis::kEtp);
    case RankAxis::kEp:
      return layout.coordinate(rank, Axis::kEp) % degree(axis);
    case RankAxis::kEpNodes:
      return layout.coordinate(rank, Axis::kEp) / degree(RankAxis::kEp);
    case RankAxis::kEdp:
      break;
  }
  return layout.coordinate(rank, Axis::kEdp);
}

std::vector<int64_t> RankAxes::ranks_along(const Layout& layout, int64_t rank, Factoring factoring,
                                           const std::set<RankAxis>& differing) const {
  const std::array dense = {Axis::kTp, Axis::kCp, Axis::kDp};
  std::vector<int64_t> ranks = layout.group(rank, dense);
  std::erase_if(ranks, [&](int64_t other) {
    return std::ranges::any_of(of(factoring), [&](RankAxis axis) {
      return !differing.contains(axis) &&
             coordinate(layout, other, axis) != coordinate(layout, rank, axis);
    });
  });
  std::ranges::sort(ranks);
  return ranks;
}

Sharding RankAxes::whole() const {
  return {.dense = true, .experts = true};
}

Sharding RankAxes::own_tokens() const {
  Sharding result = whole();
  for (const Factoring factoring : kFactorings) {
    for (const RankAxis axis : of(factoring)) result.along(axis) = ShardState::sharded(0);
  }
  return result;
}

void RankAxes::complete(Sharding& sharding) const {
  if (sharding.dense == sharding.experts) return;
  const Factoring known = sharding.dense ? Factoring::kDense : Factoring::kExperts;
  const Factoring other = sharding.dense ? Factoring::kExperts : Factoring::kDense;
  const std::vector<RankAxis>& axes = of(known);
  const ShardState state = axes.empty() ? ShardState() : sharding.along(axes.front());
  const bool same =
      std::ranges::all_of(axes, [&](RankAxis axis) { return sharding.along(axis) == state; });
  const bool carries_over = !state.is_cut() || state == ShardState::sharded(0);
  if (!same || !carries_over) return;
  for (const RankAxis axis : of(other)) sharding.along(axis) = state;
  sharding.set_known(other);
}

std::string RankAxes::describe(const Sharding& sharding) const {
  std::string text;
  for (const Factoring factoring : kFactorings) {
    if (!sharding.is_known(factoring) || of(factoring).empty()) continue;
    if (!text.empty()) text += "; ";
    std::string_view separator;
    for (const RankAxis axis : of(factoring)) {
      text +=
          fmt::format("{}{} {}", separator, rank_axis_name(axis), sharding.along(axis).to_string());
      separator = ", ";
    }
  }
  return text.empty() ? "one rank" : text;
}

}  // namespace tessera
