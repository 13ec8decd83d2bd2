#pragma once

#include <string>

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
  int64_t top_k = 1;
  /// An expert keeps at most ceil(T·K/E · capacity_factor) rows; 0 keeps every row (dropless).
  double capacity_factor = 0;
  /// Give every expert exactly its capacity of rows, whatever it received. Needs a capacity factor.
  bool pad_to_capacity = false;
  DropPolicy drop_policy = DropPolicy::kProbs;
  /// The rows of each expert are padded to a multiple of this; 1 pads nothing. An expert without
  /// rows stays empty.
  int64_t alignment = 1;
};

// clang-format off
/// Lays the routed rows out expert by expert, so that one expert's rows are contiguous:
///   (expert_idx I32 [T, K], probs F32 [T, K]) ->
///   row_of_TK   I32 [T, K]       the row of each assignment, -1 where it was dropped
///   source_R    I32 [R ragged]   t·K + k of each row, -1 for padding
///   offsets     I64 [E + 1]      the first row of each expert, padding included; offsets[E] is the number of rows
///   extent      I64 [1]          the number of rows: the extent of R
///   dropped     I64 [1]          assignments given up for capacity
///   counts_kept I64 [E]          rows of each expert without padding
// clang-format on
/// Within an expert the rows stand in token order, then in order of k, and its padding comes last.
/// A pure function of the inputs, whatever the number of threads. No gradient; never recomputed,
/// since routing is decided once.
class RouteMap final : public Operator {
 public:
  /// Throws UserError for an impossible combination.
  explicit RouteMap(const RouteMapSpec& spec);

  const RouteMapSpec& spec() const { return spec_; }
  /// Rows that an expert may keep of `num_tokens` tokens. Throws UserError where that is less than
  /// one.
  int64_t capacity(int64_t num_tokens) const;
  /// The most rows that `num_tokens` tokens can make, padding included.
  int64_t max_rows(int64_t num_tokens) const;

  std::string_view name() const override { return "route_map"; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool recomputable() const override { return false; }
  int64_t cpu_workspace_bytes(std::span<const ValueType> inputs) const override;

  /// The CPU kernel counts the assignments in this many runs of tokens.
  static constexpr int64_t kNumRuns = 16;

 private:
  RouteMapSpec spec_;
};

/// Where the parts of the CPU kernel's scratch memory start, in bytes.
struct RouteMapWorkspace {
  int64_t counters = 0;  ///< i64 [kNumRuns, E]
  int64_t starts = 0;    ///< i64 [E + 1]
  int64_t sorted = 0;    ///< i32 [T, K]
  int64_t num_bytes = 0;

  RouteMapWorkspace(int64_t num_assignments, int64_t num_experts);
};

/// Outputs of the operator by name.
struct RouteMapOutput {
  enum : size_t { kRowOfTK, kSourceR, kOffsets, kExtent, kDropped, kCountsKept };
};

OperatorPtr make_route_map(const RouteMapSpec& spec);

void add_route_map_cpu(KernelTable& table);

}  // namespace tessera
