#include "model/experts/moe_blocks.h"

#include <cmath>

#include "model/dispatch/dispatchers.h"
#include "model/experts/expert_clones.h"
#include "model/experts/expert_products.h"
#include "model/experts/mlp_blocks.h"
#include "model/experts/router_blocks.h"
#include "ops/add/add.h"
#include "ops/block_sparse/block_sparse.h"
#include "ops/collective/collective.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/expert_bias/expert_bias.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/permute/permute.h"
#include "ops/route_map/route_map.h"
#include "ops/scale/scale.h"
#include "ops/sigmoid_gate/sigmoid_gate.h"

namespace tessera {
namespace {

/// The order of the gathered tokens, for capacities over all of a micro-batch.
SharedCapacity shared_capacity(LayerBuilder& builder) {
  return {.micro_batch = builder.groups.micro_batch, .positions = builder.port(Port::kTokenOrder)};
}

/// The capacity factor; where experts choose, that with which each keeps ceil(T·K/E) of all tokens,
/// a little below the quotient so that no rounding adds one.
double dispatch_capacity(const MoeConfig& moe) {
  if (!moe.experts_choose()) return moe.capacity_factor;
  return (1 - 1e-12) * static_cast<double>(moe.top_k) / static_cast<double>(moe.num_experts);
}

DispatchSpec dispatch_spec(LayerBuilder& builder) {
  const MoeConfig& moe = builder.config.moe;
  const StageGroups& groups = builder.groups;
  const bool sparse = moe.experts == ExpertPath::kBlockSparse;
  DispatchSpec spec{.kind = choose_dispatcher(builder.config, groups).kind,
                    .exchange = groups.policy.exchange,
                    .num_experts = moe.num_experts,
                    .top_k = moe.choices(),
                    .num_groups = moe.num_groups,
                    .top_groups = moe.top_groups,
                    .ep = groups.ep,
                    .etp = groups.etp,
                    .experts = groups.experts,
                    .by_node = groups.by_node,
                    .capacity_factor = dispatch_capacity(moe),
                    .pad_to_capacity = moe.pad_to_capacity,
                    .drop_policy = moe.experts_choose() ? DropPolicy::kProbs : moe.drop_policy,
                    .capacity_group_size = moe.capacity_group_size,
                    .alignment = sparse ? moe.block_size : 1,
                    .early_probs = sparse || moe.memory_efficient || moe.probs_on_input};
  if (shares_capacity(moe, groups)) spec.shared_capacity = shared_capacity(builder);
  return spec;
}

/// The local experts' two matrices, [sum of g_e, width] and [sum of F_e, width] of the experts'
/// width, and where these are clones' their biases, if they have any.
struct ExpertWeights {
  ValueId first = -1;
  ValueId second = -1;
  ValueId first_bias = -1;
  ValueId second_bias = -1;
};

ExpertWeights add_expert_weights(LayerBuilder& builder, const ExpertShare& share) {
  const ModelConfig& config = builder.config;
  const std::string first = fmt::format("moe.experts.{}.weight", first_matrix_name(config));
  const auto place = [&](int64_t parts) {
    std::vector<int64_t> matrix_rows;
    for (const int64_t size : config.moe.expert_sizes())
      matrix_rows.insert(matrix_rows.end(), parts, size);
    return WeightPlacement{.slice = expert_rows(builder, share, parts),
                           .expert = true,
                           .matrix_rows = std::move(matrix_rows)};
  };
  return {builder.matrix(first, place(config.is_gated() ? 2 : 1)),
          builder.matrix("moe.experts.down.weight", place(1))};
}

/// The biases of the first matrix.
ValueId first_biases(LayerBuilder& builder, const ExpertShare& share) {
  const ModelConfig& config = builder.config;
  Slice slice = expert_rows(builder, share, config.is_gated() ? 2 : 1);
  slice = Slice::of_rows({slice.global[0]}, slice.rows);
  return builder.f32_weight(fmt::format("moe.experts.{}.bias", first_matrix_name(config)),
                            {.slice = std::move(slice), .expert = true});
}

/// Adds the biases of the first matrix, `given` or the experts' own, to its products, whose
/// block-sparse values begin where `row_offsets` say; -1: rows of a matrix.
ValueId add_first_biases(LayerBuilder& builder, const ExpertShare& share,
                         const DispatchedRows& rows, ValueId product, ValueId row_offsets,
                         ValueId given = -1) {
  const ModelConfig& config = builder.config;
  if (!config.moe.mlp_bias) return product;
  const ValueId bias = given.is_set() ? given : first_biases(builder, share);
  const bool sparse = row_offsets.is_set();
  std::vector<ValueId> inputs = {product, bias, rows.offsets};
  if (sparse) inputs.push_back(row_offsets);
  return builder.program().add1(
      make_expert_bias(
          {.sizes = share.first_sizes, .block_size = sparse ? config.moe.block_size : 0}),
      inputs, "expert_pre");
}

/// The columns of the second matrix whose biases this rank adds.
IndexRange second_columns(const LayerBuilder& builder) {
  const Communicator& etp = *builder.groups.etp;
  const int64_t count = builder.config.expert_width() / etp.size();
  return {etp.rank() * count, count};
}

/// Their biases.
ValueId second_biases(LayerBuilder& builder, const ExpertShare& share) {
  const IndexRange columns = second_columns(builder);
  std::vector<IndexRange> own;
  for (int64_t e = share.experts.begin; e < share.experts.end(); ++e)
    own.push_back({e * builder.config.expert_width() + columns.begin, columns.count});
  const Shape all{builder.config.moe.num_experts * builder.config.expert_width()};
  return builder.f32_weight("moe.experts.down.bias",
                            {.slice = Slice::of_rows(all, std::move(own)), .expert = true});
}

/// Adds the biases of the second matrix, `given` or the experts' own, weighted as the rows are. The
/// ranks of ETP have summands of them: each adds the biases of its own columns.
ValueId add_second_biases(LayerBuilder& builder, const ExpertShare& share,
                          const DispatchedRows& rows, ValueId product, ValueId given = -1) {
  if (!builder.config.moe.mlp_bias) return product;
  const auto [first_column, count] = second_columns(builder);
  const ValueId bias = given.is_set() ? given : second_biases(builder, share);
  const bool early = rows.probs_R >= 0;
  std::vector<ValueId> inputs = {product, bias};
  if (early) inputs.push_back(rows.probs_R);
  inputs.push_back(rows.offsets);
  return builder.program().add1(
      make_expert_bias({.sizes = std::vector<int64_t>(share.experts.count, count),
                        .first_column = first_column,
                        .apply_prob = early}),
      inputs, "expert_biased_out");
}

/// The name of what comes out of the first matrix: the pre-activation itself, or that without its
/// biases.
const char* first_product_name(const LayerBuilder& builder) {
  return builder.config.moe.mlp_bias ? "expert_fc1" : "expert_pre";
}

/// Grouped products. With the probability before FC2 its gradient comes from the pre-activation, so
/// that no expert output is kept (Megatron-Core MoE, section 4.1.2).
ValueId build_grouped_experts(LayerBuilder& builder, const ExpertShare& share,
                              const DispatchedRows& rows, const ExpertWeights& weights) {
  const ModelConfig& config = builder.config;
  Program& program = builder.program();
  const bool early = rows.probs_R >= 0;
  const ValueId product =
      multiply_by_experts(builder, share,
                          {.matrix = fmt::format("moe.experts.{}", first_matrix_name(config)),
                           .weight = weights.first,
                           .side = GroupedSide::kOut,
                           .parts = config.is_gated() ? 2 : 1},
                          rows.rows_RH, rows.offsets, first_product_name(builder));
  const ValueId pre =
      add_first_biases(builder, share, rows, product, ValueId(), weights.first_bias);
  std::vector<ValueId> inputs = {pre};
  if (early) inputs.push_back(rows.probs_R);
  inputs.push_back(rows.offsets);
  const ValueId act = program.add1(make_expert_activation({.function = config.activation_function(),
                                                           .expert_sizes = share.sizes,
                                                           .apply_prob = early}),
                                   inputs, "expert_act");
  const ValueId out = multiply_by_experts(builder, share,
                                          {.matrix = "moe.experts.down",
                                           .weight = weights.second,
                                           .side = GroupedSide::kIn,
                                           .parts = 1},
                                          act, rows.offsets, "expert_out");
  return add_second_biases(builder, share, rows, out, weights.second_bias);
}

/// Block-sparse products over a topology made from the routing (MegaBlocks, figure 6).
ValueId build_sparse_experts(LayerBuilder& builder, const ExpertShare& share,
                             const DispatchedRows& rows, const ExpertWeights& weights) {
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
  const auto first = make_topology(share.first_sizes);
  const auto second = config.is_gated() ? make_topology(share.sizes) : first;
  const ValueId product =
      program.add1(make_block_sparse_fc1(block, share.first_sizes),
                   {rows.rows_RH, weights.first, first[0], first[1], first[2], first[3], first[4]},
                   first_product_name(builder));
  const ValueId pre = add_first_biases(builder, share, rows, product, first[0]);
  const ValueId act =
      program.add1(make_block_sparse_activation(
                       {.activation = config.activation_function(), .block_size = block}),
                   {pre, rows.probs_R, second[0], second[1]}, "expert_act");
  const ValueId out = program.add1(
      make_block_sparse_fc2(block, share.sizes),
      {act, weights.second, second[0], second[1], second[2], second[3], second[4], rows.probs_R},
      "expert_out");
  return add_second_biases(builder, share, rows, out);
}

/// The tokens as the experts see them. Every rank projects its own with the whole matrix, so that
/// only the narrow rows travel.
ValueId project_down(LayerBuilder& builder, ValueId normed) {
  const int64_t size = builder.config.moe.latent_size;
  if (size == 0) return normed;
  return builder.linear("moe.latent_down", normed, size, false, "moe_latent");
}

/// The experts' weighted sum back at the full size.
ValueId project_up(LayerBuilder& builder, ValueId sum) {
  if (builder.config.moe.latent_size == 0) return sum;
  return builder.linear("moe.latent_up", sum, builder.config.hidden_size, false, "moe_projected");
}

/// The experts of this rank's slots for clones.
ExpertShare clone_share(const ExpertShare& share, const CloneSlots& slots) {
  const int64_t count = slots.slots_per_rank;
  return {.experts = {slots.rank * count, count},
          .sizes = std::vector<int64_t>(count, share.sizes[0]),
          .first_sizes = std::vector<int64_t>(count, share.first_sizes[0])};
}

/// Rows times their probabilities, which are then done with.
DispatchedRows weigh_inputs(LayerBuilder& builder, DispatchedRows rows) {
  if (!builder.config.moe.probs_on_input) return rows;
  rows.rows_RH = builder.program().add1(make_sigmoid_gate({.function = GateFunction::kIdentity}),
                                        {rows.rows_RH, rows.probs_R}, "expert_in");
  rows.probs_R = -1;
  return rows;
}

/// Experts at home and clones of others', each with its own dispatch of the tokens that go there.
/// The clones' weights are on their way before the tokens, and in the backward pass their gradients
/// are added to what the experts at home have.
ValueId build_cloned_experts(LayerBuilder& builder, ValueId tokens, const RoutedTokens& routing) {
  Program& program = builder.program();
  const DispatchSpec spec = dispatch_spec(builder);
  const ExpertShare share = expert_share(builder);
  ExpertWeights weights = add_expert_weights(builder, share);
  const ClonedRouting cloned = plan_clones(builder, routing.expert_idx_TK);
  ExpertWeights clones = {clone_weight(builder, cloned, weights.first, "clone_first"),
                          clone_weight(builder, cloned, weights.second, "clone_second")};
  if (builder.config.moe.mlp_bias) {
    weights.first_bias = first_biases(builder, share);
    weights.second_bias = second_biases(builder, share);
    clones.first_bias = clone_weight(builder, cloned, weights.first_bias, "clone_first_bias");
    clones.second_bias = clone_weight(builder, cloned, weights.second_bias, "clone_second_bias");
  }
  const DispatchSpec clone_spec =
      clone_dispatch(spec, cloned, program.type(routing.expert_idx_TK).shape[0]);
  const DispatchedRows rows = dispatch(program, spec, tokens, routing.probs_TK, cloned.home_idx_TK);
  const DispatchedRows clone_rows =
      dispatch(program, clone_spec, tokens, routing.probs_TK, cloned.clone_idx_TK);
  builder.layer.ports.set(Port::kDropped, rows.dropped);
  const ValueId out = build_grouped_experts(builder, share, weigh_inputs(builder, rows), weights);
  const ValueId clone_out = build_grouped_experts(builder, clone_share(share, cloned.slots),
                                                  weigh_inputs(builder, clone_rows), clones);
  return program.add1(
      make_add(),
      {combine(program, spec, rows, out), combine(program, clone_spec, clone_rows, clone_out)},
      "moe_out");
}

ValueId build_computing_experts(LayerBuilder& builder, ValueId tokens,
                                const RoutedTokens& routing) {
  Program& program = builder.program();
  if (clones_experts(builder)) return build_cloned_experts(builder, tokens, routing);
  const DispatchSpec spec = dispatch_spec(builder);
  const ExpertShare share = expert_share(builder);
  const DispatchedRows rows =
      dispatch(program, spec, tokens, routing.probs_TK, routing.expert_idx_TK);
  builder.layer.ports.set(Port::kDropped, rows.dropped);
  const ExpertWeights weights = add_expert_weights(builder, share);
  const ValueId out =
      builder.config.moe.experts == ExpertPath::kBlockSparse
          ? build_sparse_experts(builder, share, rows, weights)
          : build_grouped_experts(builder, share, weigh_inputs(builder, rows), weights);
  return combine(program, spec, rows, out);
}

/// What routers read of the layer's state by a norm of their own.
ValueId build_router_norm(LayerBuilder& builder, ValueId state) {
  const int64_t size = builder.config.hidden_size;
  const ValueId normed = builder.norm("moe.router_norm", state, size, builder.config.norm_eps);
  const double factor = 1 / std::sqrt(static_cast<double>(size));
  return builder.program().add1(make_scale(factor), {normed}, "router_normed");
}

ValueId build_routed_experts(LayerBuilder& builder, ValueId state, ValueId normed) {
  const ValueId own = builder.config.moe.router_norm ? build_router_norm(builder, state) : normed;
  const ValueId router_in = jitter_tokens(builder, own);
  RoutedTokens routing = build_router(builder, router_in);
  const ValueId read = builder.config.moe.jitter_experts ? router_in : normed;
  const ValueId given_back = take_zero_experts(builder, read, routing);
  const ValueId out =
      project_up(builder, build_computing_experts(builder, project_down(builder, read), routing));
  if (!given_back.is_set()) return out;
  return builder.program().add1(make_add(), {out, given_back}, "routed_sum");
}

ValueId build_shared_expert(LayerBuilder& builder, ValueId normed) {
  const MoeConfig& moe = builder.config.moe;
  const ValueId out = build_mlp(builder, "moe.shared", normed, moe.shared_inner_size);
  if (!moe.shared_gate) return out;
  const ValueId logit = builder.linear("moe.shared_gate", normed, 1, false, "shared_gate");
  return builder.program().add1(make_sigmoid_gate(), {out, logit}, "shared_out");
}

/// Rows that a bounded all-to-all moves to each rank of EP for each token, capacities not rounded
/// up (max_rows_to_peer has them for a number of tokens); 0 where sizes are exact.
double rows_per_peer(const MoeConfig& moe, const StageGroups& groups) {
  if (groups.policy.exchange != ExchangeSizes::kBounded) return 0;
  const int64_t local_experts = moe.num_experts / groups.ep->size();
  const auto most = static_cast<double>(std::min(moe.choices(), local_experts));
  const bool whole_groups = local_experts % moe.capacity_group_size == 0;
  const double factor = dispatch_capacity(moe);
  if (factor == 0 || !whole_groups) return most;
  const int64_t token_ranks = shares_capacity(moe, groups) ? groups.token_ranks() : 1;
  return std::min(most, factor * static_cast<double>(moe.choices() * token_ranks) /
                            static_cast<double>(groups.ep->size()));
}

/// The same of a deduplicated exchange with `members`, where every token may go to all of them.
double reach_of_peer(const MoeConfig& moe, const StageGroups& groups, int64_t members) {
  if (groups.policy.exchange == ExchangeSizes::kBounded) return 1;
  return reach_of_rank({moe.num_experts, moe.top_k, moe.num_groups, moe.top_groups}, members);
}

}  // namespace

DispatchChoice choose_dispatcher(const ModelConfig& config, const StageGroups& groups) {
  const bool clones = groups.policy.clone_slots > 0;
  const bool free = groups.policy.dispatcher == DispatcherRequest::kAuto;
  return choose_dispatcher(
      {.top_k = config.moe.top_k,
       .ep = groups.ep->size(),
       .etp = groups.etp->size(),
       .all_to_all_efficiency = groups.policy.all_to_all_efficiency,
       .rows_per_peer = rows_per_peer(config.moe, groups),
       .reach = reach_of_peer(config.moe, groups, groups.ep->size()),
       .nodes = groups.policy.dispatch_nodes,
       .node_reach = reach_of_peer(config.moe, groups, groups.policy.dispatch_nodes)},
      clones && free ? DispatcherRequest::kAllToAll : groups.policy.dispatcher);
}

std::string describe_dispatcher(const ModelConfig& config, const StageGroups& groups) {
  const std::string text = choose_dispatcher(config, groups).to_string();
  const int64_t slots = groups.policy.clone_slots;
  if (slots == 0) return text;
  return fmt::format("{}; each rank may clone {} hot {} of others", text, slots,
                     slots == 1 ? "expert" : "experts");
}

ValueId build_moe(LayerBuilder& builder, ValueId state, ValueId normed) {
  const ModelConfig& config = builder.config;
  const auto norm = [&](const char* name, ValueId x) { return builder.state_norm(name, x); };
  const bool separate = config.moe.separate_norms;
  const ValueId read = separate ? norm("moe.routed_norm", state) : normed;
  ValueId routed = build_routed_experts(builder, state, read);
  if (separate) routed = norm("moe.routed_out_norm", routed);
  if (config.moe.shared_inner_size == 0) return routed;
  ValueId shared = build_shared_expert(builder, normed);
  if (separate) shared = norm("moe.shared_out_norm", shared);
  return builder.program().add1(make_add(), {routed, shared}, "moe_sum");
}

}  // namespace tessera
