#pragma once

#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "ops/route_map/route_map.h"
#include "parallel/dispatch_choice.h"
#include "parallel/stage_groups.h"
#include "program/program.h"

namespace tessera {

/// Capacity over all tokens of a micro-batch that ranks share, instead of over each rank's own
/// (full-sequence dropping: Parallel Folding, section 3.3).
struct SharedCapacity {
  CommunicatorPtr micro_batch;  ///< the ranks that share it, with equally many tokens each
  /// I32 [T_g] of all their tokens, in the group's order: each one's place in the micro-batch. -1:
  /// they stand in that order already.
  ValueId positions = -1;
  /// How many micro-batches the ranks of `experts` take tokens from; 0: no more is known than the
  /// groups say. Bounds the rows that reach an expert.
  int64_t num_micro_batches = 0;
};

/// How the routed tokens of a layer reach their experts and come back. T is a rank's own tokens,
/// the same number on all ranks of `experts`.
struct DispatchSpec {
  DispatcherKind kind = DispatcherKind::kLocal;
  ExchangeSizes exchange = ExchangeSizes::kExact;  ///< of the all-to-all kind
  int64_t num_experts = 1;
  int64_t top_k = 1;
  int64_t num_groups = 1;  ///< as RoutedExperts', for estimates
  int64_t top_groups = 1;
  /// Groups of all kinds but the local one: the ranks with other experts, those with other inner
  /// columns of the same experts, and both joined, where ETP counts fastest.
  CommunicatorPtr ep = nullptr;
  CommunicatorPtr etp = nullptr;
  CommunicatorPtr experts = nullptr;
  std::optional<NodeGroups> by_node = std::nullopt;  ///< of the hierarchical kind
  /// As RouteMapSpec has them. Padding gives every expert the rows that all ranks' capacities leave
  /// it.
  double capacity_factor = 0;
  bool pad_to_capacity = false;
  DropPolicy drop_policy = DropPolicy::kProbs;
  int64_t capacity_group_size = 1;
  int64_t alignment = 1;
  /// Empty: by each rank's own tokens (sub-sequence dropping).
  std::optional<SharedCapacity> shared_capacity = std::nullopt;
  /// The probability enters before FC2: it travels with its row, and experts' outputs are added up.
  /// Otherwise outputs are weighted as they are added.
  bool early_probs = true;
  /// Experts that get only what others cannot take: none of the tokens where routing is balanced,
  /// and never more rows on a rank than this. 0: these are ordinary experts.
  int64_t spare_rows = 0;

  RoutedExperts routed() const { return {num_experts, top_k, num_groups, top_groups}; }
  /// The experts of this rank: EP coordinate e has the e-th of EP equal runs.
  IndexRange local_experts() const;
};

/// Where rows and tokens go: the two maps of RouteMap.
struct RowMap {
  ValueId row_of = -1;
  ValueId source = -1;
};

/// What an all-to-all dispatch of exact sizes must know to come back: outputs of DispatchPlan.
struct ExchangeCounts {
  ValueId send_rows = -1;
  ValueId receive_rows = -1;
  ValueId received = -1;  ///< the extent of what arrives over EP
  ValueId gather_rows = -1;
  ValueId gathered = -1;  ///< the extent of what then stands here, gathered over ETP
  int64_t max_received = 0;
  int64_t max_gathered = 0;
};

/// Rows on their way to other ranks: which they are, and what an exchange of exact sizes needs.
struct SentRows {
  RowMap map;
  ExchangeCounts counts;
};

/// The rows of this rank's experts, expert by expert, and what combine() needs.
struct DispatchedRows {
  ValueId rows_RH = -1;
  ValueId probs_R = -1;  ///< F32 [R]; -1 unless they enter before FC2
  ValueId offsets = -1;  ///< I64 [local experts + 1]
  ValueId dropped = -1;  ///< I64 [1]: of this rank's own assignments, for capacity

  RowMap at_experts;  ///< from what arrived, or the tokens, to rows_RH
  /// From the tokens to the rows that are sent, where some are; hierarchically to the nodes, and
  /// then from what came to this one to its ranks.
  SentRows sent;
  SentRows passed_on;
  ValueId probs_TK = -1;  ///< where outputs are weighted as they are added: of the same tokens
};

/// Tokens to experts, by spec.kind: (normed A [T, H], probs F32 [T, K], expert_idx I32 [T, K]; an
/// index of -1 is no expert). Three phases: pack() chooses and orders rows, exchange()
/// communicates, unpack() lays out what arrived by expert (Parallel Folding, figure 2 and
/// section 3.3; for the all-gather kind MegaScale-MoE, section 3.2). Bounds of ragged values are
/// the worst that routing can do. Throws UserError where the experts do not divide by EP, or a
/// capacity is impossible.
DispatchedRows dispatch(Program& program, const DispatchSpec& spec, ValueId normed_TH,
                        ValueId probs_TK, ValueId expert_idx_TK);

/// The experts' outputs A [R, H], with ETP this rank's partial sums, back to the tokens: "moe_out"
/// A [T, H]. The same three phases the other way.
ValueId combine(Program& program, const DispatchSpec& spec, const DispatchedRows& dispatched,
                ValueId expert_out_RH);

}  // namespace tessera
