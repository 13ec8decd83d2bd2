#include "model/proof/bound_sharding.h"

#include <algorithm>

namespace tessera {
namespace {

bool is_tp(RankAxis axis) {
  return axis == RankAxis::kTpCopies || axis == RankAxis::kTpParts;
}

/// Of dense axes: `in_batch` among the ranks that share a micro-batch, `across` between
/// micro-batches.
Sharding by_batch(const RankAxes& axes, const ShardState& in_batch, const ShardState& across) {
  Sharding result;
  for (const RankAxis axis : axes.of(Factoring::kDense))
    result.along(axis) = axis == RankAxis::kDp ? across : in_batch;
  result.set_known(Factoring::kDense);
  axes.complete(result);
  return result;
}

/// The tokens of a tensor-parallel group.
Sharding group_tokens(const RankAxes& axes) {
  Sharding result = axes.own_tokens();
  for (const RankAxis axis : axes.of(Factoring::kDense))
    if (is_tp(axis)) result.along(axis) = ShardState::replicated();
  result.experts = false;
  axes.complete(result);
  return result;
}

/// Some heads along the axes that share them; elsewhere each rank has those of its own queries.
Sharding max_logits(const RankAxes& axes) {
  Sharding result;
  for (const RankAxis axis : axes.of(Factoring::kDense)) {
    const bool by_heads = is_tp(axis) || axis == RankAxis::kHeads;
    result.along(axis) = by_heads ? ShardState::sharded(0) : ShardState::varying();
  }
  result.set_known(Factoring::kDense);
  axes.complete(result);
  return result;
}

/// Along which dim a slice is a part; -1 where it is whole.
int cut_dim(const Slice& slice) {
  const Shape shape = slice.shape();
  for (int dim = 0; dim < shape.rank(); ++dim)
    if (shape[dim] != slice.global[dim]) return dim;
  return -1;
}

Sharding expert_sharding(const RankAxes& axes) {
  Sharding result;
  for (const RankAxis axis : {RankAxis::kEp, RankAxis::kEpNodes})
    if (axes.degree(axis) > 1) result.along(axis) = ShardState::by_expert(0);
  if (axes.degree(RankAxis::kEtp) > 1) result.along(RankAxis::kEtp) = ShardState::sharded(0);
  result.set_known(Factoring::kExperts);
  return result;
}

/// Whether `part` of `parts` equal ones, or ones that differ by one, has that many of them all.
bool is_share(int64_t part, int64_t all, int64_t parts) {
  return part >= all / parts && part <= (all + parts - 1) / parts;
}

Sharding dense_sharding(const std::string& name, const WeightPlacement& placement,
                        const RankAxes& axes, ShardingFaults& faults) {
  const int64_t tp = axes.degree(RankAxis::kTpCopies) * axes.degree(RankAxis::kTpParts);
  const int dim = cut_dim(placement.slice);
  Sharding result;
  result.set_known(Factoring::kDense);
  const int64_t parts = std::max<int64_t>(tp / std::max<int64_t>(placement.tp_copies, 1), 1);
  const bool along_axes = placement.tp_copies == 1 || placement.tp_copies == tp ||
                          placement.tp_copies == axes.degree(RankAxis::kTpCopies);
  const Slice& slice = placement.slice;
  const bool fits = dim < 0 ? parts == 1 : is_share(slice.shape()[dim], slice.global[dim], parts);
  if (!along_axes || !fits) {
    faults.push_back(
        fmt::format("weight '{}' is {}, but is said to be the same on {} neighbours of TP {}", name,
                    slice.to_string(), placement.tp_copies, tp));
    return result;
  }
  for (const RankAxis axis : axes.of(Factoring::kDense)) {
    const bool same =
        !is_tp(axis) || parts == 1 || (axis == RankAxis::kTpCopies && placement.tp_copies > 1);
    if (!same) result.along(axis) = ShardState::sharded(dim);
  }
  return result;
}

}  // namespace

Sharding port_sharding(Port port, const RankAxes& axes, const StageGroups& groups) {
  switch (port) {
    case Port::kHidden:
    case Port::kHiddenOut:
    case Port::kEmbedded:
    case Port::kLabels:
    case Port::kTokenWeights:
    case Port::kTokenLoss:
    case Port::kLogits:
    case Port::kSegments:
    case Port::kReplayedExperts:
    case Port::kOwnTokens:
    case Port::kTokenNumbers:
    case Port::kChosenExperts:
      return axes.own_tokens();
    case Port::kPositions:
    case Port::kTemperatures:
      return groups.policy.replicated_attention ? axes.own_tokens() : group_tokens(axes);
    case Port::kTokens:
    case Port::kGatheredLabels:
      return group_tokens(axes);
    case Port::kCuSeqlens:
    case Port::kChunkBounds:
    case Port::kTokenOrder:
      return by_batch(axes, ShardState::replicated(), ShardState::varying());
    case Port::kLoss:
    case Port::kBalanceLoss:
    case Port::kZLoss:
    case Port::kScoreMeans:
    case Port::kCounts:
      return by_batch(axes, ShardState::partial(), ShardState::partial());
    case Port::kMaxLogits:
      return max_logits(axes);
    case Port::kDropped:
      return by_batch(axes, ShardState::varying(), ShardState::varying());
    case Port::kNoise:
    case Port::kLossScale:
    case Port::kExpertBias:
    case Port::kEarlierCounts:
    case Port::kCountsSoFar:
    case Port::kStart:
    case Port::kCacheLength:
    case Port::kKeyCache:
    case Port::kValueCache:
    case Port::kIndexCache:
    case Port::kCacheRows:
    case Port::kPageTable:
    case Port::kCacheSlots:
    case Port::kQueryConvState:
    case Port::kKeyConvState:
    case Port::kValueConvState:
    case Port::kDeltaStates:
    case Port::kScanStates:
    case Port::kCompressState:
    case Port::kIndexState:
    case Port::kChosenRows:
    case Port::kTokenRules:
    case Port::kChosenToken:
    case Port::kChosenLogProbability:
      break;
  }
  return axes.whole();
}

Sharding weight_sharding(const std::string& name, const WeightPlacement& placement,
                         const RankAxes& axes, ShardingFaults& faults) {
  Sharding result =
      placement.expert ? expert_sharding(axes) : dense_sharding(name, placement, axes, faults);
  const bool cut = std::ranges::any_of(result.states, &ShardState::is_cut);
  if (!cut) axes.complete(result);
  return result;
}

}  // namespace tessera
