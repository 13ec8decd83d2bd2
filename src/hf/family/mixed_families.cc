#include "hf/family/family_tables.h"

namespace tessera {
namespace {

constexpr Family kGraniteMoeHybrid = {
    .model_type = "granitemoehybrid",
    .architecture = "GraniteMoeHybridForCausalLM",
    .defaults = R"({"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": null,
        "head_dim": null, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "attention_bias": false, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
        "residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_local_experts": 8,
        "num_experts_per_tok": 2, "output_router_logits": false, "router_aux_loss_coef": 0.001,
        "shared_intermediate_size": 1024, "position_embedding_type": null, "layer_types": null,
        "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto",
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": true, "mamba_proj_bias": false,
        "time_step_limit": null})",
    .fixed = R"({"normalization_function": "rmsnorm"})",
    .unused = R"(["mamba_chunk_size", "init_method"])",
    .output_bias = true,
    .mamba = MambaRule::kGranite,
    .expert_tensors = ExpertTensors::kLinears,
    .moe_name = "block_sparse_moe",
    .router_name = "router.layer",
    .shared_name = "shared_mlp",
};

constexpr Family kNemotronH = {
    .model_type = "nemotron_h",
    .architecture = "NemotronHForCausalLM",
    .defaults = R"({"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504,
        "num_hidden_layers": null, "layers_block_type": null, "hybrid_override_pattern": null,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2",
        "mlp_bias": false, "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
        "n_groups": 8, "conv_kernel": 4, "use_conv_bias": true, "use_bias": false,
        "time_step_min": 0.001, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": null, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": true, "pad_token_id": 0})",
    .fixed = R"({"mamba_hidden_act": "silu", "output_router_logits": false,
        "tie_word_embeddings": false})",
    // Limits and floors of steps serve to draw weights; of predicting further tokens and of how
    // it is computed the rest.
    .unused = R"(["chunk_size", "expand", "mamba_proj_bias", "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
        "n_shared_experts", "num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32",
        "time_step_floor", "time_step_limit", "time_step_max", "use_mamba_kernels",
        "partial_rotary_factor"])",
    .renamed = R"({"layer_norm_epsilon": "rms_norm_eps", "mlp_hidden_act": "hidden_act"})",
    .plain_mlps = true,
    .mamba = MambaRule::kNemotron,
    .router = RouterRule::kBiasedSigmoid,
    .moe_name = "mixer",
    .final_norm = "backbone.norm_f",
};

constexpr Family kQwen3Next = {
    .model_type = "qwen3_next",
    .architecture = "Qwen3NextForCausalLM",
    .defaults = R"({"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.25, "attention_bias": false, "layer_types": null,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "decoder_sparse_step": 1, "mlp_only_layers": null, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
        "norm_topk_prob": true, "output_router_logits": false, "router_aux_loss_coef": 0.001})",
    .fixed = R"({"use_sliding_window": false})",
    .qk_norm = QkNorm::kHead,
    .output_bias = true,
    .gated_delta = true,
    .shared_name = "shared_expert",
    .predictions = PredictionNames::kApart,
};

/// Of multi-token prediction, which transformers leaves out, and of other programs' states.
constexpr std::string_view kQwen35Unused =
    R"(["mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"])";

constexpr Family kQwen35 = {
    .model_type = "qwen3_5_text",
    .architecture = "Qwen3_5ForCausalLM",
    .whole = {"qwen3_5", "Qwen3_5ForConditionalGeneration"},
    .defaults = R"({"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.25, "attention_bias": false, "layer_types": null,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32})",
    .fixed = R"({"attn_output_gate": true, "mlp_only_layers": []})",
    .unused = kQwen35Unused,
    .qk_norm = QkNorm::kHead,
    .output_bias = true,
    .gated_delta = true,
    .apart_delta = true,
    .predictions = PredictionNames::kApart,
};

constexpr Family kQwen35Moe = {
    .model_type = "qwen3_5_moe_text",
    .architecture = "Qwen3_5MoeForCausalLM",
    .whole = {"qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"},
    .defaults = R"({"vocab_size": 248320, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.25, "attention_bias": false, "layer_types": null,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256,
        "num_experts_per_tok": 8, "output_router_logits": false, "router_aux_loss_coef": 0.001})",
    .fixed = R"({"attn_output_gate": true, "mlp_only_layers": [], "decoder_sparse_step": 1,
        "norm_topk_prob": true})",
    .unused = kQwen35Unused,
    .qk_norm = QkNorm::kHead,
    .output_bias = true,
    .gated_delta = true,
    .apart_delta = true,
    .shared_name = "shared_expert",
    .predictions = PredictionNames::kApart,
};

constexpr Family kExaoneMoe = {
    .model_type = "exaone_moe",
    .architecture = "ExaoneMoeForCausalLM",
    .defaults = R"({"vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": null, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "pad_token_id": 0, "sliding_window": 4096, "sliding_window_pattern": 4,
        "layer_types": null, "mlp_layer_types": null, "first_k_dense_replace": 1,
        "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
        "routed_scaling_factor": 2.5})",
    .fixed = R"({"scoring_func": "sigmoid", "topk_method": "noaux_tc"})",
    .renamed = R"({"num_shared_experts": "n_shared_experts"})",
    .qk_norm = QkNorm::kHead,
    .window = WindowRule::kAllButEvery,
    .rope = RopeRule::kWindowsAlone,
    .router = RouterRule::kBiasedSigmoid,
    .correction_name = "e_score_correction_bias",
};

