#pragma once

#include "model/proof/prove_stage.h"
#include "train/setup/replica_groups.h"
#include "train/setup/run_layout.h"

namespace tessera {

/// That a rank's part of a run computes what one rank alone would: its programs (prove_stage); the
/// groups that they exchange in, which must have the ranks of their axes; and the groups over which
/// each weight's gradient is summed, which must have just the ranks that hold the same part.
/// Nothing runs and nobody communicates. With dynamic context parallelism the programs of each
/// degree are proven as those of the layout with that degree, and that all of them exchange the
/// same, in the same order, with ranks that may be at a micro-batch of another degree.
StageProof prove_rank(const Settings& settings, const RunLayout& run,
                      const StagePrograms& programs);

/// What these programs exchange in other groups than those of their micro-batches, in order.
std::vector<std::string> list_common_exchanges(const StageProof& proof);

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
