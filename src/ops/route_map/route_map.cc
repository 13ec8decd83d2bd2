#include "ops/route_map/route_map.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/route_map/expert_sort.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

constexpr double kRounding = 1e-12;  ///< of products that are whole numbers

void check_capacity(const RouteMapSpec& spec) {
  require(
      std::isfinite(spec.capacity_factor) && spec.capacity_factor >= 0,
      "route_map: the capacity factor is {}, expected 0 (keep every token) or a positive number",
      spec.capacity_factor);
  require(spec.rows_limit >= 0 && (spec.rows_limit == 0 || spec.capacity_factor == 0),
          "route_map: a limit of {} rows stands beside a capacity factor of {}", spec.rows_limit,
          spec.capacity_factor);
  require(!spec.pad_to_capacity || spec.limits_rows(),
          "route_map: padding to the capacity needs a capacity factor above 0");
  const int64_t group = spec.capacity_group_size;
  require(group >= 1 && spec.num_experts % group == 0,
          "route_map: {} experts do not fall into groups of {} for the capacity", spec.num_experts,
          group);
  require(group == 1 || !spec.pad_to_capacity,
          "route_map: groups of {} experts share their capacity, so no expert can be padded to its "
          "own; switch padding to the capacity off",
          group);
}

void check_local_experts(const RouteMapSpec& spec) {
  const int64_t first = spec.first_local();
  const int64_t count = spec.num_local();
  require(first >= 0 && count >= 1 && first + count <= spec.num_experts,
          "route_map: experts {} to {} are not among the {}", first, first + count - 1,
          spec.num_experts);
  require(first % spec.capacity_group_size == 0 && count % spec.capacity_group_size == 0,
          "route_map: experts {} to {} are not whole groups of {}, which share their capacity",
          first, first + count - 1, spec.capacity_group_size);
}

void check_slots(const RouteMapSpec& spec) {
  require(spec.slot_experts >= 0 && spec.slot_rows >= 0 &&
              (spec.has_slots() ? spec.num_local() % spec.slot_experts == 0 : spec.slot_rows == 0),
          "route_map: {} experts do not fall into slots of {} experts and {} rows",
          spec.num_local(), spec.slot_experts, spec.slot_rows);
  require(!spec.has_slots() || (spec.alignment == 1 && !spec.pad_to_capacity),
          "route_map: experts that stand in slots are neither aligned nor padded to a capacity");
}

}  // namespace

RouteMap::RouteMap(const RouteMapSpec& spec) : spec_(spec) {
  require(spec.num_experts >= 1, "route_map: num_experts is {}, expected at least 1",
          spec.num_experts);
  require(spec.top_k >= 1, "route_map: top_k is {}, expected at least 1", spec.top_k);
  check_capacity(spec);
  check_local_experts(spec);
  require(spec.alignment >= 1,
          "route_map: the alignment of an expert's rows is {}, expected at "
          "least 1",
          spec.alignment);
  check_slots(spec);
}

std::string RouteMap::attributes() const {
  std::string text = fmt::format("experts={} top_k={}", spec_.num_experts, spec_.top_k);
  if (spec_.num_local() < spec_.num_experts) {
    text += fmt::format(" local={}..{}", spec_.first_local(),
                        spec_.first_local() + spec_.num_local() - 1);
  }
  if (spec_.capacity_factor > 0) {
    text += fmt::format(" capacity_factor={} drop={}", spec_.capacity_factor,
                        spec_.drop_policy == DropPolicy::kProbs ? "probs" : "position");
  }
  if (spec_.rows_limit > 0) text += fmt::format(" rows_limit={}", spec_.rows_limit);
  if (spec_.capacity_group_size > 1) {
    text += fmt::format(" capacity_group={}", spec_.capacity_group_size);
  }
  if (spec_.pad_to_capacity) text += " pad_to_capacity";
  if (spec_.alignment > 1) text += fmt::format(" alignment={}", spec_.alignment);
  if (spec_.has_slots()) text += fmt::format(" slots={}x{}", spec_.num_slots(), spec_.slot_rows);
  return text;
}

