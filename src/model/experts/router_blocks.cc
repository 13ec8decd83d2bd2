#include "model/experts/router_blocks.h"

#include "ops/balance/balance.h"
#include "ops/collective/collective.h"
#include "ops/expert_scale/expert_scale.h"
#include "ops/hash_experts/hash_experts.h"
#include "ops/jitter/jitter.h"
#include "ops/router/router.h"
#include "ops/sinkhorn/sinkhorn.h"
#include "ops/sparse_mixer/sparse_mixer.h"
#include "ops/top_p/top_p.h"
#include "ops/zero_experts/zero_experts.h"

namespace tessera {
namespace {

/// `spread`: balance is asked for outside the routers, as it always is over all layers, by the
/// means of their scores. Where experts choose, every token has all experts, in their order, and
/// capacities leave each expert its best.
RouterSpec router_spec(const MoeConfig& moe, const StageGroups& groups, bool spread, bool replay) {
  const bool by_sequence = moe.balance_scope == BalanceTokens::kSequence && !spread;
  const bool cut = moe.top_p < 1;  // then TopP normalizes and scales
  return {.num_experts = moe.router_outputs(),
          .top_k = moe.choices(),
          .score = moe.score,
          .order = moe.score_order,
          .normalize_top_k = moe.normalize_top_k && !cut && !moe.experts_choose(),
          .scaling_factor = cut ? 1.0 : moe.score_scale,
          .logit_bias = moe.router_bias,
          .expert_bias = moe.has_expert_bias(),
          .num_groups = moe.num_groups,
          .top_groups = moe.top_groups,
          .group_score = moe.group_score,
          .balance_scope = by_sequence ? BalanceScope::kSequence : BalanceScope::kMicroBatch,
          .balance_group_size = moe.balance_group_size,
          .force_balanced = moe.force_balanced || moe.experts_choose(),
          .replay = replay,
          .padding = groups.policy.plans_contexts};
}

/// The counts of the step's micro-batches before this one, whose own are `counts`. Data-parallel
/// ranks work on neighbouring ones at a time.
ValueId build_earlier_counts(LayerBuilder& builder, ValueId counts) {
  Program& program = builder.program();
  const CommunicatorPtr& dp = builder.groups.dp;
  const ValueId earlier = builder.port(Port::kEarlierCounts);
  if (dp->size() > 1) counts = program.add1(make_all_gather(dp), {counts}, "counts_of_ranks");
  const auto running = program.add(make_running_counts(dp->rank()), {counts, earlier},
                                   {"counts_before", "counts_so_far"});
  builder.layer.ports.set(Port::kCountsSoFar, running[RunningCountsOutput::kAfter]);
  return running[RunningCountsOutput::kBefore];
}

/// The balance loss beside the router: the choice is counted over all ranks that share the
/// micro-batch, each of which has its tokens' part of the loss, and over the global batch also in
/// the micro-batches before.
void build_spread_balance(LayerBuilder& builder, ValueId logits, ValueId expert_idx) {
  const MoeConfig& moe = builder.config.moe;
  Program& program = builder.program();
  const bool by_sequence = moe.balance_scope == BalanceTokens::kSequence;
  const ValueId segments = builder.port(Port::kSegments);
  const auto statistics = program.add(
      make_balance_statistics({.num_experts = moe.router_outputs(),
                               .top_k = moe.choices(),
                               .score = moe.score,
                               .num_segments = by_sequence ? builder.shape.max_sequences : 1}),
      {logits, expert_idx, segments}, {"segment_counts", "score_sums"});
  ValueId counts = statistics[BalanceOutput::kCounts];
  if (builder.groups.token_ranks() > 1) {
    counts = program.add1(make_all_reduce_constant(builder.groups.micro_batch), {counts},
                          "segment_counts_of_all");
  }
  std::vector<ValueId> inputs = {counts, statistics[BalanceOutput::kScoreSums]};
  const bool global = moe.balance_scope == BalanceTokens::kGlobalBatch;
  if (global) inputs.push_back(build_earlier_counts(builder, counts));
  builder.layer.ports.set(Port::kBalanceLoss,
                          program.add1(make_balance_loss({.total_tokens = builder.shape.num_tokens,
                                                          .group_size = moe.balance_group_size,
                                                          .has_prior_counts = global}),
                                       inputs, "spread_balance_loss"));
}

/// What the router multiplies tokens with, and adds.
struct RouterWeights {
  ValueId weight = -1;
  ValueId bias = -1;  ///< -1: none
};

RouterWeights add_router_weights(LayerBuilder& builder) {
  const MoeConfig& moe = builder.config.moe;
  WeightPlacement placement = builder.whole({moe.router_outputs(), builder.config.hidden_size});
  placement.matrix_rows = {moe.router_outputs()};
  RouterWeights weights{builder.f32_weight("moe.router.weight", std::move(placement))};
  if (moe.router_bias)
    weights.bias = builder.f32_weight("moe.router.bias", builder.whole({moe.router_outputs()}));
  return weights;
}

/// The choice of own tokens by Sinkhorn's iteration over all tokens of the micro-batch, of which
/// every rank that shares it has the logits. They are computed once more behind it, with the
/// probabilities of the choice.
ValueId build_sinkhorn(LayerBuilder& builder, ValueId tokens, const RouterWeights& weights) {
  Program& program = builder.program();
  RouterSpec spec = router_spec(builder.config.moe, builder.groups, true, false);
  std::vector<ValueId> inputs = {tokens, weights.weight};
  if (spec.logit_bias) inputs.push_back(weights.bias);
  ValueId logits =
      program.add(make_router(spec), inputs,
                  {"sinkhorn_probs", "sinkhorn_idx", "sinkhorn_logits", "sinkhorn_counts",
                   "sinkhorn_balance", "sinkhorn_z", "sinkhorn_means"})[RouterOutput::kLogits];
  const int64_t own = program.type(logits).shape[0];
  const CommunicatorPtr& micro_batch = builder.groups.micro_batch;
  IndexRange range = {0, own};
  if (builder.groups.token_ranks() > 1) {
    logits = program.add1(make_all_gather(micro_batch), {logits}, "sinkhorn_logits_of_all");
    range.begin = micro_batch->rank() * own;
  }
  return program.add1(make_sinkhorn({.top_k = spec.top_k, .tokens = range}),
                      {logits, builder.port(Port::kNoise)}, "evened_idx");
}

/// The experts that the layer's table gives the tokens.
ValueId build_hash_experts(LayerBuilder& builder) {
  const MoeConfig& moe = builder.config.moe;
  const ValueId table = builder.constant(std::string(kHashTable),
                                         builder.whole({builder.config.vocab_size, moe.top_k}));
  return builder.program().add1(make_hash_experts(moe.num_experts),
                                {builder.port(Port::kOwnTokens), table}, "hash_idx");
}

/// The choices that a router is given; -1 where it makes its own.
ValueId build_given_choices(LayerBuilder& builder, ValueId tokens, const RouterWeights& weights) {
  if (builder.kind.hash) return build_hash_experts(builder);
  if (evens_out(builder.config.moe, builder.shape)) return build_sinkhorn(builder, tokens, weights);
  return builder.shape.replays_routing ? builder.port(Port::kReplayedExperts) : ValueId();
}

/// The experts of each token that make up its share of the scores (TopP).
RoutedTokens cut_choices(LayerBuilder& builder, const RoutedTokens& all) {
  const MoeConfig& moe = builder.config.moe;
  if (moe.top_p >= 1) return all;
  const auto kept = builder.program().add(make_top_p({.num_experts = moe.router_outputs(),
                                                      .share = moe.top_p,
                                                      .normalize = moe.normalize_top_k,
                                                      .scaling_factor = moe.score_scale}),
                                          {all.probs_TK, all.expert_idx_TK},
                                          {"kept_probs", "kept_idx", "kept_counts"});
  builder.layer.ports.set(Port::kCounts, kept[TopP::kCounts]);
  return {kept[TopP::kKeptProbs], kept[TopP::kKeptIdx]};
}

/// The probabilities that SparseMixer gives the router's choices, or those that it draws instead.
RoutedTokens mix_choices(LayerBuilder& builder, ValueId logits, const RoutedTokens& chosen) {
  const MoeConfig& moe = builder.config.moe;
  if (moe.sparse_mixer == 0) return chosen;
  Program& program = builder.program();
  const SparseMixerSpec spec{.jitter = moe.sparse_mixer,
                             .samples = draws_experts(moe, builder.shape)};
  std::vector<ValueId> inputs = {logits, chosen.expert_idx_TK};
  if (!spec.samples)
    return {program.add1(make_sparse_mixer(spec), inputs, "mixed_probs"), chosen.expert_idx_TK};
  inputs.push_back(builder.port(Port::kTokenNumbers));
  inputs.push_back(builder.port(Port::kNoise));
  const auto drawn =
      program.add(make_sparse_mixer(spec), inputs, {"mixed_probs", "drawn_idx", "drawn_counts"});
  builder.layer.ports.set(Port::kCounts, drawn[SparseMixer::kCounts]);
  return {drawn[SparseMixer::kProbs], drawn[SparseMixer::kDrawnIdx]};
}

/// Probabilities times the factors of their experts.
ValueId scale_by_expert(LayerBuilder& builder, const RoutedTokens& routing) {
  const ValueId scale =
      builder.f32_weight("moe.expert_scale", builder.whole({builder.config.moe.router_outputs()}));
  return builder.program().add1(make_expert_scale(),
                                {routing.probs_TK, routing.expert_idx_TK, scale}, "scaled_probs");
}

}  // namespace

ValueId jitter_tokens(LayerBuilder& builder, ValueId normed) {
  if (!jitters(builder.config.moe, builder.shape)) return normed;
  return builder.program().add1(
      make_jitter(), {normed, builder.port(Port::kTokenNumbers), builder.port(Port::kNoise)},
      "router_in");
}

RoutedTokens build_router(LayerBuilder& builder, ValueId tokens) {
  const MoeConfig& moe = builder.config.moe;
  PortMap& ports = builder.layer.ports;
  Program& program = builder.program();
  const bool balanced = !builder.kind.hash;
  const bool spread = balanced && spreads_balance(builder.config, builder.groups);
  const RouterWeights weights = add_router_weights(builder);
  const ValueId given = build_given_choices(builder, tokens, weights);
  RouterSpec spec = router_spec(moe, builder.groups, spread, given.is_set());
  if (!balanced) spec.balance_scope = BalanceScope::kMicroBatch;  // nobody reads it
  std::vector<ValueId> inputs = {tokens, weights.weight};
  if (moe.router_bias) inputs.push_back(weights.bias);
  if (moe.has_expert_bias()) inputs.push_back(builder.port(Port::kExpertBias));
  if (spec.balance_scope == BalanceScope::kSequence)
    inputs.push_back(builder.port(Port::kCuSeqlens));
  if (spec.replay) inputs.push_back(given);
  if (spec.padding) inputs.push_back(builder.port(Port::kSegments));
  const auto routed = program.add(
      make_router(spec), inputs,
      {"probs", "expert_idx", "router_logits", "counts", "balance_loss", "z_loss", "score_means"});
  ports.set(Port::kCounts, routed[RouterOutput::kCounts]);
  ports.set(Port::kZLoss, routed[RouterOutput::kZLoss]);
  if (balanced) {
    ports.set(Port::kBalanceLoss, routed[RouterOutput::kBalanceLoss]);
    ports.set(Port::kScoreMeans, routed[RouterOutput::kScoreMeans]);
  }
  if (builder.shape.tells_routing)
    ports.set(Port::kChosenExperts, routed[RouterOutput::kExpertIdx]);
  RoutedTokens routing =
      cut_choices(builder, {routed[RouterOutput::kProbs], routed[RouterOutput::kExpertIdx]});
  routing = mix_choices(builder, routed[RouterOutput::kLogits], routing);
  if (moe.expert_scale) routing.probs_TK = scale_by_expert(builder, routing);
  if (spread) build_spread_balance(builder, routed[RouterOutput::kLogits], routing.expert_idx_TK);
  return routing;
}

ValueId take_zero_experts(LayerBuilder& builder, ValueId tokens, RoutedTokens& routing) {
  const MoeConfig& moe = builder.config.moe;
  if (moe.zero_experts == 0) return ValueId();
  const auto result = builder.program().add(
      make_zero_experts({.num_experts = moe.num_experts, .zero_experts = moe.zero_experts}),
      {tokens, routing.probs_TK, routing.expert_idx_TK}, {"zero_out", "routed_idx"});
  routing.expert_idx_TK = result[ZeroExperts::kRoutedIdx];
  return result[ZeroExperts::kY];
}

}  // namespace tessera
