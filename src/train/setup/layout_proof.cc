#include "train/setup/layout_proof.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "step/build/node_types.h"

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

namespace {

/// Where a rank's programs run.
struct ProvenPlace {
  const Layout& layout;
  int64_t rank = 0;
  const StageGroups& groups;
};

StageProof prove_programs(const StagePrograms& programs, const ProvenPlace& at,
                          const std::vector<ReplicaRanks>& replicas) {
  StageProof proof = prove_stage(programs);
  const RankAxes axes(at.groups, programs.config.kv_heads());
  prove_groups(at.groups, at.layout, at.rank, axes, proof.faults);
  prove_reductions(replicas, proof.weights, at.layout, at.rank, at.groups, proof.faults);
  return proof;
}

/// Whether an operator exchanges with ranks that may be at another micro-batch.
bool exchanges_in_common(const Operator& op) {
  const Communicator* const group = group_of(op);
  return group != nullptr && group->size() > 1 && group->name() != "ring" &&
         group->name() != "micro_batch";
}

void compare_exchanges(const std::vector<std::string>& own, const std::vector<std::string>& others,
                       ShardingFaults& faults) {
  const auto [mine, theirs] = std::ranges::mismatch(own, others);
  const auto name = [](auto at, const auto& all) {
    return at == all.end() ? std::string("nothing") : fmt::format("\"{}\"", *at);
  };
  if (mine == own.end() && theirs == others.end()) return;
  faults.push_back(fmt::format("exchanges {}, where degree 1 exchanges {}", name(mine, own),
                               name(theirs, others)));
}

void append(StageProof& to, StageProof&& more, const std::string& prefix) {
  for (ProvenProgram& program : more.programs) {
    program.title = prefix + program.title;
    to.programs.push_back(std::move(program));
  }
  for (const std::string& fault : more.faults) to.faults.push_back(prefix + fault);
}

}  // namespace

std::vector<std::string> list_common_exchanges(const StageProof& proof) {
  std::vector<std::string> exchanges;
  for (const ProvenProgram& proven : proof.programs) {
    for (const Node& node : proven.program.nodes()) {
      if (!exchanges_in_common(*node.op)) continue;
      std::string line =
          fmt::format("{}: {} {}", proven.title, node.op->name(), node.op->attributes());
      for (const ValueId id : node.inputs) {
        const ValueType& type = proven.program.type(id);
        line += fmt::format(" {} {}", dtype_name(type.dtype), type.shape.to_string());
      }
      exchanges.push_back(std::move(line));
    }
  }
  return exchanges;
}

StageProof prove_rank(const Settings& settings, const RunLayout& run,
                      const StagePrograms& programs) {
  const std::vector<ReplicaRanks> replicas = list_replica_ranks(settings, run.layout, run.rank());
  const StageGroups& groups = run.part.groups;
  StageProof proof = prove_programs(programs, {run.layout, run.rank(), groups}, replicas);
  std::vector<std::string> common;
  for (size_t i = 0; i < programs.of_degrees.size(); ++i) {
    const int64_t degree = int64_t{1} << i;
    const Layout layout = layout_of_degree(run.layout, settings.parallel, degree);
    StageProof of_degree = prove_programs(*programs.of_degrees[i],
                                          {layout, run.rank(), groups.with_degree(i)}, replicas);
    if (i == 0) common = list_common_exchanges(of_degree);
    compare_exchanges(list_common_exchanges(of_degree), common, of_degree.faults);
    append(proof, std::move(of_degree), fmt::format("degree {}: ", degree));
  }
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
