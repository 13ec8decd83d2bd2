#pragma once

#include "step/run/mixer_layouts.h"

namespace tessera::testing {

/// Layouts that have every kind of communication between them.
inline std::vector<LayoutCase> communication_layouts() {
  using P = ParallelSpec;
  using M = ModelConfig;
  const auto whole = [](M&) {};
  return {
      {"tp", 2, [](P& p) { p.layout.tp = 2; }},
      {"ulysses", 2,
       [](P& p) {
         p.layout.tp = 2;
         p.attention = AttentionParallel::kUlysses;
       }},
      {"ep_all_to_all", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
       }},
      {"ep_all_gather", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllGather;
       }},
      {"ep_deduplicated", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kDeduplicated;
       }},
      {"ep_hierarchical", 4,
       [](P& p) {
         p.layout.ep = 4;
         p.dispatcher = DispatcherRequest::kHierarchical;
         p.dispatch_inner = 2;
       }},
      {"ep_etp_deduplicated_bounded", 4,
       [](P& p) {
         p.layout.ep = 2;
         p.layout.etp = 2;
         p.dispatcher = DispatcherRequest::kDeduplicated;
         p.exchange = ExchangeSizes::kBounded;
       }},
      {"ep_bounded", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
         p.exchange = ExchangeSizes::kBounded;
       }},
      {"ep_clones", 4,
       [](P& p) {
         p.layout.ep = 4;
         p.clone_experts = 2;
       },
       [](M& m) { m.moe.mlp_bias = true; }},
      {"ep_clones_deduplicated_recompute", 4,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kDeduplicated;
         p.clone_experts = 1;
       },
       [](M& m) { m.moe.memory_efficient = false; }, true},
      {"ep_clones_split_weights", 4,
       [](P& p) {
         p.layout.pp = 2;
         p.layout.ep = 2;
         p.clone_experts = 1;
         p.split_weights = true;
       }},
      {"ep_recompute", 2, [](P& p) { p.layout.ep = 2; }, whole, true},
      {"etp", 2,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.etp = 2;
       }},
      {"ep_etp", 4,
       [](P& p) {
         p.layout.ep = 2;
         p.layout.etp = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
       }},
      {"ep_etp_bounded", 4,
       [](P& p) {
         p.layout.ep = 2;
         p.layout.etp = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
         p.exchange = ExchangeSizes::kBounded;
       }},
      {"ring", 2, [](P& p) { p.layout.cp = 2; }},
      {"ring_window", 2, [](P& p) { p.layout.cp = 2; },
       [](M& m) {
         m.window = 5;
         m.window_layers = {0};
       }},
      {"context_all_to_all", 2,
       [](P& p) {
         p.layout.cp = 2;
         p.context = ContextExchange::kAllToAll;
       }},
      {"hierarchical", 4,
       [](P& p) {
         p.layout.cp = 4;
         p.context = ContextExchange::kHierarchical;
         p.context_inner = 2;
       }},
      {"pp", 2, [](P& p) { p.layout.pp = 2; }},
      {"pp_predicting", 2, [](P& p) { p.layout.pp = 2; },
       [](M& m) {
         m.mtp_layers = 1;
         m.tie_embeddings = true;
       }},
      {"pp_interleaved", 2,
       [](P& p) {
         p.layout.pp = 2;
         p.chunks_per_stage = 2;
         p.schedule = PipelineKind::kInterleaved;
       },
       [](M& m) { m.num_layers = 4; }},
      {"pp_split_weights", 2,
       [](P& p) {
         p.layout.pp = 2;
         p.split_weights = true;
       }},
      {"pp_model_balance", 2, [](P& p) { p.layout.pp = 2; },
       [](M& m) { m.moe.balance_scope = BalanceTokens::kModel; }},
      {"dp_global_balance", 2, [](P&) {},
       [](M& m) { m.moe.balance_scope = BalanceTokens::kGlobalBatch; }},
  };
}

