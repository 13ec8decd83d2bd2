#include "train/setup/layout_proof.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>

namespace tessera {
namespace {

/// The one over whose ranks the gradient of a weight is summed, as ReplicaGroups::find has it.
const ReplicaRanks* find_replicas(const std::vector<ReplicaRanks>& replicas,
                                  const SummedWeight& weight) {
  const auto embedding = std::ranges::find_if(
      replicas, [](const ReplicaRanks& group) { return group.num_stages > 1; });
  if (weight.name == "embedding.weight" && embedding != replicas.end()) return &*embedding;
  const auto found = std::ranges::find_if(replicas, [&](const ReplicaRanks& group) {
    return group.num_stages == 1 && group.placement.expert == weight.expert &&
           (weight.expert || group.placement.tp_copies == weight.tp_copies);
  });
  return found == replicas.end() ? nullptr : &*found;
}

}  // namespace

void prove_groups(const StageGroups& groups, const Layout& layout, int64_t rank,
                  const RankAxes& axes, ShardingFaults& faults) {
  for (const CommunicatorPtr& group : {groups.tp, groups.ring, groups.heads, groups.micro_batch,
                                       groups.dp, groups.etp, groups.ep, groups.experts}) {
    const std::vector<RankAxis>& along = *axes.find(*group);
    const Factoring factoring = along.empty() ? Factoring::kDense : factoring_of(along.front());
    const auto expected =
        axes.ranks_along(layout, rank, factoring, std::set(along.begin(), along.end()));
    std::vector<int64_t> found = group->ranks();
    std::ranges::sort(found);
    const auto single = std::vector{rank};
    if (found == (along.empty() ? single : expected)) continue;
    faults.push_back(fmt::format("group '{}' of rank {} has ranks {}, expected {}", group->name(),
                                 rank, fmt::join(found, ", "), fmt::join(expected, ", ")));
  }
}

void prove_reductions(const std::vector<ReplicaRanks>& replicas,
                      const std::vector<SummedWeight>& weights, const Layout& layout, int64_t rank,
                      const StageGroups& groups, ShardingFaults& faults) {
  std::map<int64_t, RankAxes> by_heads;
  for (const SummedWeight& weight : weights) {
    const ReplicaRanks* group = find_replicas(replicas, weight);
    if (group == nullptr) {
      faults.push_back(fmt::format("the gradient of '{}' is summed over no group", weight.name));
      continue;
    }
    const Factoring factoring = weight.expert ? Factoring::kExperts : Factoring::kDense;
    const RankAxes& axes =
        by_heads.try_emplace(weight.kv_heads, groups, weight.kv_heads).first->second;
    const auto expected = axes.ranks_along(layout, rank, factoring, weight.axes);
    // Of other stages that have the embedding too, the same.
    std::vector<int64_t> found = group->ranks;
    std::erase_if(found, [&](int64_t other) {
      return layout.coordinate(other, Axis::kPp) != layout.coordinate(rank, Axis::kPp);
    });
    std::ranges::sort(found);
    if (found == expected) continue;
    faults.push_back(fmt::format(
        "the gradient of '{}' is summed over ranks {} of {}, but ranks {} have parts of it",
        weight.name, fmt::join(found, ", "), group->name, fmt::join(expected, ", ")));
  }
}

StageProof prove_rank(const Settings& settings, const RunLayout& run,
                      const StagePrograms& programs) {
  const StageGroups& groups = run.part.groups;
  const RankAxes axes(groups, settings.model.kv_heads());
  StageProof proof = prove_stage(programs);
  prove_groups(groups, run.layout, run.rank(), axes, proof.faults);
  prove_reductions(list_replica_ranks(settings, run.layout, run.rank()), proof.weights, run.layout,
                   run.rank(), groups, proof.faults);
  return proof;
}

void require_proof(const StageProof& proof) {
  if (proof.faults.empty()) return;
  internal_error(
      "this layout would not compute what one rank does; please report it with your "
      "configuration:\n"
      "  {}",
      fmt::join(proof.faults, "\n  "));
}

}  // namespace tessera
