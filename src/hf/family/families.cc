#include <vector>

#include "hf/family/family_tables.h"

namespace tessera {
namespace {

constexpr Family kLlama = {
    .model_type = "llama",
    .architecture = "LlamaForCausalLM",
    .defaults = R"({"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": null,
        "head_dim": null, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "attention_bias": false, "mlp_bias": false})",
    .output_bias = true,
};

constexpr Family kMistral = {
    .model_type = "mistral",
    .architecture = "MistralForCausalLM",
    .defaults = R"({"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": null, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "sliding_window": 4096})",
    .window = WindowRule::kSize,
};

constexpr Family kQwen2 = {
    .model_type = "qwen2",
    .architecture = "Qwen2ForCausalLM",
    .defaults = R"({"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": null, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "use_sliding_window": false, "sliding_window": 4096, "max_window_layers": 28,
        "layer_types": null})",
    .qkv_bias = true,
    .window = WindowRule::kLaterLayers,
};

constexpr Family kQwen3 = {
    .model_type = "qwen3",
    .architecture = "Qwen3ForCausalLM",
    .defaults = R"({"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "attention_bias": false, "use_sliding_window": false, "sliding_window": 4096,
        "max_window_layers": 28, "layer_types": null})",
    .qk_norm = QkNorm::kHead,
    .output_bias = true,
    .window = WindowRule::kLaterLayers,
};

constexpr Family kMixtral = {
    .model_type = "mixtral",
    .architecture = "MixtralForCausalLM",
    .defaults = R"({"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": null, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "sliding_window": null, "num_local_experts": 8,
        "num_experts_per_tok": 2, "output_router_logits": false, "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0})",
    .window = WindowRule::kSize,
    .moe_name = "block_sparse_moe",
    .expert_names = {"w1", "w3", "w2"},
};

constexpr Family kQwen3Moe = {
    .model_type = "qwen3_moe",
    .architecture = "Qwen3MoeForCausalLM",
    .defaults = R"({"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": null, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "attention_bias": false, "use_sliding_window": false, "sliding_window": 4096,
        "max_window_layers": null, "decoder_sparse_step": 1, "mlp_only_layers": null,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": false, "output_router_logits": false, "router_aux_loss_coef": 0.001})",
    .qk_norm = QkNorm::kHead,
    .output_bias = true,
    .window = WindowRule::kSwitched,
};

constexpr Family kOlmoe = {
    .model_type = "olmoe",
    .architecture = "OlmoeForCausalLM",
    .defaults =
        R"({"pad_token_id": 1, "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": null,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "attention_bias": false,
        "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": false,
        "output_router_logits": false, "router_aux_loss_coef": 0.01})",
    .fixed = R"({"clip_qkv": null})",
    .qk_norm = QkNorm::kAll,
    .output_bias = true,
};

constexpr Family kQwen2Moe = {
    .model_type = "qwen2_moe",
    .architecture = "Qwen2MoeForCausalLM",
    .defaults = R"({"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": null, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "qkv_bias": true, "use_sliding_window": false, "sliding_window": 4096,
        "max_window_layers": 28, "layer_types": null, "decoder_sparse_step": 1,
        "mlp_only_layers": null, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4,
        "norm_topk_prob": false, "output_router_logits": false, "router_aux_loss_coef": 0.001})",
    .window = WindowRule::kEvenLayers,
    .shared_name = "shared_expert",
};

constexpr Family kDeepseekV2 = {
    .model_type = "deepseek_v2",
    .architecture = "DeepseekV2ForCausalLM",
    .defaults = R"({"vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": null,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "attention_bias": false,
        "mlp_bias": false, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": null, "topk_method": "greedy", "n_group": null,
        "topk_group": null, "norm_topk_prob": false, "routed_scaling_factor": 1.0})",
    .fixed = R"({"scoring_func": "softmax", "moe_layer_freq": 1})",
    .attention = AttentionKind::kLatent,
    .interleaved = true,
    .output_bias = true,
    .router = RouterRule::kGroupMax,
};

constexpr Family kDeepseekV3 = {
    .model_type = "deepseek_v3",
    .architecture = "DeepseekV3ForCausalLM",
    .defaults = R"({"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "attention_bias": false,
        "rope_interleave": true, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
        "norm_topk_prob": true, "routed_scaling_factor": 2.5})",
    .fixed = R"({"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1})",
    .attention = AttentionKind::kLatent,
    .interleaved = true,
    .output_bias = true,
    .router = RouterRule::kBiasedSigmoid,
    .predictions = PredictionNames::kBehindLayers,
};

