#include "parallel/stage_groups.h"

#include <array>

#include "core/error.h"
#include "parallel/context_plan.h"

namespace tessera {
namespace {

/// The part of `ranks` at positions first, first + stride, ... (`count` of them).
std::vector<int64_t> pick(const std::vector<int64_t>& ranks, int64_t first, int64_t stride,
                          int64_t count) {
  std::vector<int64_t> picked;
  for (int64_t i = 0; i < count; ++i) picked.push_back(ranks[first + i * stride]);
  return picked;
}

/// EP counts slower than ETP, and its neighbours share a node.
NodeGroups join_node_groups(World& world, const StageGroups& groups) {
  const std::vector<int64_t> experts = groups.experts->ranks();
  const std::vector<int64_t> ep = groups.ep->ranks();
  const int64_t etp = groups.etp->size();
  const int64_t nodes = groups.policy.dispatch_nodes;
  const int64_t inner = groups.ep->size() / nodes;
  const int64_t node = groups.ep->rank() / inner;
  return {.nodes = world.make_group("ep_nodes", pick(ep, groups.ep->rank() % inner, inner, nodes)),
          .ep = world.make_group("ep_inner", pick(ep, node * inner, 1, inner)),
          .experts =
              world.make_group("experts_inner", pick(experts, node * inner * etp, 1, inner * etp))};
}

std::vector<ContextGroups> join_contexts(World& world, const Layout& layout,
                                         const ParallelSpec& parallel) {
  std::vector<ContextGroups> groups;
  for (const int64_t degree : context_degrees(layout, parallel)) {
    const Layout of_degree = layout_of_degree(layout, parallel, degree);
    const auto along = [&](const char* name, auto... axes) {
      const std::array list = {axes...};
      return world.make_group(name, of_degree.group(world.rank(), list));
    };
    groups.push_back({.ring = along("ring", Axis::kCp),
                      .micro_batch = along("micro_batch", Axis::kTp, Axis::kCp),
                      .dp = along("dp", Axis::kDp)});
    groups.back().ring->connect_neighbours();
  }
  return groups;
}

}  // namespace

StageGroups StageGroups::with_degree(size_t log_degree) const {
  StageGroups groups = *this;
  const ContextGroups& own = by_degree.at(log_degree);
  groups.ring = own.ring;
  groups.micro_batch = own.micro_batch;
  groups.dp = own.dp;
  groups.policy.plans_contexts = true;
  groups.by_degree.clear();
  return groups;
}

Layout layout_of_degree(const Layout& layout, const ParallelSpec& parallel, int64_t degree) {
  const std::string& order = parallel.layout.dense_order;
  require(order.find("cp-dp") != std::string::npos,
          "parallel.dynamic_cp shares documents among neighbours of cp and dp, but "
          "parallel.dense_order is \"{}\"; put dp right behind cp, as in \"tp-cp-dp-pp\"",
          order);
  LayoutSpec spec = parallel.layout;
  spec.dp = layout.degree(Axis::kCp) * layout.degree(Axis::kDp) / degree;
  spec.cp = degree;
  return {spec, layout.num_ranks()};
}

std::vector<int64_t> context_degrees(const Layout& layout, const ParallelSpec& parallel) {
  std::vector<int64_t> degrees;
  if (!parallel.dynamic_cp) return degrees;
  const int64_t most = largest_context(layout.degree(Axis::kCp) * layout.degree(Axis::kDp));
  for (int64_t degree = 1; degree <= most; degree *= 2) degrees.push_back(degree);
  return degrees;
}

StageGroups single_rank_groups() {
  const auto single = [](const char* name) { return make_single_communicator(name); };
  return {.tp = single("tp"),
          .ring = single("ring"),
          .heads = single("heads"),
          .micro_batch = single("micro_batch"),
          .dp = single("dp"),
          .pp = single("pp"),
          .etp = single("etp"),
          .ep = single("ep"),
          .experts = single("experts")};
}

StagePolicy make_stage_policy(const Layout& layout, const ParallelSpec& parallel) {
  return {.replicated_attention =
              parallel.attention == AttentionParallel::kUlysses && layout.degree(Axis::kTp) > 1,
          .head_inner = heads_degree(parallel, layout.degree(Axis::kCp)),
          .dispatcher = parallel.dispatcher,
          .dispatch_nodes = dispatch_nodes(parallel, layout.degree(Axis::kEp)),
          .all_to_all_efficiency = parallel.all_to_all_efficiency,
          .exchange = parallel.exchange,
          .clone_slots = layout.degree(Axis::kEp) > 1 ? parallel.clone_experts : 0};
}

StageGroups join_stage_groups(World& world, const Layout& layout, const ParallelSpec& parallel) {
  const int64_t rank = world.rank();
  const auto along = [&](const char* name, auto... axes) {
    const std::array list = {axes...};
    return world.make_group(name, layout.group(rank, list));
  };
  const int64_t tp = layout.degree(Axis::kTp);
  const StagePolicy policy = make_stage_policy(layout, parallel);
  const int64_t inner = policy.head_inner;
  const int64_t rings = layout.degree(Axis::kCp) / inner;
  const int64_t ring_rank = layout.coordinate(rank, Axis::kCp) / inner;
  const int64_t inner_rank = layout.coordinate(rank, Axis::kCp) % inner;
  const auto cp = layout.group(rank, Axis::kCp);

  StageGroups groups;
  groups.tp = along("tp", Axis::kTp);
  groups.ring = world.make_group("ring", pick(cp, inner_rank, inner, rings));
  groups.ring->connect_neighbours();
  groups.policy = policy;
  if (policy.replicated_attention) {
    const std::array axes = {Axis::kTp, Axis::kCp};
    groups.heads = world.make_group(
        "heads", pick(layout.group(rank, axes), ring_rank * inner * tp, 1, inner * tp));
  } else {
    groups.heads = world.make_group("heads", pick(cp, ring_rank * inner, 1, inner));
  }
  groups.micro_batch = along("micro_batch", Axis::kTp, Axis::kCp);
  groups.dp = along("dp", Axis::kDp);
  groups.pp = along("pp", Axis::kPp);
  groups.etp = along("etp", Axis::kEtp);
  groups.ep = along("ep", Axis::kEp);
  groups.experts = along("experts", Axis::kEtp, Axis::kEp);
  if (policy.dispatch_nodes > 1) groups.by_node = join_node_groups(world, groups);
  groups.by_degree = join_contexts(world, layout, parallel);
  if (parallel.dynamic_cp) groups.contexts = along("contexts", Axis::kCp, Axis::kDp);
  return groups;
}

}  // namespace tessera
