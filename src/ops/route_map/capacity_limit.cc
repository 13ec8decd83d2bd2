#include "ops/route_map/capacity_limit.h"

#include "ops/route_map/expert_sort.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

/// The rule alone, without how rows are laid out.
RouteMapSpec rule_of(const RouteMapSpec& route) {
  return {.num_experts = route.num_experts,
          .top_k = route.top_k,
          .capacity_factor = route.capacity_factor,
          .drop_policy = route.drop_policy,
          .capacity_group_size = route.capacity_group_size};
}

}  // namespace

CapacityLimit::CapacityLimit(const CapacityLimitSpec& spec)
    : spec_(spec), route_(rule_of(spec.route)) {
  spec_.route = route_.spec();
  require(spec.route.capacity_factor > 0, "capacity_limit: needs a capacity factor above 0");
}

std::string CapacityLimit::attributes() const {
  return fmt::format("{} tokens={}..{}{}", route_.attributes(), spec_.tokens.begin,
                     spec_.tokens.end(), spec_.has_positions ? " positions" : "");
}

std::vector<ValueType> CapacityLimit::infer(std::span<const ValueType> inputs) const {
  const size_t expected = spec_.has_positions ? 3 : 2;
  check_shape(*this, inputs.size() == expected, "takes {} inputs, got {}", expected, inputs.size());
  const ValueType& expert_idx = inputs[kExpertIdx];
  check_shape(*this,
              expert_idx.dtype == DType::kI32 && expert_idx.shape.rank() == 2 &&
                  expert_idx.shape[1] == spec_.route.top_k && !expert_idx.ragged(),
              "expert_idx must be i32 [T, {}], got {}", spec_.route.top_k, expert_idx.to_string());
  check_shape(*this, inputs[kProbs] == with_dtype(expert_idx, DType::kF32),
              "probs must be f32 {}, got {}", expert_idx.shape.to_string(),
              inputs[kProbs].to_string());
  const int64_t num_tokens = expert_idx.shape[0];
  const IndexRange& own = spec_.tokens;
  check_shape(*this, own.begin >= 0 && own.count >= 0 && own.end() <= num_tokens,
              "tokens {} to {} are not among the {}", own.begin, own.end(), num_tokens);
  if (spec_.has_positions) {
    check_shape(*this, inputs[kPositions] == (ValueType{DType::kI32, {num_tokens}}),
                "positions must be i32 [{}], got {}", num_tokens, inputs[kPositions].to_string());
  }
  return {{DType::kI32, {own.count, spec_.route.top_k}}, {DType::kI64, {1}}};
}

CapacityLimitWorkspace::CapacityLimitWorkspace(const RouteMapSpec& spec, int64_t num_tokens) {
  const int64_t num_assignments = num_tokens * spec.top_k;
  WorkspaceLayout layout;
  layout.add<std::byte>(ExpertSortWorkspace(num_assignments, spec.num_experts).num_bytes);
  counts_kept = layout.add<int64_t>(spec.num_experts);
  expert_idx = layout.add<int32_t>(num_assignments);
  probs = layout.add<float>(num_assignments);
  row_of = layout.add<int32_t>(num_tokens);
  num_bytes = layout.num_bytes();
}

OperatorPtr make_capacity_limit(const CapacityLimitSpec& spec) {
  return std::make_shared<CapacityLimit>(spec);
}

}  // namespace tessera
