#pragma once

#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "parallel/options.h"

namespace tessera {

/// How the ranks of a stage share their work: what the user asks for, the same on all of them.
struct StagePolicy {
  /// Attention weights are whole on every rank, and heads are spread by all-to-all over TP too.
  bool replicated_attention = false;
  int64_t head_inner = 1;  ///< ranks of CP that StageGroups::heads joins: U
  DispatcherRequest dispatcher = DispatcherRequest::kAuto;
  int64_t dispatch_nodes = 1;          ///< that tokens cross once each (dispatcher "hierarchical")
  double all_to_all_efficiency = 1.0;  ///< see DispatchSizes
  ExchangeSizes exchange = ExchangeSizes::kExact;
  int64_t clone_slots = 0;  ///< of each rank of EP, for clones of hot experts; 0 where EP is 1
  /// A micro-batch's documents are those that ContextPlan gives its ranks: dealt out one by one,
  /// and tokens that fill what they leave count nowhere.
  bool plans_contexts = false;
};
StagePolicy make_stage_policy(const Layout& layout, const ParallelSpec& parallel);

/// EP taken apart, where tokens go node by node.
struct NodeGroups {
  CommunicatorPtr nodes;    ///< the ranks in the same place of every node
  CommunicatorPtr ep;       ///< the rest of EP: neighbours, those of a node
  CommunicatorPtr experts;  ///< ETP · that, ETP fastest
};

/// Of a rank in micro-batches that so many ranks of DP · CP share.
struct ContextGroups {
  CommunicatorPtr ring;
  CommunicatorPtr micro_batch;
  CommunicatorPtr dp;  ///< what is left of DP · CP
};

/// The groups in which the programs of one rank communicate, each of one rank where its axis has
/// degree 1, and what they do there. Every rank of a stage is in one of each.
struct StageGroups {
  CommunicatorPtr tp;           ///< tensor and sequence parallelism
  CommunicatorPtr ring;         ///< context parallelism by ring exchange
  CommunicatorPtr heads;        ///< attention's all-to-all: within CP, with Ulysses over TP as well
  CommunicatorPtr micro_batch;  ///< TP · CP: the ranks that share a micro-batch's tokens
  CommunicatorPtr dp;
  CommunicatorPtr pp;                                ///< the same place in every stage
  CommunicatorPtr etp;                               ///< shards of an expert's inner dim
  CommunicatorPtr ep;                                ///< different experts
  CommunicatorPtr experts;                           ///< ETP · EP, ETP fastest
  std::optional<NodeGroups> by_node = std::nullopt;  ///< where EP spans several
  StagePolicy policy;
  /// With dynamic context parallelism, by the logarithm of the degree; else empty.
  std::vector<ContextGroups> by_degree = {};
  CommunicatorPtr contexts = nullptr;  ///< likewise: DP · CP, in the order of ContextPlan; or null

  /// For micro-batches of degree 2^`log_degree`.
  StageGroups with_degree(size_t log_degree) const;
  /// Ranks that share a micro-batch, TP · CP.
  int64_t token_ranks() const { return micro_batch->size(); }
};

/// Where a stage is in a pipeline, and the groups along it.
struct PipelinePlace {
  CommunicatorPtr activations;  ///< the ranks of the stages, in their order
  CommunicatorPtr gradients;    ///< the same ranks in a group of their own: the two kinds of
                                ///< messages between a pair of stages come in different orders
  int64_t num_chunks = 1;       ///< of each stage
};

/// The groups of a run on one rank.
StageGroups single_rank_groups();

/// The layout where so many ranks of DP · CP share each micro-batch. Throws UserError unless
/// parallel.dense_order has dp right behind cp.
Layout layout_of_degree(const Layout& layout, const ParallelSpec& parallel, int64_t degree);
/// 1, 2, 4, ...: those that dynamic context parallelism has on the layout; none where it is off.
std::vector<int64_t> context_degrees(const Layout& layout, const ParallelSpec& parallel);

/// Joins this rank's groups. All ranks of the world must call.
StageGroups join_stage_groups(World& world, const Layout& layout, const ParallelSpec& parallel);

}  // namespace tessera