constexpr Family kMellum = {
    .model_type = "mellum",
    .architecture = "MellumForCausalLM",
    .defaults = R"({"vocab_size": 98304, "hidden_size": 2304, "intermediate_size": 7168,
        "num_hidden_layers": 28, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "attention_bias": false, "sliding_window": 1024, "layer_types": null,
        "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "mlp_layer_types": null, "moe_intermediate_size": 896, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": true, "output_router_logits": false,
        "router_aux_loss_coef": 0.001})",
    .qk_norm = QkNorm::kHead,
    .output_bias = true,
    .window = WindowRule::kListed,
    .rope = RopeRule::kByLayerType,
    .first_dense = 0,
};

constexpr Family kLfm2Moe = {
    .model_type = "lfm2_moe",
    .architecture = "Lfm2MoeForCausalLM",
    .defaults = R"({"vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": null, "max_position_embeddings": 128000, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "pad_token_id": 0, "tie_word_embeddings": true, "tie_embedding": null,
        "layer_types": null, "conv_L_cache": 3, "conv_bias": false, "first_k_dense_replace": 2,
        "moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4,
        "use_expert_bias": true, "routed_scaling_factor": 1.0, "norm_topk_prob": true})",
    .renamed = R"({"norm_eps": "rms_norm_eps", "num_dense_layers": "first_k_dense_replace"})",
    .qk_norm = QkNorm::kHead,
    .gated_conv = true,
    .router = RouterRule::kBiasedSigmoid,
    .moe_name = "feed_forward",
    .correction_name = "expert_bias",
    .expert_names = {"w1", "w3", "w2"},
    .norm_names = {"q_layernorm", "k_layernorm"},
    .output_name = "out_proj",
    .dense_name = "feed_forward",
    .layer_norms = {"operator_norm", "ffn_norm"},
    .final_norm = "model.embedding_norm",
};

constexpr Family kMimoV2Flash = {
    .model_type = "mimo_v2_flash",
    .architecture = "MiMoV2FlashForCausalLM",
    .defaults = R"({"vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384,
        "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 192, "v_head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "attention_bias": false, "attention_value_scale": 0.707,
        "sliding_window": 128, "layer_types": null, "partial_rotary_factor": 0.334,
        "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "mlp_layer_types": null, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
        "routed_scaling_factor": 1.0})",
    .fixed = R"({"scoring_func": "sigmoid", "topk_method": "noaux_tc"})",
    .mimo_windows = true,
    .window = WindowRule::kFiveOfSix,
    .rope = RopeRule::kByLayerType,
    .router = RouterRule::kBiasedSigmoid,
    .sinks_name = "attention_sink_bias",
};

constexpr Family kLaguna = {
    .model_type = "laguna",
    .architecture = "LagunaForCausalLM",
    .defaults = R"({"vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 40, "num_attention_heads": 48, "num_key_value_heads": 8,
        "num_attention_heads_per_layer": null, "head_dim": 128, "gating": true,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 512,
        "layer_types": null, "partial_rotary_factor": null, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0,
        "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "mlp_layer_types": null, "moe_intermediate_size": 512, "shared_intermediate_size": 512,
        "num_experts": 256, "num_experts_per_tok": 8, "routed_scaling_factor": 1.0})",
    .fixed = R"({"moe_apply_router_weight_on_input": false, "moe_router_logit_softcapping": 0.0,
        "output_router_logits": false})",
    .unused = R"(["router_aux_loss_coef"])",
    .renamed = R"({"shared_expert_intermediate_size": "shared_intermediate_size",
        "moe_routed_scaling_factor": "routed_scaling_factor"})",
    .qk_norm = QkNorm::kHead,
    .window = WindowRule::kListed,
    .rope = RopeRule::kByLayerType,
    .router = RouterRule::kBiasedSigmoid,
    .correction_name = "experts.e_score_correction_bias",
    .shared_name = "shared_expert",
    .gate_name = "g_proj",
};

constexpr Family kGemma4 = {
    .model_type = "gemma4_text",
    .architecture = "Gemma4ForCausalLM",
    .whole = {"gemma4", "Gemma4ForConditionalGeneration"},
    .defaults = R"({"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": null,
        "per_layer_config": null, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "pad_token_id": 0,
        "tie_word_embeddings": true, "attention_bias": false, "attention_k_eq_v": false,
        "sliding_window": 512, "layer_types": null, "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "final_logit_softcapping": null, "hidden_size_per_layer_input": 256,
        "enable_moe_block": false, "num_experts": null, "num_experts_per_tok": null,
        "moe_intermediate_size": null})",
    .fixed = R"({"num_kv_shared_layers": 0, "use_double_wide_mlp": false,
        "use_bidirectional_attention": {"any": [null, "vision"]}})",
    .unused = R"(["vocab_size_per_layer_input"])",
    .renamed = R"({"hidden_activation": "hidden_act", "top_k_experts": "num_experts_per_tok"})",
    .qk_norm = QkNorm::kHead,
    .output_bias = true,
    .gemma = true,
    .window = WindowRule::kGemma,
    .rope = RopeRule::kByLayerType,
    .expert_tensors = ExpertTensors::kBesideMlp,
    .layer_norms = {"input_layernorm", "pre_feedforward_layernorm"},
};

constexpr std::array kMixedFamilies = {kQwen3Next,   kQwen35,    kQwen35Moe, kGraniteMoeHybrid,
                                       kNemotronH,   kExaoneMoe, kMellum,    kLfm2Moe,
                                       kMimoV2Flash, kLaguna,    kGemma4};

}  // namespace

std::span<const Family> mixed_families() {
  return kMixedFamilies;
}

}  // namespace tessera