constexpr Family kGlm4Moe = {
    .model_type = "glm4_moe",
    .architecture = "Glm4MoeForCausalLM",
    .defaults = R"({"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": null, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5, "attention_bias": false, "use_qk_norm": false,
        "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_routed_experts": 128,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": true, "routed_scaling_factor": 1.0})",
    .router = RouterRule::kBiasedSigmoid,
    .predictions = PredictionNames::kBehindLayers,
};

constexpr Family kGptOss = {
    .model_type = "gpt_oss",
    .architecture = "GptOssForCausalLM",
    .defaults = R"({"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "attention_bias": true, "sliding_window": 128, "layer_types": null, "rope_theta": 150000.0,
        "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096},
        "num_local_experts": 128, "num_experts_per_tok": 4, "output_router_logits": false,
        "router_aux_loss_coef": 0.001})",
    .fixed = R"({"swiglu_alpha": 1.702, "swiglu_limit": 7.0})",
    .output_bias = true,
    .attention_sinks = true,
    .clamped_swiglu = true,
    .window = WindowRule::kAlternating,
    .expert_tensors = ExpertTensors::kAlternating,
    .router_name = "router",
};

/// DeepSeek-V3's layout under another name, so that its models may be told from DeepSeek's.
constexpr Family make_kimi_k2() {
  Family family = kDeepseekV3;
  family.model_type = "kimi_k2";
  return family;
}

constexpr Family kGlm4MoeLite = {
    .model_type = "glm4_moe_lite",
    .architecture = "Glm4MoeLiteForCausalLM",
    .defaults = R"({"vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
        "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20,
        "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "attention_bias": false,
        "rope_interleave": true, "q_lora_rank": 768, "kv_lora_rank": 512,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "mlp_layer_types": null, "moe_intermediate_size": 1536, "n_routed_experts": 64,
        "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": true, "routed_scaling_factor": 1.8})",
    .fixed = R"({"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        "first_k_dense_replace": 1, "output_router_logits": false})",
    .attention = AttentionKind::kLatent,
    .interleaved = true,
    .output_bias = true,
    .router = RouterRule::kBiasedSigmoid,
    .predictions = PredictionNames::kBehindLayers,
};

/// DeepSeek-V3's layout with an indexer in every layer.
constexpr Family kDeepseekV32 = {
    .model_type = "deepseek_v32",
    .architecture = "DeepseekV32ForCausalLM",
    .defaults = R"({"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "attention_bias": false,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "index_topk": 2048, "index_head_dim": 128,
        "index_n_heads": 64, "layer_types": null, "mlp_layer_types": null,
        "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
        "norm_topk_prob": true, "routed_scaling_factor": 2.5})",
    .fixed = R"({"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        "rope_interleave": true, "indexer_rope_interleave": false, "output_router_logits": false})",
    .attention = AttentionKind::kLatent,
    .interleaved = true,
    .output_bias = true,
    .router = RouterRule::kBiasedSigmoid,
    .predictions = PredictionNames::kBehindLayers,
};

/// The same with an indexer of neighbouring pairs, which some layers may lack in files.
constexpr Family kGlmMoeDsa = {
    .model_type = "glm_moe_dsa",
    .architecture = "GlmMoeDsaForCausalLM",
    .defaults = R"({"vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288,
        "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64,
        "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "attention_bias": false,
        "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "v_head_dim": 256, "index_topk": 2048, "index_head_dim": 128,
        "index_n_heads": 32, "indexer_types": null, "index_topk_freq": 1,
        "index_skip_topk_offset": 2, "index_topk_pattern": null, "layer_types": null,
        "mlp_layer_types": null, "first_k_dense_replace": 3, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.5})",
    .fixed = R"({"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        "rope_interleave": true, "indexer_rope_interleave": true, "output_router_logits": false})",
    .attention = AttentionKind::kLatent,
    .interleaved = true,
    .interleaved_indexer = true,
    .output_bias = true,
    .router = RouterRule::kBiasedSigmoid,
    .predictions = PredictionNames::kBehindLayers,
};

