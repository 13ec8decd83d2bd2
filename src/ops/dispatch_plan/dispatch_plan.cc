#include "ops/dispatch_plan/dispatch_plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

namespace tessera {

DispatchPlan::DispatchPlan(const DispatchPlanSpec& spec) : spec_(spec) {
  const auto& first = spec.first_experts;
  const bool rises = std::ranges::adjacent_find(first, std::greater_equal<>()) == first.end();
  require(
      first.size() >= 2 && first.front() == 0 && rises,
      "dispatch_plan: ranks whose experts begin at {}; expected at least one expert each, from 0",
      fmt::join(first, ", "));
  require(spec.etp_size >= 1 && spec.etp_rank >= 0 && spec.etp_rank < spec.etp_size &&
              spec.ep_rank >= 0 && spec.ep_rank < spec.ep_size(),
          "dispatch_plan: rank {}, {} is not among {} x {}", spec.ep_rank, spec.etp_rank,
          spec.ep_size(), spec.etp_size);
  ensure(spec.max_received >= 0 && spec.max_gathered >= 0, "dispatch_plan: a bound below 0");
}

std::string DispatchPlan::attributes() const {
  const char* ep = spec_.reach == PlanReach::kAll     ? "ep"
                   : spec_.reach == PlanReach::kNodes ? "nodes"
                                                      : "ep_inner";
  return fmt::format("{}={} etp={} experts={}..{}", ep, spec_.ep_size(), spec_.etp_size,
                     spec_.first_local(), spec_.first_local() + spec_.num_local() - 1);
}

std::vector<ValueType> DispatchPlan::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes the counts, got {} inputs", inputs.size());
  const auto i64 = [](int64_t n) { return ValueType{.dtype = DType::kI64, .shape = {n}}; };
  const ValueType counts = i64(spec_.ep_size() * spec_.etp_size * spec_.num_experts());
  check_shape(*this, inputs[kCounts] == counts, "counts must be {}, got {}", counts.to_string(),
              inputs[kCounts].to_string());
  check_shape(*this, spec_.max_gathered <= std::numeric_limits<int32_t>::max(),
              "up to {} rows can arrive at a rank, more than 2^31 - 1; use smaller micro-batches",
              spec_.max_gathered);
  ValueType expert_idx{.dtype = DType::kI32, .shape = {spec_.max_gathered}};
  expert_idx.ragged_dim = 0;
  expert_idx.extent = Extent::own_output(DispatchPlan::kGathered);
  return {
      i64(spec_.ep_size()), i64(spec_.ep_size()), i64(1), i64(spec_.etp_size), i64(1), expert_idx};
}

int64_t DispatchPlan::balanced_extent(int output, std::span<const ValueType> /*inputs*/) const {
  const auto or_bound = [](int64_t rows, int64_t most) { return rows < 0 ? most : rows; };
  if (output == kReceived) return or_bound(spec_.balanced_received, spec_.max_received);
  if (output == kGathered) return or_bound(spec_.balanced_gathered, spec_.max_gathered);
  return -1;
}

OperatorPtr make_dispatch_plan(const DispatchPlanSpec& spec) {
  return std::make_shared<DispatchPlan>(spec);
}

}  // namespace tessera
