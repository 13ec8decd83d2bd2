#include "model/experts/expert_clones.h"

#include <algorithm>

#include "ops/collective/collective.h"
#include "ops/expert_clones/clone_weights.h"

namespace tessera {
namespace {

/// `found` is a setting as it is, `change` what to set instead.
void refuse_unless(bool ok, int64_t slots, std::string_view found, std::string_view why,
                   std::string_view change) {
  require(ok, "parallel.clone_experts {} with {}: {}; set {}, or parallel.clone_experts = 0", slots,
          found, why, change);
}

void check_clones(const LayerBuilder& builder, int64_t slots) {
  const MoeConfig& moe = builder.config.moe;
  const StagePolicy& policy = builder.groups.policy;
  const auto sizes = moe.expert_sizes();
  refuse_unless(builder.groups.etp->size() == 1, slots,
                fmt::format("parallel.etp {}", builder.groups.etp->size()),
                "whole experts are cloned, and ranks of etp have parts", "parallel.etp = 1");
  refuse_unless(policy.exchange == ExchangeSizes::kExact, slots,
                "a parallel.exchange other than \"exact\"",
                "which experts are cloned is known when tokens are routed, and the host must know",
                "parallel.exchange = \"exact\"");
  refuse_unless(policy.dispatcher != DispatcherRequest::kAllGather, slots,
                "parallel.dispatcher \"all_gather\"",
                "it brings all tokens to all ranks, where clones are to spare some the tokens",
                "parallel.dispatcher = \"all_to_all\"");
  refuse_unless(moe.experts == ExpertPath::kGrouped, slots, "moe.experts \"block_sparse\"",
                "only grouped products have gradients of cloned weights",
                "moe.experts = \"grouped\"");
  refuse_unless(std::ranges::count(sizes, sizes[0]) == std::ssize(sizes), slots,
                "experts of several sizes in moe.inner_sizes", "a slot holds any expert",
                "moe.inner_size alone");
  refuse_unless(moe.capacity_factor == 0, slots,
                fmt::format("moe.capacity_factor {}", moe.capacity_factor),
                "a capacity drops the tokens that clones would take", "moe.capacity_factor = 0");
  refuse_unless(!moe.experts_choose(), slots, "moe.routing \"expert_choice\"",
                "experts that choose have the same load", "moe.routing = \"top_k\"");
}

}  // namespace

bool clones_experts(const LayerBuilder& builder) {
  const int64_t slots = builder.groups.policy.clone_slots;
  if (slots == 0) return false;
  check_clones(builder, slots);
  return true;
}

ClonedRouting plan_clones(LayerBuilder& builder, ValueId expert_idx_TK) {
  const MoeConfig& moe = builder.config.moe;
  const CommunicatorPtr& ep = builder.groups.ep;
  Program& program = builder.program();
  const CloneSlots slots{.num_experts = moe.num_experts,
                         .num_ranks = ep->size(),
                         .rank = ep->rank(),
                         .slots_per_rank = builder.groups.policy.clone_slots};
  const auto map = program.add(make_route_map({.num_experts = moe.num_experts, .top_k = moe.top_k}),
                               {expert_idx_TK},
                               {"routed_row_of", "routed_source", "routed_offsets",
                                "routed_num_rows", "routed_dropped", "routed_counts"});
  const ValueId counts =
      program.add1(make_all_gather(ep), {map[RouteMapOutput::kCountsKept]}, "routed_counts_of_all");
  const auto plan =
      program.add(make_clone_plan(slots), {counts}, {"clone_slots", "clone_begins", "clone_ends"});
  const auto routed =
      program.add(make_clone_route(slots),
                  {expert_idx_TK, map[RouteMapOutput::kRowOfTK], map[RouteMapOutput::kOffsets],
                   plan[ClonePlan::kSlots], plan[ClonePlan::kBegins], plan[ClonePlan::kEnds]},
                  {"home_idx", "clone_idx"});
  return {.slots = slots,
          .experts = plan[ClonePlan::kSlots],
          .home_idx_TK = routed[CloneRoute::kHomeIdx],
          .clone_idx_TK = routed[CloneRoute::kCloneIdx]};
}

/// Clones bring no rank beyond the mean, which T · K is where all tokens have their experts.
DispatchSpec clone_dispatch(const DispatchSpec& home, const ClonedRouting& routing,
                            int64_t num_tokens) {
  DispatchSpec spec = home;
  spec.num_experts = routing.slots.num_slots();
  spec.num_groups = spec.top_groups = 1;
  spec.spare_rows = num_tokens * home.top_k;
  return spec;
}

ValueId clone_weight(LayerBuilder& builder, const ClonedRouting& routing, ValueId weight,
                     std::string name) {
  return builder.program().add1(make_clone_weights(builder.groups.ep, routing.slots),
                                {weight, routing.experts}, std::move(name));
}

}  // namespace tessera
