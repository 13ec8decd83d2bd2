#pragma once

#include <string>
#include <vector>

#include "train/setup/run_layout.h"

namespace tessera {

/// The ranks that hold the same part of some weights: the gradient is the sum over them.
struct ReplicaRanks {
  std::string name;  ///< "dense_replicas_1"
  WeightPlacement placement;
  /// Of the embedding where several stages have it: stages that `ranks` are of, equally many of
  /// each, one after the other.
  int64_t num_stages = 1;
  std::vector<int64_t> ranks;
  /// The rank itself and those that hold the other parts that tensor parallelism cuts these weights
  /// into, in the order of the parts.
  std::vector<int64_t> parts;
  /// Neighbours in the list that are an inner group. With full sharding these share one copy; else
  /// they are near to one another (optim.reduce_group). All are of one pipeline stage: ranks of
  /// different stages come to their inner groups' operations at different times, and while one
  /// waits for hidden states the other might wait for it.
  int64_t inner = 1;

  /// The inner group that `rank` is one of, and those at its place in all inner groups.
  std::vector<int64_t> inner_ranks(int64_t rank) const;
  std::vector<int64_t> outer_ranks(int64_t rank) const;
};

/// Those that `rank` is one of: a pure function.
std::vector<ReplicaRanks> list_replica_ranks(const Settings& settings, const Layout& layout,
                                             int64_t rank);

/// Refuses settings that do not go together, and groups that the layout cannot be cut into, with
/// the nearest ones that it can. Throws UserError, the same on all ranks.
void check_sharding(const Settings& settings, const Layout& layout);

/// The same ranks as groups. Made once per run, in the same order on all ranks.
class ReplicaGroups {
 public:
  ReplicaGroups(const Settings& settings, const RunLayout& run, World& world);

  struct Group {
    CommunicatorPtr inner;
    CommunicatorPtr outer;  ///< the ranks at this one's place in their own inner groups
    /// With Muon: one of each group that holds another part of the same weights, in the order of
    /// the parts, at the same place in it. They own the parts of the same matrices.
    CommunicatorPtr parts;
    WeightPlacement placement;
    bool embedding = false;  ///< of the embedding that several stages have
  };
  const std::vector<Group>& all() const { return groups_; }
  size_t find(const ParameterSpec& spec) const;

  std::vector<ReplicaGroup> for_reduction() const;
  std::vector<ShardGroup> for_full_sharding() const;

 private:
  std::vector<Group> groups_;
};

}  // namespace tessera