int64_t RouteMap::capacity(int64_t num_tokens) const {
  if (spec_.rows_limit > 0) return spec_.rows_limit;
  const int64_t assignments = num_tokens * spec_.top_k;
  if (spec_.capacity_factor == 0) return assignments;
  if (num_tokens == 0) return 0;
  const int64_t num_groups = spec_.num_experts / spec_.capacity_group_size;
  const double even = static_cast<double>(assignments) / static_cast<double>(num_groups);
  const double exact = even * spec_.capacity_factor;
  constexpr double kRoundings = 1e-9;  // of a factor that is a quotient
  require(exact >= 1 - kRoundings,
          "route_map: a capacity factor of {} leaves {:.3g} tokens to an expert ({} tokens, top_k "
          "{}, {} experts); it must be at least {:.4g} here",
          spec_.capacity_factor, exact, num_tokens, spec_.top_k, spec_.num_experts, 1 / even);
  return static_cast<int64_t>(std::min(std::ceil(exact), static_cast<double>(assignments)));
}

int64_t RouteMap::max_rows(int64_t num_tokens) const {
  if (spec_.has_slots()) return spec_.num_slots() * spec_.slot_rows;
  const int64_t num_local = spec_.num_local();
  const int64_t per_group = capacity(num_tokens);
  if (spec_.pad_to_capacity) return num_local * align_up(per_group, spec_.alignment);
  const int64_t num_groups = num_local / spec_.capacity_group_size;
  const int64_t assignments = num_tokens * std::min(spec_.top_k, num_local);
  // Of many small capacities the product may be beyond what there are assignments for.
  const int64_t kept = std::min(assignments, num_groups * std::min(per_group, assignments));
  const int64_t non_empty = std::min(num_local, kept);
  const int64_t padded = kept + non_empty * (spec_.alignment - 1);
  return padded / spec_.alignment * spec_.alignment;
}

bool RouteMap::needs_probs() const {
  return spec_.capacity_factor > 0 && spec_.drop_policy == DropPolicy::kProbs;
}

std::vector<ValueType> RouteMap::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2 || (inputs.size() == 1 && !needs_probs()),
              "takes expert_idx and probs, got {} inputs", inputs.size());
  const ValueType& expert_idx = inputs[kExpertIdx];
  const bool is_list = expert_idx.shape.rank() == 1 && spec_.top_k == 1;
  const bool is_matrix = expert_idx.shape.rank() == 2 && expert_idx.shape[1] == spec_.top_k;
  check_shape(
      *this, expert_idx.dtype == DType::kI32 && (is_list || is_matrix) && expert_idx.ragged_dim < 1,
      "expert_idx must be i32 [T, {}], got {}", spec_.top_k, expert_idx.to_string());
  check_shape(*this, !expert_idx.ragged() || spec_.capacity_factor == 0,
              "a capacity factor needs a fixed number of tokens, got {}", expert_idx.to_string());
  if (inputs.size() == 2) {
    check_shape(
        *this, inputs[kProbs].dtype == DType::kF32 && inputs[kProbs].shape == expert_idx.shape,
        "probs must be f32 {}, got {}", expert_idx.shape.to_string(), inputs[kProbs].to_string());
  }
  const int64_t rows = max_rows(expert_idx.shape[0]);
  check_shape(*this, rows <= std::numeric_limits<int32_t>::max(),
              "{} tokens make up to {} rows, more than 2^31 - 1; use smaller micro-batches",
              expert_idx.shape[0], rows);
  ValueType source_R{.dtype = DType::kI32, .shape = {rows}};
  if (!spec_.has_slots()) {
    source_R.ragged_dim = 0;
    source_R.extent = Extent::own_output(RouteMap::kExtent);
  }
  const auto i64 = [](int64_t n) { return ValueType{.dtype = DType::kI64, .shape = {n}}; };
  return {expert_idx, source_R, i64(spec_.num_local() + 1), i64(1), i64(1), i64(spec_.num_local())};
}

/// Each expert gets its share of the assignments, padded as it may be at most.
int64_t RouteMap::balanced_extent(int output, std::span<const ValueType> inputs) const {
  if (output != kExtent || spec_.has_slots() || spec_.pad_to_capacity) return -1;
  const int64_t tokens = inputs[kExpertIdx].shape[0];
  const double choices =
      spec_.balanced_choices > 0 ? spec_.balanced_choices : static_cast<double>(spec_.top_k);
  const double even = static_cast<double>(tokens * spec_.num_local()) * choices /
                      static_cast<double>(spec_.num_experts);
  const auto share = static_cast<int64_t>(std::ceil(even - kRounding * even));
  const int64_t padding = std::min(spec_.num_local(), share) * (spec_.alignment - 1);
  return std::min(max_rows(tokens), align_up(share + padding, spec_.alignment));
}

OperatorPtr make_route_map(const RouteMapSpec& spec) {
  return std::make_shared<RouteMap>(spec);
}

}  // namespace tessera