constexpr Family kDots1 = {
    .model_type = "dots1",
    .architecture = "Dots1ForCausalLM",
    .defaults = R"({"vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944,
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": null, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "attention_bias": false, "sliding_window": 4096, "max_window_layers": 62,
        "layer_types": null, "first_k_dense_replace": 0, "moe_intermediate_size": 1408,
        "n_routed_experts": null, "n_shared_experts": null, "num_experts_per_tok": null,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": false, "routed_scaling_factor": 1.0})",
    // Published files name the rule of the choice where DeepSeek's name the scores.
    .fixed = R"({"scoring_func": {"any": ["sigmoid", "noaux_tc"]}, "topk_method": "noaux_tc",
        "moe_layer_freq": 1, "output_router_logits": false})",
    .qk_norm = QkNorm::kHead,
    .output_bias = true,
    .window = WindowRule::kLastLayers,
    .router = RouterRule::kBiasedSigmoid,
};

/// All layers have experts, so the size of dense ones says nothing.
constexpr Family kSolarOpen = {
    .model_type = "solar_open",
    .architecture = "SolarOpenForCausalLM",
    .defaults = R"({"vocab_size": 196608, "hidden_size": 4096, "intermediate_size": 10240,
        "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "attention_bias": false, "moe_intermediate_size": 1280,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 1.0})",
    .fixed = R"({"first_k_dense_replace": 0, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "output_router_logits": false})",
    .router = RouterRule::kBiasedSigmoid,
};

constexpr Family kMinimaxM2 = {
    .model_type = "minimax_m2",
    .architecture = "MiniMaxM2ForCausalLM",
    .defaults = R"({"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
        "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 196608, "rms_norm_eps": 1e-6,
        "rope_theta": 5e6, "partial_rotary_factor": null, "rotary_dim": null,
        "num_local_experts": 256, "num_experts_per_tok": 8, "router_jitter_noise": 0.0})",
    .fixed = R"({"scoring_func": "sigmoid", "use_routing_bias": true, "use_qk_norm": true,
        "qk_norm_type": "per_layer", "shared_intermediate_size": 0,
        "layernorm_full_attention_alpha": 1.0, "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_alpha": 1.0, "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_alpha": 1.0, "layernorm_mlp_beta": 1.0, "output_router_logits": false})",
    .unused = R"(["router_aux_loss_coef", "attn_type_list", "mlp_intermediate_size",
        "shared_moe_mode", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"])",
    .qk_norm = QkNorm::kAll,
    .router = RouterRule::kBiasedSigmoid,
    .moe_name = "block_sparse_moe",
    .correction_name = "e_score_correction_bias",
    .expert_names = {"w1", "w3", "w2"},
};

constexpr Family kErnie45Moe = {
    .model_type = "ernie4_5_moe",
    .architecture = "Ernie4_5_MoeForCausalLM",
    .defaults = R"({"vocab_size": 103424, "pad_token_id": 0, "hidden_size": 2560,
        "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20,
        "num_key_value_heads": 4, "head_dim": null, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "rope_theta": 500000.0,
        "moe_intermediate_size": 1536, "num_experts_per_tok": 6, "num_experts": 64,
        "n_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
        "moe_layer_interval": 1})",
    .fixed = R"({"use_bias": false, "moe_norm_min": 1e-12, "moe_use_aux_free": true,
        "moe_gate_act": "softmax", "output_router_logits": false})",
    .unused = R"(["router_aux_loss_coef", "moe_capacity"])",
    .renamed = R"({"moe_k": "num_experts_per_tok", "moe_num_experts": "num_experts",
        "moe_num_shared_experts": "n_shared_experts"})",
    .interleaved = true,
    .router = RouterRule::kBiasedSoftmax,
    .correction_name = "moe_statics.e_score_correction_bias",
};

constexpr Family kHunyuanV1Moe = {
    .model_type = "hunyuan_v1_moe",
    .architecture = "HunYuanMoEV1ForCausalLM",
    .defaults = R"({"vocab_size": 290943, "pad_token_id": 0, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": null, "head_dim": null, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "attention_bias": false, "num_experts": 1,
        "num_experts_per_tok": 1})",
    .fixed = R"({"use_qk_norm": true, "use_cla": false, "use_mla": false,
        "use_mixed_mlp_moe": true, "use_rotary_pos_emb": true, "norm_type": "rms",
        "moe_layer_num_skipped": 0, "moe_drop_tokens": false, "norm_topk_prob": true,
        "group_limited_greedy": false, "position_embedding_xdrope": false, "xdrope_section": null,
        "kv_lora_rank": null, "q_lora_rank": null, "qk_nope_head_dim": null,
        "qk_rope_head_dim": null, "v_head_dim": null, "output_router_logits": false})",
    // Numbers that tensors' shapes show too, and training's.
    .unused = R"(["eod_token_id", "attention_head_dim", "moe_intermediate_size",
        "num_shared_expert", "cla_share_factor", "capacity_factor",
        "moe_random_routing_dropped_token", "add_classification_head", "class_num", "pool_type", "router_aux_loss_coef"])",
    .renamed = R"({"moe_topk": "num_experts_per_tok"})",
    .qk_norm = QkNorm::kHead,
    .norm_after_rotation = true,
    .output_bias = true,
    .listed_counts = true,
    .base_alpha = true,
    .one_shared = true,
    .router_name = "gate.wg",
    .shared_name = "shared_mlp",
    .norm_names = {"query_layernorm", "key_layernorm"},
};

