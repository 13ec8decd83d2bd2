#include "hf/family/family_tables.h"

namespace tessera {
namespace {

constexpr Family kDeepseekV4 = {
    .model_type = "deepseek_v4",
    .architecture = "DeepseekV4ForCausalLM",
    .defaults = R"({"vocab_size": 129280, "hidden_size": 4096, "moe_intermediate_size": 2048,
        "num_hidden_layers": 43, "num_attention_heads": 64, "head_dim": 512,
        "q_lora_rank": 1024, "n_routed_experts": 256, "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5,
        "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0, "rope_parameters": null, "partial_rotary_factor": null,
        "qk_rope_head_dim": null,
        "layer_types": null, "compress_ratios": null, "compress_rates": null,
        "compress_rate_csa": null, "compress_rate_hca": null, "sliding_window": 128,
        "o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128,
        "index_topk": 512, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "swiglu_limit": 10.0, "mlp_layer_types": null, "num_hash_layers": null})",
    // Of `norm_topk_prob`, transformers' routers read nothing and normalize.
    .fixed = R"({"num_key_value_heads": 1, "n_shared_experts": 1, "norm_topk_prob": true,
        "output_router_logits": false, "expert_dtype": {"any": ["fp8", "fp4"]}})",
    .unused = R"(["router_aux_loss_coef", "topk_method"])",
    .interleaved = true,
    .attention_sinks = true,
    .clamped_swiglu = true,
    .deepseek_v4 = true,
    .one_shared = true,
    .rope = RopeRule::kByCompression,
    .router = RouterRule::kBiasedScores,
    .moe_name = "ffn",
    .correction_name = "gate.bias",
    .expert_names = {"w1", "w3", "w2"},
    .sinks_name = "attn_sink",
    .layer_norms = {"attn_norm", "ffn_norm"},
    .head_name = "head",
    .predictions = PredictionNames::kStreams,
};

constexpr std::array kCompressedFamilies = {kDeepseekV4};

}  // namespace

std::span<const Family> compressed_families() {
  return kCompressedFamilies;
}

}  // namespace tessera
