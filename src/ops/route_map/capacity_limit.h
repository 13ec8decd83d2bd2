#pragma once

#include <string>

#include "ops/route_map/route_map.h"

namespace tessera {

struct CapacityLimitSpec {
  /// Experts, top_k, capacity factor, drop policy and capacity groups. The rest is unused.
  RouteMapSpec route = {};
  /// The input rows that are this rank's own tokens.
  IndexRange tokens = {};
  /// Whether an input gives each row's place in the micro-batch.
  bool has_positions = false;
};

// clang-format off
/// Takes the assignments from the experts that exceed their capacity over all tokens of a
/// micro-batch, by exactly the rule of RouteMap, for a rank that has gathered them:
///   (expert_idx I32 [T, K], probs F32 [T, K], [positions I32 [T]]) ->
///   expert_idx I32 [tokens, K]  this rank's own, -1 where an assignment was given up
///   dropped    I64 [1]          how many of these were
// clang-format on
/// Row t is token positions[t] of the micro-batch (t where there is no such input): equal
/// probabilities, and dropping by position, go by that. Full-sequence dropping of Parallel Folding,
/// section 3.3; with the rank's tokens alone as input it is sub-sequence dropping. No gradient;
/// never recomputed.
class CapacityLimit final : public Operator {
 public:
  static constexpr std::string_view kName = "capacity_limit";
  enum Input : int { kExpertIdx, kProbs, kPositions };
  enum Output : int { kKept, kDropped };

  /// Throws UserError for an impossible combination, or no capacity factor.
  explicit CapacityLimit(const CapacityLimitSpec& spec);

  const CapacityLimitSpec& spec() const { return spec_; }
  const RouteMap& route() const { return route_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& /*builder*/) const override {}
  bool recomputable() const override { return false; }

 private:
  CapacityLimitSpec spec_;
  RouteMap route_;
};

/// Where the parts of the CPU kernel's scratch memory start, in bytes; those of the sort come
/// first.
struct CapacityLimitWorkspace {
  int64_t counts_kept = 0;  ///< i64 [E]
  int64_t expert_idx = 0;   ///< i32 [T, K] in the micro-batch's order
  int64_t probs = 0;        ///< f32 [T, K] in the micro-batch's order
  int64_t row_of = 0;       ///< i32 [T] the input row of each token of the micro-batch
  int64_t num_bytes = 0;

  CapacityLimitWorkspace(const RouteMapSpec& spec, int64_t num_tokens);
};

OperatorPtr make_capacity_limit(const CapacityLimitSpec& spec);

/// The CPU kernel; add_route_map_cpu registers it.
void capacity_limit(const CapacityLimit& op, const Args<CapacityLimit>& args);

}  // namespace tessera
