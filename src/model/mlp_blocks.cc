#include "model/mlp_blocks.h"

#include <numeric>

#include "ops/activation/activation.h"
#include "ops/add/add.h"
#include "ops/block_sparse/block_sparse.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/permute/permute.h"
#include "ops/route_map/route_map.h"
#include "ops/router/router.h"
#include "ops/sigmoid_gate/sigmoid_gate.h"

namespace tessera {
namespace {

const char* first_matrix_name(const ModelConfig& config) {
  return config.is_gated() ? "gate_up" : "up";
}

/// Balance over all layers is asked for outside the routers, by the means of their scores.
BalanceScope router_scope(BalanceTokens tokens) {
  switch (tokens) {
    case BalanceTokens::kSequence:
      return BalanceScope::kSequence;
    case BalanceTokens::kGlobalBatch:
      return BalanceScope::kGlobalBatch;
    case BalanceTokens::kMicroBatch:
    case BalanceTokens::kModel:
      break;
  }
  return BalanceScope::kMicroBatch;
}

RouterSpec router_spec(const MoeConfig& moe) {
  return {.num_experts = moe.num_experts,
          .top_k = moe.top_k,
          .score = moe.score,
          .order = moe.score_order,
          .normalize_top_k = moe.normalize_top_k,
          .scaling_factor = moe.score_scale,
          .expert_bias = moe.has_expert_bias(),
          .num_groups = moe.num_groups,
          .top_groups = moe.top_groups,
          .group_score = moe.group_score,
          .balance_scope = router_scope(moe.balance_scope),
          .force_balanced = moe.force_balanced};
}

RouteMapSpec route_map_spec(const MoeConfig& moe) {
  return {.num_experts = moe.num_experts,
          .top_k = moe.top_k,
          .capacity_factor = moe.capacity_factor,
          .pad_to_capacity = moe.pad_to_capacity,
          .drop_policy = moe.drop_policy,
          .alignment = moe.experts == ExpertPath::kBlockSparse ? moe.block_size : 1};
}

/// The routed rows of a layer: what the experts' implementations have in common.
struct RoutedRows {
  ValueId probs_TK = -1;
  ValueId row_of_TK = -1;
  ValueId source_R = -1;
  ValueId offsets = -1;
  ValueId rows_RH = -1;
};

ValueId build_router(LayerBuilder& builder, ValueId normed, std::vector<ValueId>& routed) {
  const MoeConfig& moe = builder.config.moe;
  LayerProgram& layer = builder.layer;
  Program& program = builder.program();
  const ValueId weight = program.add_weight(
      "moe.router.weight", {DType::kF32, {moe.num_experts, builder.config.hidden_size}});
  std::vector<ValueId> inputs = {normed, weight};
  if (moe.has_expert_bias()) {
    layer.expert_bias = program.add_input("expert_bias", {DType::kF32, {moe.num_experts}});
    inputs.push_back(layer.expert_bias);
  }
  if (moe.balance_scope == BalanceTokens::kGlobalBatch) {
    layer.prior_counts = program.add_input("prior_counts", {DType::kF32, {moe.num_experts}});
    inputs.push_back(layer.prior_counts);
  }
  if (moe.balance_scope == BalanceTokens::kSequence) inputs.push_back(layer.cu_seqlens);
  routed = program.add(
      make_router(router_spec(moe)), inputs,
      {"probs", "expert_idx", "router_logits", "counts", "balance_loss", "z_loss", "score_means"});
  layer.counts = routed[RouterOutput::kCounts];
  layer.balance_loss = routed[RouterOutput::kBalanceLoss];
  layer.z_loss = routed[RouterOutput::kZLoss];
  layer.score_means = routed[RouterOutput::kScoreMeans];
  return routed[RouterOutput::kProbs];
}

RoutedRows build_dispatch(LayerBuilder& builder, ValueId normed) {
  Program& program = builder.program();
  std::vector<ValueId> routed;
  RoutedRows rows{.probs_TK = build_router(builder, normed, routed)};
  const auto map =
      program.add(make_route_map(route_map_spec(builder.config.moe)),
                  {routed[RouterOutput::kExpertIdx], rows.probs_TK},
                  {"row_of", "source", "offsets", "num_rows", "dropped", "counts_kept"});
  rows.row_of_TK = map[RouteMapOutput::kRowOfTK];
  rows.source_R = map[RouteMapOutput::kSourceR];
  rows.offsets = map[RouteMapOutput::kOffsets];
  builder.layer.dropped = map[RouteMapOutput::kDropped];
  rows.rows_RH = program.add1(make_permute(), {normed, rows.source_R, rows.row_of_TK}, "expert_in");
  return rows;
}

/// Rows of each expert's first matrix: gate and up together where gated.
std::vector<int64_t> first_sizes(const ModelConfig& config) {
  std::vector<int64_t> sizes = config.moe.expert_sizes();
  if (config.is_gated()) {
    for (int64_t& size : sizes) size *= 2;
  }
  return sizes;
}

int64_t sum(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

/// The experts' two matrices, [sum of g_e, H] and [sum of F_e, H].
struct ExpertWeights {
  ValueId first = -1;
  ValueId second = -1;
};

ExpertWeights add_expert_weights(LayerBuilder& builder) {
  const ModelConfig& config = builder.config;
  const std::string first = fmt::format("moe.experts.{}.weight", first_matrix_name(config));
  return {builder.matrix(first, sum(first_sizes(config)), config.hidden_size),
          builder.matrix("moe.experts.down.weight", sum(config.moe.expert_sizes()),
                         config.hidden_size)};
}

/// Grouped products. With the probability before FC2 its gradient comes from the pre-activation, so
/// that no expert output is kept (Megatron-Core MoE, section 4.1.2).
ValueId build_grouped_experts(LayerBuilder& builder, const RoutedRows& rows,
                              const ExpertWeights& weights) {
  const ModelConfig& config = builder.config;
  Program& program = builder.program();
  const bool early = config.moe.memory_efficient;
  const ValueId pre = program.add1(
      make_grouped_matmul({.group_sizes = first_sizes(config), .side = GroupedSide::kOut}),
      {rows.rows_RH, weights.first, rows.offsets}, "expert_pre");
  std::vector<ValueId> inputs = {pre};
  if (early) {
    inputs.push_back(program.add1(make_permute_probs(),
                                  {rows.probs_TK, rows.source_R, rows.row_of_TK}, "expert_probs"));
  }
  inputs.push_back(rows.offsets);
  const ValueId act =
      program.add1(make_expert_activation({.kind = config.activation,
                                           .expert_sizes = config.moe.expert_sizes(),
                                           .apply_prob = early}),
                   inputs, "expert_act");
  const ValueId out = program.add1(
      make_grouped_matmul({.group_sizes = config.moe.expert_sizes(), .side = GroupedSide::kIn}),
      {act, weights.second, rows.offsets}, "expert_out");
  if (early) return program.add1(make_unpermute(), {out, rows.row_of_TK, rows.source_R}, "moe_out");
  return program.add1(make_unpermute_weighted(),
                      {out, rows.probs_TK, rows.row_of_TK, rows.source_R}, "moe_out");
}

/// Block-sparse products over a topology made from the routing (MegaBlocks, figure 6).
ValueId build_sparse_experts(LayerBuilder& builder, const RoutedRows& rows,
                             const ExpertWeights& weights) {
  const ModelConfig& config = builder.config;
  const int64_t block = config.moe.block_size;
  Program& program = builder.program();
  const int64_t max_rows = program.type(rows.rows_RH).shape[0];
  const auto make_topology = [&](const std::vector<int64_t>& sizes) {
    return program.add(
        make_block_topology({.block_size = block, .expert_sizes = sizes, .max_rows = max_rows}),
        {rows.offsets},
        {"row_offsets", "col_indices", "row_indices", "col_offsets", "transpose_indices",
         "num_blocks"});
  };
  const auto first = make_topology(first_sizes(config));
  const auto second = config.is_gated() ? make_topology(config.moe.expert_sizes()) : first;
  const ValueId probs = program.add1(
      make_permute_probs(), {rows.probs_TK, rows.source_R, rows.row_of_TK}, "expert_probs");
  const ValueId pre =
      program.add1(make_block_sparse_fc1(block),
                   {rows.rows_RH, weights.first, first[0], first[1], first[2], first[3], first[4]},
                   "expert_pre");
  const ValueId act = program.add1(
      make_block_sparse_activation({.activation = config.activation, .block_size = block}),
      {pre, probs, second[0], second[1]}, "expert_act");
  const ValueId out = program.add1(
      make_block_sparse_fc2(block),
      {act, weights.second, second[0], second[1], second[2], second[3], second[4], probs},
      "expert_out");
  return program.add1(make_unpermute(), {out, rows.row_of_TK, rows.source_R}, "moe_out");
}

ValueId build_shared_expert(LayerBuilder& builder, ValueId normed) {
  const MoeConfig& moe = builder.config.moe;
  const ValueId out = build_mlp(builder, "moe.shared", normed, moe.shared_inner_size);
  if (!moe.shared_gate) return out;
  const ValueId logit = builder.linear("moe.shared_gate", normed, 1, false, "shared_gate");
  return builder.program().add1(make_sigmoid_gate(), {out, logit}, "shared_out");
}

}  // namespace

ValueId build_moe(LayerBuilder& builder, ValueId normed) {
  const RoutedRows rows = build_dispatch(builder, normed);
  const ExpertWeights weights = add_expert_weights(builder);
  const ValueId routed = builder.config.moe.experts == ExpertPath::kBlockSparse
                             ? build_sparse_experts(builder, rows, weights)
                             : build_grouped_experts(builder, rows, weights);
  if (builder.config.moe.shared_inner_size == 0) return routed;
  return builder.program().add1(make_add(), {routed, build_shared_expert(builder, normed)},
                                "moe_sum");
}

ValueId build_mlp(LayerBuilder& builder, const std::string& name, ValueId normed,
                  int64_t inner_size) {
  const ModelConfig& config = builder.config;
  const int64_t width = config.is_gated() ? 2 * inner_size : inner_size;
  const ValueId pre = builder.linear(fmt::format("{}.{}", name, first_matrix_name(config)), normed,
                                     width, config.mlp_bias, name + "_pre");
  const ValueId act =
      builder.program().add1(make_activation(config.activation), {pre}, name + "_act");
  return builder.linear(name + ".down", act, config.hidden_size, config.mlp_bias, name + "_out");
}

}  // namespace tessera
