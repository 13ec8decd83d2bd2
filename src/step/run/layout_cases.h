#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "model/run/model_testing.h"
#include "parallel/options.h"

namespace tessera::testing {

/// A model on a layout.
struct LayoutCase {
  std::string name;
  int64_t num_ranks = 1;
  void (*spread)(ParallelSpec&) = [](ParallelSpec&) {};
  void (*change)(ModelConfig&) = [](ModelConfig&) {};
  bool recompute = false;
  GatherFusion gathers = GatherFusion::kAuto;
  bool fuse_activations = false;
  std::vector<std::string> offload = {};
};
inline void PrintTo(const LayoutCase& c, std::ostream* out) {
  *out << c.name;
}

/// Layouts that have every kind of communication between them.
inline std::vector<LayoutCase> model_layouts() {
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
      {"few_key_heads", 4, [](P& p) { p.layout.tp = 4; }},
      {"norms_of_all_heads", 2, [](P& p) { p.layout.tp = 2; },
       [](M& m) { m.qk_norm = QkNorm::kAll; }},
      {"latent_attention", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
       },
       [](M& m) {
         m.attention = AttentionKind::kLatent;
         m.num_kv_heads = 0;
         m.latent = {
             .query_rank = 12, .kv_rank = 10, .nope_size = 6, .rope_size = 4, .value_size = 5};
       }},
      {"chosen_keys", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
         p.layout.ep = 2;
       },
       [](M& m) {
         m.attention = AttentionKind::kLatent;
         m.num_kv_heads = 0;
         m.latent = {
             .query_rank = 12, .kv_rank = 10, .nope_size = 6, .rope_size = 4, .value_size = 5};
         m.index = {.top_k = 3, .num_heads = 9, .head_size = 6};
         m.mtp_layers = 1;
       }},
      {"compressed_attention_of_a_ring", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
       },
       [](M& m) {
         m.attention = AttentionKind::kCompressed;
         m.num_kv_heads = 0;
         m.window = 4;
         m.attention_sinks = true;
         m.compressed = {.query_rank = 7, .rope_size = 2, .output_groups = 2, .output_rank = 5};
       }},
      {"compressed_attention_of_exchanged_heads", 2,
       [](P& p) {
         p.layout.tp = 2;
         p.attention = AttentionParallel::kUlysses;
       },
       [](M& m) {
         m.attention = AttentionKind::kCompressed;
         m.num_kv_heads = 0;
         m.compressed = {.query_rank = 7, .rope_size = 2, .output_groups = 4, .output_rank = 5};
       }},
      {"compressed_tokens", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
         p.layout.ep = 2;
       },
       [](M& m) {
         m.attention = AttentionKind::kCompressed;
         m.num_kv_heads = 0;
         m.window = 3;
         m.attention_sinks = true;
         m.compressed = {.query_rank = 7,
                         .rope_size = 2,
                         .output_groups = 2,
                         .output_rank = 5,
                         .sparse_rate = 2,
                         .heavy_rate = 3,
                         .sparse_layers = {1},
                         .heavy_layers = {0}};
         m.index = {.top_k = 2, .num_heads = 9, .head_size = 6};
       },
       true},
      {"gated_delta", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         // Small queries and keys, made unit vectors, would turn far: long ones are rarely small.
         m.init_deviation = 0.7;
         m.delta_layers = {0};
         m.delta = {.num_key_heads = 2, .num_value_heads = 4, .key_size = 24, .value_size = 5};
       }},
      {"kimi_delta", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         m.init_deviation = 0.7;
         m.delta_layers = {0};
         m.delta = {.kind = DeltaKind::kKimi,
                    .num_key_heads = 2,
                    .num_value_heads = 2,
                    .key_size = 24,
                    .value_size = 5};
         m.attention = AttentionKind::kLatent;
         m.num_kv_heads = 0;
         m.latent = {
             .query_rank = 0, .kv_rank = 10, .nope_size = 6, .rope_size = 4, .value_size = 5};
         m.rope.fraction = 0;
       }},
      {"mamba", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         m.mamba_layers = {0};
         m.mamba = {.num_heads = 4, .head_size = 6, .num_groups = 2, .state_size = 5};
       }},
      {"gated_convolution", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         m.init_deviation = 0.5;
         m.conv_layers = {0};
         m.conv = {.size = 3, .bias = true};
       }},
      {"windows_of_their_own_rotation", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
       },
       [](M& m) {
         m.window = 5;
         m.window_layers = {1};
         m.own_window_rope = true;
         m.rope.fraction = 0;
         m.window_rope = {.base = 100, .fraction = 0.5};
       }},
      {"chunks_and_temperatures", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         m.window = 5;
         m.window_kind = WindowKind::kChunked;
         m.window_layers = {1};
         m.own_window_rope = true;
         m.rope.fraction = 0;
         m.window_rope = {.base = 100, .interleaved = true};
         m.qk_norm = QkNorm::kL2;
         m.norm_after_rotation = true;
         m.temperature_scale = 0.5;
         m.temperature_length = 3;
       }},
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
       [](M& m) { m.residual_streams = 3; }},
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

}  // namespace tessera::testing
