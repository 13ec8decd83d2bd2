#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace tessera {

/// What an optimizer exchanges in a step, as plain data. Communicators are asked for names and
/// ranks alone.

/// Parameters that are reduced, updated and gathered together, by a ShardedOptimizer.
struct BucketExchange {
  size_t group = 0;                ///< in the list of replica groups
  int64_t idx = 0;                 ///< among the group's buckets
  std::vector<size_t> parameters;  ///< in the optimizer's list
  CommunicatorPtr outer;
  CommunicatorPtr inner;       ///< null where there is one level
  int64_t weight_bytes = 0;    ///< whole
  int64_t gradient_bytes = 0;  ///< whole
  int64_t reduced_bytes = 0;   ///< of these, as they travel between the ranks of `outer`
  int64_t state_bytes = 0;     ///< of this rank: moments and masters
  /// Where the host updates: what of this rank's comes before, and goes back behind.
  int64_t bytes_to_host = 0;
  int64_t bytes_from_host = 0;
  double update_flops = 0;  ///< of this rank's products, where Muon updates matrices
  /// Whether its gradients are where those of other layers are while these are not there.
  bool shares_gradients = false;
  int64_t turn = 0;  ///< which of the places that layers have in turn
  /// Whether they are BF16, and programs add to F32 sums of their own.
  bool rounds_gradients = false;

  int64_t num_ranks() const { return outer->size() * (inner ? inner->size() : 1); }
};

struct ReplicatedExchanges {
  std::vector<BucketExchange> buckets;  ///< in the order in which they are updated
  bool shard_state = true;              ///< otherwise gradients are gathered, and no weights
  bool releases = false;  ///< buckets are updated as soon as their gradients are complete
  /// Where the state is in the host's memory: the bytes of each window in which it is updated,
  /// those of StateWindows; empty otherwise.
  std::vector<int64_t> windows = {};
  bool updates_on_host = false;  ///< as HostUpdates; there are no windows then
};

/// Parameters of a module in one shard group, by FullySharded.
struct UnitExchange {
  std::vector<size_t> parameters;  ///< in the optimizer's list
  CommunicatorPtr shard;
  bool is_sharded = false;  ///< one rank has all otherwise
  int64_t weight_bytes = 0;
  int64_t gradient_bytes = 0;  ///< whole, F32
  int64_t reduced_bytes = 0;   ///< as they travel
};

struct ModuleExchange {
  std::string name;  ///< what its parameters' names begin with: "layers.3"
  std::vector<UnitExchange> units;
  int64_t gathered_bytes = 0;  ///< 0 where this rank has all of it

  bool is_sharded() const { return gathered_bytes > 0; }
};

struct ShardedExchanges {
  std::vector<ModuleExchange> modules;
  std::vector<size_t> module_of;  ///< by parameter
  int64_t weight_buffers = 2;
  int64_t gradient_buffers = 2;
  int64_t max_weight_bytes = 0;  ///< of one buffer
  int64_t max_gradient_bytes = 0;
  int64_t state_bytes = 0;                ///< of this rank: shares, moments and masters
  double update_flops = 0;                ///< as BucketExchange's
  std::vector<CommunicatorPtr> replicas;  ///< hybrid sharding: who holds the same shares
};

}  // namespace tessera
