#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/planned_world.h"
#include "model/proof/prove_stage.h"
#include "model/run/gradient_cases.h"

/// Models over layouts whose ranks are not there.
namespace tessera::testing {

struct LayoutCase {
  std::string name;
  int64_t num_ranks = 1;
  ParallelSpec parallel = {};
};

inline void PrintTo(const LayoutCase& layout, std::ostream* out) {
  *out << layout.name;
}

template <typename Change>
LayoutCase make_layout_case(std::string name, int64_t num_ranks, Change change) {
  LayoutCase result{.name = std::move(name), .num_ranks = num_ranks};
  change(result.parallel);
  return result;
}

/// Every axis alone, and mixes of them in every way of exchanging.
inline std::vector<LayoutCase> proof_layouts() {
  using P = ParallelSpec;
  const auto bounded = ExchangeSizes::kBounded;
  const auto all_gather = DispatcherRequest::kAllGather;
  const auto all_to_all = DispatcherRequest::kAllToAll;
  return {
      {.name = "one"},
      {.name = "dp4", .num_ranks = 4},
      make_layout_case("tp2", 2, [](P& p) { p.layout.tp = 2; }),
      make_layout_case("tp4", 4, [](P& p) { p.layout.tp = 4; }),
      make_layout_case("tp4_dp2", 8, [](P& p) { p.layout.tp = 4; }),
      make_layout_case("ulysses2_dp2", 4,
                       [](P& p) {
                         p.layout.tp = 2;
                         p.attention = AttentionParallel::kUlysses;
                       }),
      make_layout_case("ring2", 2, [](P& p) { p.layout.cp = 2; }),
      make_layout_case("ring3_dp2", 6, [](P& p) { p.layout.cp = 3; }),
      make_layout_case("heads2_dp2", 4,
                       [](P& p) {
                         p.layout.cp = 2;
                         p.context = ContextExchange::kAllToAll;
                       }),
      make_layout_case("tp2_cp4_mixed", 8,
                       [](P& p) {
                         p.layout.tp = 2;
                         p.layout.cp = 4;
                         p.context = ContextExchange::kHierarchical;
                         p.context_inner = 2;
                       }),
      make_layout_case("ulysses2_cp2", 4,
                       [](P& p) {
                         p.layout.tp = 2;
                         p.layout.cp = 2;
                         p.attention = AttentionParallel::kUlysses;
                         p.context = ContextExchange::kAllToAll;
                       }),
      make_layout_case("ep2", 2,
                       [=](P& p) {
                         p.layout.ep = 2;
                         p.dispatcher = all_to_all;
                       }),
      make_layout_case("ep2_clones", 4,
                       [](P& p) {
                         p.layout.ep = 2;
                         p.clone_experts = 2;
                       }),
      make_layout_case("tp2_ep4_clones_hierarchical", 8,
                       [](P& p) {
                         p.layout.tp = 2;
                         p.layout.ep = 4;
                         p.dispatcher = DispatcherRequest::kHierarchical;
                         p.dispatch_inner = 2;
                         p.clone_experts = 1;
                       }),
      make_layout_case("ep2_deduplicated", 4,
                       [](P& p) {
                         p.layout.ep = 2;
                         p.dispatcher = DispatcherRequest::kDeduplicated;
                       }),
      make_layout_case("ep4_hierarchical", 8,
                       [](P& p) {
                         p.layout.ep = 4;
                         p.dispatcher = DispatcherRequest::kHierarchical;
                         p.dispatch_inner = 2;
                       }),
      make_layout_case("ep4_etp2_hierarchical_bounded", 16,
                       [=](P& p) {
                         p.layout.ep = 4;
                         p.layout.etp = 2;
                         p.dispatcher = DispatcherRequest::kHierarchical;
                         p.dispatch_inner = 2;
                         p.exchange = bounded;
                       }),
      make_layout_case("ep2_etp2_deduplicated_bounded", 8,
                       [=](P& p) {
                         p.layout.ep = 2;
                         p.layout.etp = 2;
                         p.dispatcher = DispatcherRequest::kDeduplicated;
                         p.exchange = bounded;
                       }),
      make_layout_case("ep4_bounded", 8,
                       [=](P& p) {
                         p.layout.ep = 4;
                         p.dispatcher = all_to_all;
                         p.exchange = bounded;
                       }),
      make_layout_case("ep4_gathered", 8,
                       [=](P& p) {
                         p.layout.ep = 4;
                         p.dispatcher = all_gather;
                       }),
      make_layout_case("etp2", 4, [](P& p) { p.layout.etp = 2; }),
      make_layout_case("etp2_ep2", 8,
                       [=](P& p) {
                         p.layout.etp = 2;
                         p.layout.ep = 2;
                         p.dispatcher = all_to_all;
                       }),
      make_layout_case("etp2_ep2_bounded", 8,
                       [=](P& p) {
                         p.layout.etp = 2;
                         p.layout.ep = 2;
                         p.dispatcher = all_to_all;
                         p.exchange = bounded;
                       }),
      make_layout_case("etp2_ep2_gathered", 8,
                       [=](P& p) {
                         p.layout.etp = 2;
                         p.layout.ep = 2;
                         p.dispatcher = all_gather;
                       }),
      // Parallel Folding: EP across TP and CP.
      make_layout_case("tp2_ep4", 8,
                       [=](P& p) {
                         p.layout.tp = 2;
                         p.layout.ep = 4;
                         p.dispatcher = all_to_all;
                       }),
      make_layout_case("tp4_cp2_ep2_etp2", 16,
                       [=](P& p) {
                         p.layout.tp = 4;
                         p.layout.cp = 2;
                         p.layout.ep = 2;
                         p.layout.etp = 2;
                         p.dispatcher = all_to_all;
                       }),
      make_layout_case("tp4_ep2_gathered", 8,
                       [=](P& p) {
                         p.layout.tp = 4;
                         p.layout.ep = 2;
                         p.dispatcher = all_gather;
                       }),
      make_layout_case("tp2_dp3_ep2_split", 6,
                       [=](P& p) {
                         p.layout.tp = 2;
                         p.layout.ep = 2;
                         p.dispatcher = all_to_all;
                         p.split_weights = true;
                       }),
  };
}

/// What a rank of the layout runs of the model; nullopt where they do not go together.
inline std::optional<StagePrograms> plan_stage(const ModelConfig& config, const LayoutCase& layout,
                                               int64_t rank = 0, const SavedPolicy& policy = {},
                                               double qk_clip = 0) {
  const auto world = make_planned_world(rank, layout.num_ranks);
  try {
    const Layout ranks(layout.parallel.layout, layout.num_ranks);
    ModelPart part{.groups = join_stage_groups(*world, ranks, layout.parallel)};
    part.split_weights = layout.parallel.split_weights;
    BatchShape shape = tiny_shape(2, 24);
    shape.qk_clip = qk_clip;
    return StagePrograms(config, shape, std::move(part), policy, make_cpu_kernels());
  } catch (const UserError&) {
    return std::nullopt;
  }
}

}  // namespace tessera::testing