/// Layouts of each kind of experts and their routing, and of adapters.
inline std::vector<LayoutCase> expert_layouts() {
  using P = ParallelSpec;
  using M = ModelConfig;
  return {
      {"probabilities_on_input", 4,
       [](P& p) {
         p.layout.ep = 2;
         p.layout.etp = 2;
         p.layout.tp = 2;
       },
       [](M& m) {
         m.moe.probs_on_input = true;
         m.moe.score = ScoreFunction::kSigmoid;
         m.moe.normalize_top_k = false;
         m.moe.shared_inner_size = 8;
       }},
      {"hash_layers", 8,
       [](P& p) {
         p.layout.ep = 2;
         p.layout.tp = 2;
         p.layout.pp = 2;
         p.layout.cp = 2;
       },
       [](M& m) {
         m.moe.hash_layers = {0, 1};
         m.moe.score = ScoreFunction::kSqrtSoftplus;
         m.moe.balance_scope = BalanceTokens::kModel;
       }},
      {"residual_streams", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
         p.layout.cp = 2;
         p.layout.ep = 2;
       },
       [](M& m) {
         m.residual_streams = 3;
         m.mtp_layers = 1;
       }},
      {"windows_of_their_own_heads", 4, [](P& p) { p.layout.tp = 4; },
       [](M& m) {
         m.window = 5;
         m.window_layers = {1};
         m.window_heads = 8;
         m.window_kv_heads = 1;
         m.attention_gate = true;
         m.gate_function = AttentionGate::kSoftplusOfHeads;
         m.window_sinks = true;
         m.value_size = 5;
         m.value_multiplier = 0.7;
       }},
      {"norms_behind_and_heads_of_windows", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         m.window = 5;
         m.window_layers = {0};
         m.window_head_size = 6;
         m.window_kv_heads = 4;
         m.num_kv_heads = 1;
         m.qk_norm = QkNorm::kHead;
         m.keys_as_values = m.value_norm = m.post_norms = m.layer_scalars = true;
         m.rope.proportional = true;
         m.rope.fraction = 0.5;
         m.logit_softcap = 3;
       }},
      {"experts_of_separate_norms", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.ep = 4;
         p.dispatcher = DispatcherRequest::kAllToAll;
       },
       [](M& m) {
         m.moe.shared_inner_size = 16;
         m.moe.separate_norms = m.moe.router_norm = m.moe.expert_scale = true;
         m.post_norms = m.layer_scalars = true;
         m.logit_softcap = 3;
       }},
      {"latent_experts", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
       },
       [](M& m) { m.moe.latent_size = 7; }},
      {"block_sparse", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
       },
       [](M& m) {
         m.moe.experts = ExpertPath::kBlockSparse;
         m.moe.block_size = 8;
         m.moe.inner_size = 16;
       }},
      {"jitter", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.ep = 2;
       },
       [](M& m) {
         m.moe.router_jitter = 0.3;
         m.moe.jitter_experts = true;
         m.mtp_layers = 1;
       }},
      {"sparse_mixer", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.ep = 2;
       },
       [](M& m) {
         m.moe.sparse_mixer = 0.2;
         m.moe.normalize_top_k = false;
         m.norm = NormKind::kLayer;
         m.head_bias = true;
         m.qkv_bias = m.output_bias = true;
       }},
      {"drawn_experts", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.pp = 2;
         p.layout.ep = 4;
       },
       [](M& m) {
         m.moe.sparse_mixer = 0.3;
         m.moe.draw_experts = true;
         m.moe.normalize_top_k = false;
         m.moe.balance_scope = BalanceTokens::kModel;
         m.norm = NormKind::kLayer;
         m.mtp_layers = 1;
       }},
      {"sinkhorn", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         m.moe.routing = Routing::kSinkhorn;
         m.moe.normalize_top_k = false;
       }},
      {"expert_choice", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.ep = 4;
       },
       [](M& m) { m.moe.routing = Routing::kExpertChoice; }},
      {"expert_choice_deduplicated", 4,
       [](P& p) {
         p.layout.cp = 2;
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kDeduplicated;
       },
       [](M& m) {
         m.moe.routing = Routing::kExpertChoice;
         m.moe.top_k = 1;
       }},
      {"top_p", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
       },
       [](M& m) {
         m.moe.top_p = 0.5;
         m.moe.top_k = 3;
       }},
      {"top_p_bounded", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.exchange = ExchangeSizes::kBounded;
         p.dispatcher = DispatcherRequest::kAllToAll;
       },
       [](M& m) {
         m.moe.top_p = 0.5;
         m.moe.balance_scope = BalanceTokens::kGlobalBatch;
       }},
      {"zero_experts", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
         p.layout.ep = 4;
       },
       [](M& m) {
         m.moe.zero_experts = 3;
         m.moe.latent_size = 7;
         m.moe.balance_scope = BalanceTokens::kModel;
       }},
      {"zero_experts_and_top_p", 4,
       [](P& p) {
         p.layout.cp = 2;
         p.layout.ep = 4;
         p.dispatcher = DispatcherRequest::kAllGather;
       },
       [](M& m) {
         m.moe.zero_experts = 2;
         m.moe.top_k = 3;
         m.moe.top_p = 0.7;
         m.moe.memory_efficient = false;
         m.moe.balance_scope = BalanceTokens::kSequence;
       }},
      {"shared_expert", 2, [](P& p) { p.layout.tp = 2; },
       [](M& m) {
         m.moe.shared_inner_size = 6;
         m.moe.shared_gate = true;
       }},
      {"sequence_balance", 2, [](P& p) { p.layout.cp = 2; },
       [](M& m) { m.moe.balance_scope = BalanceTokens::kSequence; }},
      {"capacity", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
       },
       [](M& m) {
         m.moe.capacity_factor = 0.8;
         m.moe.drop_policy = DropPolicy::kPosition;
         m.moe.pad_to_capacity = true;
       }},
      {"capacity_bounded", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
         p.exchange = ExchangeSizes::kBounded;
       },
       [](M& m) {
         m.moe.capacity_factor = 0.8;
         m.moe.drop_policy = DropPolicy::kPosition;
       }},
      {"folded", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.pp = 2;
         p.layout.ep = 4;
       }},
      {"adapters", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.pp = 2;
         p.layout.ep = 4;
       },
       [](M& m) {
         m.moe.shared_inner_size = 6;
         m.tie_embeddings = true;
         m.lora = {.rank = 3, .alpha = 5};
       }},
      {"adapters_of_whole_experts", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
       },
       [](M& m) { m.lora = {.rank = 3, .alpha = 5}; }},
      {"adapters_few_key_heads", 4, [](P& p) { p.layout.tp = 4; },
       [](M& m) {
         m.output_bias = true;
         m.moe.num_experts = 0;
         m.lora = {.rank = 3, .alpha = 5};
       }},
      {"adapters_of_latent_attention", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
         p.layout.ep = 2;
         p.split_weights = true;
       },
       [](M& m) {
         m.attention = AttentionKind::kLatent;
         m.num_kv_heads = 0;
         m.latent = {
             .query_rank = 12, .kv_rank = 10, .nope_size = 6, .rope_size = 4, .value_size = 5};
         m.moe.latent_size = 7;
         m.lora = {.rank = 2, .alpha = 3, .targets = {"attn", "moe.latent_down", "moe.experts"}};
       }},
  };
}

inline std::vector<LayoutCase> model_layouts() {
  std::vector<LayoutCase> all = communication_layouts();
  for (const auto& more : {mixer_layouts(), shared_sequence_layouts(), expert_layouts()})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace tessera::testing