constexpr Family kHyV3 = {
    .model_type = "hy_v3",
    .architecture = "HYV3ForCausalLM",
    .defaults = R"({"vocab_size": 120832, "hidden_size": 4096, "intermediate_size": 13312,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "initializer_range": 0.006, "rope_theta": 11158840.0, "attention_bias": false,
        "mlp_bias": false, "moe_intermediate_size": 1536, "mlp_layer_types": null,
        "num_experts": 192, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "routed_scaling_factor": 2.826})",
    .fixed = R"({"qk_norm": true, "route_norm": true, "moe_router_enable_expert_bias": true,
        "moe_router_use_sigmoid": true, "first_k_dense_replace": 1,
        "output_router_logits": false})",
    // The first chooses how a sum is rounded in BF16.
    .unused = R"(["enable_moe_fp32_combine", "expert_hidden_dim"])",
    .renamed = R"({"num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor"})",
    .qk_norm = QkNorm::kHead,
    .output_bias = true,
    .router = RouterRule::kBiasedSigmoid,
    .router_name = "router.gate",
    .correction_name = "expert_bias",
    .shared_name = "shared_mlp",
};

constexpr Family kGraniteMoe = {
    .model_type = "granitemoe",
    .architecture = "GraniteMoeForCausalLM",
    .defaults = R"({"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": null,
        "head_dim": null, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "attention_bias": false, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
        "residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_local_experts": 8,
        "num_experts_per_tok": 2, "output_router_logits": false, "router_aux_loss_coef": 0.001})",
    .output_bias = true,
    .expert_tensors = ExpertTensors::kLinears,
    .moe_name = "block_sparse_moe",
    .router_name = "router.layer",
};

constexpr Family kGraniteMoeShared = {
    .model_type = "granitemoeshared",
    .architecture = "GraniteMoeSharedForCausalLM",
    .defaults = R"({"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": null,
        "head_dim": null, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "attention_bias": false, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
        "residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_local_experts": 8,
        "num_experts_per_tok": 2, "output_router_logits": false, "router_aux_loss_coef": 0.001,
        "shared_intermediate_size": 0})",
    .output_bias = true,
    .expert_tensors = ExpertTensors::kLinears,
    .moe_name = "block_sparse_moe",
    .router_name = "router.layer",
    .shared_name = "shared_mlp",
};

constexpr Family kPhimoe = {
    .model_type = "phimoe",
    .architecture = "PhimoeForCausalLM",
    .other_architecture = "PhiMoEForCausalLM",
    .defaults = R"({"vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 6400,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "attention_bias": false, "lm_head_bias": false, "sliding_window": null,
        "num_local_experts": 16, "num_experts_per_tok": 2, "output_router_logits": false,
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.01, "input_jitter_noise": 0.0})",
    .output_bias = true,
    .phimoe = true,
    .window = WindowRule::kSize,
    .moe_name = "block_sparse_moe",
    .expert_names = {"w1", "w3", "w2"},
};

constexpr std::array kFamilies = {
    kLlama,        kMistral,     kQwen2,         kQwen3,       kMixtral,
    kQwen3Moe,     kOlmoe,       kQwen2Moe,      kDeepseekV2,  kDeepseekV3,
    kGlm4Moe,      kGptOss,      kDots1,         kMinimaxM2,   kErnie45Moe,
    kHunyuanV1Moe, kGraniteMoe,  kHyV3,          kSolarOpen,   kGraniteMoeShared,
    kPhimoe,       kGlm4MoeLite, make_kimi_k2(), kDeepseekV32, kGlmMoeDsa};

}  // namespace

std::span<const Family> alike_families() {
  return kFamilies;
}

std::span<const Family> families() {
  static const std::vector<Family> all = [] {
    std::vector<Family> joined;
    for (const std::span<const Family> table :
         {alike_families(), mixed_families(), compressed_families()})
      joined.insert(joined.end(), table.begin(), table.end());
    return joined;
  }();
  return all;
}

}  // namespace tessera
