#pragma once

#include <map>
#include <set>
#include <vector>

#include "parallel/layout.h"
#include "parallel/stage_groups.h"
#include "sharding/shard_state.h"

namespace tessera {

/// How many ranks a stage has along each axis, and along which each of its groups communicates.
class RankAxes {
 public:
  /// `kv_heads`: a layer's key-value heads, of which neighbours along TP hold the same where
  /// there are fewer than ranks.
  RankAxes(const StageGroups& groups, int64_t kv_heads);

  int64_t kv_heads() const { return kv_heads_; }

  int64_t degree(RankAxis axis) const { return degrees_[static_cast<size_t>(axis)]; }
  /// Those of more than one rank.
  const std::vector<RankAxis>& of(Factoring factoring) const {
    return factoring == Factoring::kDense ? dense_ : experts_;
  }
  /// The axes of more than one rank along which a group's ranks differ; null where it is none of
  /// the stage's.
  const std::vector<RankAxis>* find(const Communicator& group) const;
  /// Where a rank of the layout is along an axis.
  int64_t coordinate(const Layout& layout, int64_t rank, RankAxis axis) const;
  /// The ranks of `rank`'s stage that differ from it along `differing` alone, axes of one
  /// factoring, in their order.
  std::vector<int64_t> ranks_along(const Layout& layout, int64_t rank, Factoring factoring,
                                   const std::set<RankAxis>& differing) const;

  /// Replicated on all ranks.
  Sharding whole() const;
  /// Each rank having its own tokens, along dim 0.
  Sharding own_tokens() const;
  /// Completes what is known of one factoring: where the ranks all have the same, or each its own,
  /// that is so of the other factoring too.
  void complete(Sharding& sharding) const;
  /// "tp S0, dp P; ep E0": of the axes of more than one rank; "one rank".
  std::string describe(const Sharding& sharding) const;

 private:
  void add_group(const CommunicatorPtr& group, std::vector<RankAxis> axes);

  int64_t kv_heads_;
  std::array<int64_t, kNumRankAxes> degrees_ = {};
  std::vector<RankAxis> dense_;
  std::vector<RankAxis> experts_;
  std::map<const Communicator*, std::vector<RankAxis>> groups_;
};

}  // namespace tessera
