#pragma once

#include "model/proof/prove_stage.h"
#include "train/setup/replica_groups.h"
#include "train/setup/run_layout.h"

namespace tessera {

/// That a rank's part of a run computes what one rank alone would: its programs (prove_stage); the
/// groups that they exchange in, which must have the ranks of their axes; and the groups over which
/// each weight's gradient is summed, which must have just the ranks that hold the same part.
/// Nothing runs and nobody communicates.
StageProof prove_rank(const Settings& settings, const RunLayout& run,
                      const StagePrograms& programs);

/// The ranks of a rank's groups.
void prove_groups(const StageGroups& groups, const Layout& layout, int64_t rank,
                  const RankAxes& axes, ShardingFaults& faults);
/// Those over which `weights` are summed; `replicas` and `groups` are those of rank `rank`.
void prove_reductions(const std::vector<ReplicaRanks>& replicas,
                      const std::vector<SummedWeight>& weights, const Layout& layout, int64_t rank,
                      const StageGroups& groups, ShardingFaults& faults);

/// Throws InternalError with all faults where there is one: no configuration may lead to it.
void require_proof(const StageProof& proof);

}  // namespace tessera
