#pragma once

#include <string>

#include "core/slice.h"
#include "ops/operator.h"

namespace tessera {

/// Which assignments an expert over its capacity gives up.
enum class DropPolicy {
  kProbs,  ///< those of the lowest probability; of equal ones the later token (GShard's variant in
           ///< Megatron-Core)
  kPosition,  ///< the latest tokens
};

struct RouteMapSpec {
  int64_t num_experts = 1;
  int64_t top_k = 1;  ///< above num_experts where tokens name fewer
  /// An expert keeps at most ceil(T·K/E · capacity_factor) rows; 0 keeps every row (dropless).
  double capacity_factor = 0;
  /// Give every expert exactly its capacity of rows, whatever it received. Needs a capacity.
  bool pad_to_capacity = false;
  DropPolicy drop_policy = DropPolicy::kProbs;
  /// The rows of each expert are padded to a multiple of this; 1 pads nothing. An expert without
  /// rows stays empty.
  int64_t alignment = 1;
  /// This many consecutive experts share their capacities: together they keep at most
  /// ceil(T·K/E · group size · capacity_factor) rows, however those fall among them (the device
  /// level of DeepSeek-V2 and MegaScale-MoE, section 3.2).
  int64_t capacity_group_size = 1;
  /// The experts that are laid out, count 0: all. Assignments to others get no row and are not
  /// dropped.
  IndexRange local_experts = {};
  /// In place of a capacity factor: no group of experts is assigned more than this, as the caller
  /// knows (InternalError otherwise), so nothing is dropped. 0: not known.
  int64_t rows_limit = 0;
  /// Every this many consecutive local experts have a *slot* of exactly `slot_rows` rows: theirs,
  /// one expert after the other, and padding behind them. 0: rows follow one another. The caller
  /// knows that they fit (InternalError otherwise).
  int64_t slot_experts = 0;
  int64_t slot_rows = 0;

  /// For estimates: the choices of a token that name an expert, where routing is balanced, as if
  /// they fell on all alike; 0: all K.
  double balanced_choices = 0;

  int64_t first_local() const { return local_experts.begin; }
  int64_t num_local() const { return local_experts.count == 0 ? num_experts : local_experts.count; }
  bool limits_rows() const { return capacity_factor > 0 || rows_limit > 0; }
  bool has_slots() const { return slot_experts > 0; }
  int64_t num_slots() const { return num_local() / slot_experts; }
};

// clang-format off
/// Lays the routed rows out expert by expert, so that one expert's rows are contiguous:
///   (expert_idx I32 [T, K], [probs F32 [T, K]]) ->
///   row_of_TK   I32 [T, K]       the row of each assignment, -1 where it has none
///   source_R    I32 [R ragged]   t·K + k of each row, -1 for padding
///   offsets     I64 [N + 1]      the first row of each expert, padding included; offsets[N] is the number of rows
///   extent      I64 [1]          the number of rows: the extent of R
///   dropped     I64 [1]          assignments given up for capacity
///   counts_kept I64 [N]          rows of each expert without padding
// clang-format on
/// N is the number of local experts, E where all are. T may be ragged unless a capacity factor
/// depends on it, and with K = 1 expert_idx, and then row_of_TK, may be [T]. Index -1 stands for no
/// expert: its assignment gets no row and does not count as dropped. The experts of a token are
/// distinct. The probabilities are needed where DropPolicy::kProbs drops.
///
/// Within an expert the rows stand in token order, then in order of k, and its padding comes last.
/// With slots there are always as many rows, and R is not ragged.
/// A pure function of the inputs, whatever the number of threads. No gradient; never recomputed,
/// since routing is decided once.
class RouteMap final : public Operator {
 public:
  static constexpr std::string_view kName = "route_map";
  enum Input : int { kExpertIdx, kProbs };
  enum Output : int { kRowOfTK, kSourceR, kOffsets, kExtent, kDropped, kCountsKept };

  /// Throws UserError for an impossible combination.
  explicit RouteMap(const RouteMapSpec& spec);

  const RouteMapSpec& spec() const { return spec_; }
  /// Rows that an expert (a group of experts, where they share) may keep of `num_tokens` tokens.
  /// Throws UserError where that is less than one.
  int64_t capacity(int64_t num_tokens) const;
  /// The most rows that `num_tokens` tokens can make, padding included.
  int64_t max_rows(int64_t num_tokens) const;

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool recomputable() const override { return false; }
  int64_t balanced_extent(int output, std::span<const ValueType> inputs) const override;

 private:
  bool needs_probs() const;

  RouteMapSpec spec_;
};

/// For those who want its outputs alone.
using RouteMapOutput = RouteMap;

OperatorPtr make_route_map(const RouteMapSpec& spec);

void add_route_map_cpu(KernelTable& table);
/// Up to 1024 local experts.
void add_route_map_cuda(KernelTable& table);

}  // namespace tessera
