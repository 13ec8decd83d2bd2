#include "ops/route_map/route_map.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/workspace.h"

namespace tessera {

RouteMap::RouteMap(const RouteMapSpec& spec) : spec_(spec) {
  require(spec.num_experts >= 1, "route_map: num_experts is {}, expected at least 1",
          spec.num_experts);
  require(spec.top_k >= 1 && spec.top_k <= spec.num_experts,
          "route_map: top_k is {}, expected from 1 to the {} experts", spec.top_k,
          spec.num_experts);
  require(
      std::isfinite(spec.capacity_factor) && spec.capacity_factor >= 0,
      "route_map: the capacity factor is {}, expected 0 (keep every token) or a positive number",
      spec.capacity_factor);
  require(!spec.pad_to_capacity || spec.capacity_factor > 0,
          "route_map: padding to the capacity needs a capacity factor above 0");
  require(spec.alignment >= 1,
          "route_map: the alignment of an expert's rows is {}, expected at "
          "least 1",
          spec.alignment);
}

std::string RouteMap::attributes() const {
  std::string text = fmt::format("experts={} top_k={}", spec_.num_experts, spec_.top_k);
  if (spec_.capacity_factor > 0) {
    text += fmt::format(" capacity_factor={} drop={}", spec_.capacity_factor,
                        spec_.drop_policy == DropPolicy::kProbs ? "probs" : "position");
  }
  if (spec_.pad_to_capacity) text += " pad_to_capacity";
  if (spec_.alignment > 1) text += fmt::format(" alignment={}", spec_.alignment);
  return text;
}

int64_t RouteMap::capacity(int64_t num_tokens) const {
  const int64_t assignments = num_tokens * spec_.top_k;
  if (spec_.capacity_factor == 0) return assignments;
  if (num_tokens == 0) return 0;
  const double even = static_cast<double>(assignments) / static_cast<double>(spec_.num_experts);
  const double exact = even * spec_.capacity_factor;
  require(exact >= 1,
          "route_map: a capacity factor of {} leaves {:.3g} tokens to an expert ({} tokens, top_k "
          "{}, {} experts); it must be at least {:.4g} here",
          spec_.capacity_factor, exact, num_tokens, spec_.top_k, spec_.num_experts, 1 / even);
  return static_cast<int64_t>(std::min(std::ceil(exact), static_cast<double>(assignments)));
}

int64_t RouteMap::max_rows(int64_t num_tokens) const {
  const int64_t assignments = num_tokens * spec_.top_k;
  const int64_t per_expert = align_up(capacity(num_tokens), spec_.alignment);
  const int64_t full = spec_.num_experts * per_expert;
  if (spec_.pad_to_capacity) return full;
  const int64_t non_empty = std::min(spec_.num_experts, assignments);
  const int64_t padded = assignments + non_empty * (spec_.alignment - 1);
  return std::min(full, padded / spec_.alignment * spec_.alignment);
}

std::vector<ValueType> RouteMap::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes expert_idx and probs, got {} inputs",
              inputs.size());
  const ValueType& expert_idx = inputs[0];
  const ValueType& probs = inputs[1];
  check_shape(*this,
              expert_idx.dtype == DType::kI32 && expert_idx.shape.rank() == 2 &&
                  expert_idx.shape[1] == spec_.top_k && !expert_idx.ragged(),
              "expert_idx must be i32 [T, {}], got {}", spec_.top_k, expert_idx.to_string());
  check_shape(*this, probs.dtype == DType::kF32 && probs.shape == expert_idx.shape,
              "probs must be f32 {}, got {}", expert_idx.shape.to_string(), probs.to_string());
  const int64_t rows = max_rows(expert_idx.shape[0]);
  check_shape(*this, rows <= std::numeric_limits<int32_t>::max(),
              "{} tokens make up to {} rows, more than 2^31 - 1; use smaller micro-batches",
              expert_idx.shape[0], rows);
  ValueType source_R{.dtype = DType::kI32, .shape = {rows}};
  source_R.ragged_dim = 0;
  source_R.extent = own_output(RouteMapOutput::kExtent);
  const auto i64 = [](int64_t n) { return ValueType{.dtype = DType::kI64, .shape = {n}}; };
  return {{.dtype = DType::kI32, .shape = expert_idx.shape},
          source_R,
          i64(spec_.num_experts + 1),
          i64(1),
          i64(1),
          i64(spec_.num_experts)};
}

RouteMapWorkspace::RouteMapWorkspace(int64_t num_assignments, int64_t num_experts) {
  WorkspaceLayout layout;
  counters = layout.add<int64_t>(RouteMap::kNumRuns * num_experts);
  starts = layout.add<int64_t>(num_experts + 1);
  sorted = layout.add<int32_t>(num_assignments);
  num_bytes = layout.num_bytes();
}

int64_t RouteMap::cpu_workspace_bytes(std::span<const ValueType> inputs) const {
  return RouteMapWorkspace(inputs[0].shape.num_elements(), spec_.num_experts).num_bytes;
}

OperatorPtr make_route_map(const RouteMapSpec& spec) {
  return std::make_shared<RouteMap>(spec);
}

}  // namespace tessera
