#include "hf/family/family.h"

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
        "num_experts_per_tok": 2, "output_router_logits": false, "router_aux_loss_coef": 0.001})",
    .fixed = R"({"router_jitter_noise": 0.0})",
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

constexpr std::array kFamilies = {kLlama, kMistral,  kQwen2,      kQwen3,      kMixtral, kQwen3Moe,
                                  kOlmoe, kQwen2Moe, kDeepseekV2, kDeepseekV3, kGlm4Moe, kGptOss};

}  // namespace

std::span<const Family> families() {
  return kFamilies;
}

}  // namespace tessera
