#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "optim/replicas.h"

namespace tessera {

/// Parameters of one module, one shard group and one type: they lie one after the other in a flat
/// buffer, each aligned, whose rows, or matrices, are cut over the group's ranks without regard to
/// parameters (Megatron-FSDP's non-uniform sharding; MoE paper, section 4.1.7, figure 11b). So a
/// collective reads and writes the buffers themselves.
struct ShardUnit {
  size_t group = 0;
  DType dtype = DType::kF32;
  std::vector<size_t> parameters;  ///< in the list of all
  Bucket bucket;                   ///< of these parameters, and as many shares as ranks
  bool is_sharded = false;         ///< false where one rank has all, or there is nothing
  IndexRange own;                  ///< flat elements of this rank's share

  // Where the unit begins, in bytes:
  int64_t weight_offset = 0;  ///< in the gathered module
  int64_t grad_offset = 0;    ///< in the gradients of the module
  int64_t weight_shard = 0;   ///< in this rank's shards
  int64_t grad_shard = 0;
};

/// A module: what is gathered, used and reduced at a time.
struct ShardModule {
  std::vector<ShardUnit> units;
  int64_t weight_bytes = 0;  ///< of all sharded units, gathered
  int64_t grad_bytes = 0;    ///< their gradients, F32
};

/// How one rank holds the modules of a model.
struct ShardPlan {
  /// Where a parameter is.
  struct Place {
    size_t module = 0;
    size_t unit = 0;
    size_t idx = 0;  ///< in the unit
  };
  std::vector<ShardModule> modules;
  std::vector<Place> places;                ///< by parameter
  std::vector<IndexRange> group_gradients;  ///< by group: bytes of its units' grad_shards
  int64_t weight_shard_bytes = 0;
  int64_t grad_shard_bytes = 0;

  const ShardUnit& unit_of(size_t parameter) const;
  /// The largest module.
  int64_t max_weight_bytes() const;
  int64_t max_grad_bytes() const;
};

/// Plans modules, given as indices of their parameters; every parameter is in one of them. Reads
/// the dtype and shape of weights, and groups; `groups` has this rank's place in each shard group.
ShardPlan plan_shards(std::span<const ReplicaPlace> groups,
                      std::span<const ReplicatedParameter> parameters,
                      const std::vector<std::vector<size_t>>& modules);

}  // namespace tessera
