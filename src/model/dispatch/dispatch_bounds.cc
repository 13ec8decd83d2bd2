#include "model/dispatch/dispatch_bounds.h"

#include <algorithm>

namespace tessera {
namespace {

bool has_capacity(const DispatchSpec& spec) {
  return spec.capacity_factor > 0;
}

int64_t micro_batch_tokens(const DispatchSpec& spec, int64_t num_tokens) {
  return num_tokens * spec.shared_capacity->micro_batch->size();
}

/// Of a token, where routing is balanced, those that name spare experts: next to none.
constexpr double kSpareChoices = 1e-9;

/// Micro-batches that the ranks of `experts` take tokens from, at most: this rank's own, and one
/// for every rank that does not share it.
int64_t num_micro_batches(const DispatchSpec& spec) {
  const SharedCapacity& shared = *spec.shared_capacity;
  if (spec.kind == DispatcherKind::kLocal) return 1;
  if (shared.num_micro_batches > 0) return shared.num_micro_batches;
  const auto& own = shared.micro_batch->ranks();
  return 1 + std::ranges::count_if(spec.experts->ranks(), [&](int64_t rank) {
           return std::ranges::find(own, rank) == own.end();
         });
}

/// Rows that tokens dropped together can make for this rank's experts.
int64_t max_local_rows(const DispatchSpec& spec, int64_t num_tokens) {
  RouteMapSpec rule = drop_rule(spec);
  rule.local_experts = spec.local_experts();
  const bool whole_groups = rule.local_experts.begin % spec.capacity_group_size == 0 &&
                            rule.local_experts.count % spec.capacity_group_size == 0;
  if (!whole_groups) {  // a group that this rank has a part of may fall to that part alone
    rule.capacity_factor = 0;
    rule.capacity_group_size = 1;
  }
  return RouteMap(rule).max_rows(num_tokens);
}

}  // namespace

RouteMapSpec drop_rule(const DispatchSpec& spec) {
  return {.num_experts = spec.num_experts,
          .top_k = spec.top_k,
          .capacity_factor = spec.capacity_factor,
          .drop_policy = spec.drop_policy,
          .capacity_group_size = spec.capacity_group_size,
          .balanced_choices = spec.spare_rows > 0 ? kSpareChoices : 0};
}

int64_t shared_expert_capacity(const DispatchSpec& spec, int64_t num_tokens) {
  if (!has_capacity(spec) || spec.capacity_group_size > 1 || !spec.shared_capacity) return 0;
  return RouteMap(drop_rule(spec)).capacity(micro_batch_tokens(spec, num_tokens));
}

int64_t expert_limit(const DispatchSpec& spec, int64_t num_tokens) {
  if (!has_capacity(spec) || spec.capacity_group_size > 1) return 0;
  if (spec.shared_capacity) {
    return num_micro_batches(spec) * shared_expert_capacity(spec, num_tokens);
  }
  const int64_t num_ranks = spec.kind == DispatcherKind::kLocal ? 1 : spec.experts->size();
  return num_ranks * RouteMap(drop_rule(spec)).capacity(num_tokens);
}

int64_t max_arriving_rows(const DispatchSpec& spec, int64_t num_ranks, int64_t num_tokens) {
  if (spec.spare_rows > 0)
    return std::min(spec.spare_rows, num_ranks * max_local_rows(spec, num_tokens));
  if (!spec.shared_capacity) return num_ranks * max_local_rows(spec, num_tokens);
  const int64_t routed = num_ranks * num_tokens * std::min(spec.top_k, spec.local_experts().count);
  return std::min(
      routed, num_micro_batches(spec) * max_local_rows(spec, micro_batch_tokens(spec, num_tokens)));
}

int64_t balanced_arriving_rows(const DispatchSpec& spec, int64_t num_ranks, int64_t num_tokens) {
  if (spec.spare_rows > 0) return 1;
  const int64_t assignments = num_ranks * num_tokens * spec.top_k;
  const int64_t share =
      (assignments * spec.local_experts().count + spec.num_experts - 1) / spec.num_experts;
  return std::min(share, max_arriving_rows(spec, num_ranks, num_tokens));
}

double balanced_reach(const DispatchSpec& spec, int64_t members) {
  return spec.spare_rows > 0 ? kSpareChoices : reach_of_rank(spec.routed(), members);
}

int64_t max_rows_to_peer(const DispatchSpec& spec, int64_t num_tokens) {
  if (!spec.shared_capacity) return max_local_rows(spec, num_tokens);
  return std::min(num_tokens * std::min(spec.top_k, spec.local_experts().count),
                  max_local_rows(spec, micro_batch_tokens(spec, num_tokens)));
}

}  // namespace tessera
