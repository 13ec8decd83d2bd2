#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <vector>

#include "model/run/mixer_gradient_cases.h"
#include "ops/testing/op_test.h"

/// Tiny models of every kind, and one run of them with its gradients.
namespace tessera::testing {

inline constexpr int64_t kSequences = 2;
inline constexpr int64_t kLength = 6;

inline std::vector<Case> gradient_cases() {
  std::vector<Case> cases = {
      make_case("plain", [](ModelConfig&) {}),
      make_case("tied", [](ModelConfig& c) { c.tie_embeddings = true; }),
      make_case("dense", [](ModelConfig& c) { c.moe.num_experts = 0; }),
      make_case("first_dense", [](ModelConfig& c) { c.moe.first_dense_layers = 1; }),
      make_case("gelu", [](ModelConfig& c) { c.activation = Activation::kGelu; }),
      make_case("classic_weighting", [](ModelConfig& c) { c.moe.memory_efficient = false; }),
      make_case("after_top_k", [](ModelConfig& c) { c.moe.score_order = ScoreOrder::kAfterTopK; }),
      make_case("sigmoid_groups",
                [](ModelConfig& c) {
                  c.moe.score = ScoreFunction::kSigmoid;
                  c.moe.num_groups = 2;
                  c.moe.top_groups = 1;
                  c.moe.score_scale = 2.5;
                  c.moe.bias_update_speed = 0.1;
                }),
      make_case("shared_gated",
                [](ModelConfig& c) {
                  c.moe.shared_inner_size = 12;
                  c.moe.shared_gate = true;
                }),
      make_case("latent_experts",
                [](ModelConfig& c) {
                  c.moe.latent_size = 6;
                  c.moe.shared_inner_size = 12;
                }),
      make_case("latent_experts_weighted_late",
                [](ModelConfig& c) {
                  c.moe.latent_size = 6;
                  c.moe.memory_efficient = false;
                  c.moe.capacity_factor = 0.75;
                }),
      make_case("latent_block_sparse_experts",
                [](ModelConfig& c) {
                  c.moe.latent_size = 5;
                  c.moe.top_k = c.moe.num_experts;  // no step flips a choice
                  c.moe.experts = ExpertPath::kBlockSparse;
                  c.moe.block_size = 8;
                }),
      make_case("top_p",
                [](ModelConfig& c) {
                  c.moe.top_p = 0.5;
                  c.moe.top_k = 3;
                  c.moe.score_scale = 1.5;
                }),
      make_case("top_p_not_normalized",
                [](ModelConfig& c) {
                  c.moe.top_p = 0.6;
                  c.moe.top_k = 4;
                  c.moe.normalize_top_k = false;
                  c.moe.memory_efficient = false;
                  c.moe.balance_scope = BalanceTokens::kSequence;
                }),
      make_case("zero_experts",
                [](ModelConfig& c) {
                  c.moe.zero_experts = 2;
                  c.moe.top_k = 3;
                  c.moe.latent_size = 6;
                  c.moe.shared_inner_size = 12;
                }),
      make_case("zero_experts_with_bias",
                [](ModelConfig& c) {
                  c.moe.zero_experts = 3;
                  c.moe.router_bias = true;
                  c.moe.bias_update_speed = 0.1;
                  c.moe.balance_scope = BalanceTokens::kModel;
                }),
      make_case("zero_experts_and_top_p",
                [](ModelConfig& c) {
                  c.moe.zero_experts = 4;
                  c.moe.top_k = 4;
                  c.moe.top_p = 0.6;
                  c.moe.capacity_factor = 1.0;
                }),
      make_case("expert_choice", [](ModelConfig& c) { c.moe.routing = Routing::kExpertChoice; }),
      make_case("expert_choice_by_sigmoid",
                [](ModelConfig& c) {
                  c.moe.routing = Routing::kExpertChoice;
                  c.moe.score = ScoreFunction::kSigmoid;
                  c.moe.score_scale = 0.5;
                  c.moe.top_k = 1;
                  c.moe.memory_efficient = false;
                  c.moe.inner_sizes = {8, 16, 8, 24};
                }),
      make_case("capacity", [](ModelConfig& c) { c.moe.capacity_factor = 0.75; }),
      make_case("padded_capacity",
                [](ModelConfig& c) {
                  c.moe.capacity_factor = 1.0;
                  c.moe.pad_to_capacity = true;
                }),
      make_case("unequal_experts",
                [](ModelConfig& c) {
                  c.moe.inner_sizes = {8, 16, 8, 24};
                }),
      make_case("block_sparse",
                [](ModelConfig& c) {
                  c.moe.experts = ExpertPath::kBlockSparse;
                  c.moe.block_size = 8;
                }),
      make_case("block_sparse_unequal",
                [](ModelConfig& c) {
                  c.moe.experts = ExpertPath::kBlockSparse;
                  c.moe.block_size = 8;
                  c.moe.inner_sizes = {8, 16, 8, 24};
                }),
      make_case("sequence_balance",
                [](ModelConfig& c) { c.moe.balance_scope = BalanceTokens::kSequence; }),
      make_case("global_balance",
                [](ModelConfig& c) { c.moe.balance_scope = BalanceTokens::kGlobalBatch; }),
      make_case("model_balance",
                [](ModelConfig& c) {
                  c.num_layers = 3;
                  c.moe.dense_layers = {1};
                  c.moe.balance_scope = BalanceTokens::kModel;
                }),
      make_case("group_balance",
                [](ModelConfig& c) {
                  c.moe.balance_group_size = 2;
                  c.moe.balance_scope = BalanceTokens::kSequence;
                }),
      make_case("model_balance_of_groups",
                [](ModelConfig& c) {
                  c.moe.balance_group_size = 2;
                  c.moe.balance_scope = BalanceTokens::kModel;
                }),
      make_case("capacity_of_groups",
                [](ModelConfig& c) {
                  c.moe.capacity_factor = 0.75;
                  c.moe.capacity_group_size = 2;
                }),
      make_case("model_balance_of_sigmoids",
                [](ModelConfig& c) {
                  c.moe.score = ScoreFunction::kSigmoid;
                  c.moe.balance_scope = BalanceTokens::kModel;
                }),
      make_case("root_of_softplus",
                [](ModelConfig& c) {
                  c.activation = Activation::kSwiGLUClamped;
                  c.moe.score = ScoreFunction::kSqrtSoftplus;
                  c.moe.score_scale = 1.5;
                  c.moe.balance_scope = BalanceTokens::kSequence;
                  c.moe.z_loss_coefficient = 0.01;
                  c.moe.expert_bias = true;
                }),
      make_case("hash_layers",
                [](ModelConfig& c) {
                  c.moe.hash_layers = {0};
                  c.moe.score = ScoreFunction::kSqrtSoftplus;
                  c.moe.score_scale = 1.5;
                  c.moe.z_loss_coefficient = 0.01;
                  c.moe.bias_update_speed = 0.1;
                }),
      make_case("hash_layers_balanced_as_a_model",
                [](ModelConfig& c) {
                  c.moe.hash_layers = {1};
                  c.moe.shared_inner_size = 12;
                  c.moe.score_order = ScoreOrder::kAfterTopK;
                  c.moe.balance_scope = BalanceTokens::kModel;
                }),
      make_case("hash_layers_alone",
                [](ModelConfig& c) {
                  c.moe.hash_layers = {0, 1};
                  c.moe.balance_scope = BalanceTokens::kGlobalBatch;
                  c.moe.capacity_factor = 0.75;
                }),
      make_case("residual_streams",
                [](ModelConfig& c) {
                  c.residual_streams = 4;
                  c.residual_sinkhorn_iterations = 5;
                }),
      make_case("residual_streams_of_multiplied_parts",
                [](ModelConfig& c) {
                  c.residual_streams = 2;
                  c.residual_sinkhorn_iterations = 1;
                  c.residual_eps = 0.1;
                  c.residual_multiplier = 0.5;
                  c.embedding_multiplier = 3;
                  c.post_norms = c.layer_scalars = true;
                  c.moe.shared_inner_size = 12;
                  c.moe.separate_norms = c.moe.router_norm = true;
                }),
      make_case("residual_streams_of_single_parts",
                [](ModelConfig& c) {
                  c.residual_streams = 3;
                  c.layers_without_mixer = {1};
                  c.layers_without_mlp = {0};
                  c.tie_embeddings = true;
                }),
      make_case("deepseek_v4",
                [](ModelConfig& c) {
                  make_compressed(c);
                  c.compressed.sparse_layers = {1};
                  c.compressed.heavy_layers = {0};
                  c.index = {.top_k = 3, .num_heads = 2, .head_size = 6};
                  c.activation = Activation::kSwiGLUClamped;
                  c.swiglu_limit = 0.5;
                  c.residual_streams = 2;
                  c.moe.hash_layers = {0};
                  c.moe.score = ScoreFunction::kSqrtSoftplus;
                  c.moe.shared_inner_size = 12;
                  c.moe.expert_bias = true;
                }),
      make_case("biases",
                [](ModelConfig& c) {
                  c.qkv_bias = c.output_bias = c.mlp_bias = true;
                  c.moe.first_dense_layers = 1;
                  c.moe.shared_inner_size = 12;
                }),
      make_case("biased_experts",
                [](ModelConfig& c) {
                  c.activation = Activation::kSwiGLUOai;
                  c.moe.mlp_bias = c.moe.router_bias = true;
                  c.moe.score_order = ScoreOrder::kAfterTopK;
                }),
      make_case("biased_experts_weighted_late",
                [](ModelConfig& c) {
                  c.activation = Activation::kGelu;
                  c.moe.mlp_bias = c.moe.router_bias = true;
                  c.moe.top_k = c.moe.num_experts;  // no step flips a choice
                  c.moe.memory_efficient = false;
                  c.moe.inner_sizes = {8, 16, 8, 24};
                  c.moe.balance_scope = BalanceTokens::kModel;
                }),
      make_case("biased_experts_padded_to_capacity",
                [](ModelConfig& c) {
                  c.moe.mlp_bias = true;
                  c.moe.latent_size = 6;
                  c.moe.capacity_factor = 1.0;
                  c.moe.pad_to_capacity = true;
                }),
      make_case("biased_block_sparse_experts",
                [](ModelConfig& c) {
                  c.activation = Activation::kSwiGLUOai;
                  c.moe.mlp_bias = c.moe.router_bias = true;
                  c.moe.experts = ExpertPath::kBlockSparse;
                  c.moe.block_size = 8;
                  c.moe.inner_sizes = {8, 16, 8, 24};
                }),
      make_case("multipliers",
                [](ModelConfig& c) {
                  c.embedding_multiplier = 3;
                  c.residual_multiplier = 0.22;
                  c.attention_multiplier = 0.3;
                  c.logits_divisor = 1.5;
                }),
      make_case("multipliers_of_predicted_tokens",
                [](ModelConfig& c) {
                  c.mtp_layers = 1;
                  c.embedding_multiplier = 0.5;
                  c.residual_multiplier = 0.7;
                  c.logits_divisor = 3;
                  c.tie_embeddings = false;
                }),
      make_case("adapters",
                [](ModelConfig& c) {
                  c.num_layers = 3;
                  c.delta_layers = {2};
                  c.delta = {
                      .num_key_heads = 2, .num_value_heads = 2, .key_size = 4, .value_size = 3};
                  c.init_deviation = 0.5;
                  c.output_bias = c.mlp_bias = c.moe.mlp_bias = true;
                  c.moe.first_dense_layers = 1;
                  c.moe.shared_inner_size = 12;
                  c.moe.inner_sizes = {8, 16, 8, 24};
                  c.lora = {.rank = 3, .alpha = 5};
                }),
      make_case(
          "adapters_of_some_matrices",
          [](ModelConfig& c) {
            c.attention = AttentionKind::kLatent;
            c.num_kv_heads = 0;
            c.latent = {
                .query_rank = 5, .kv_rank = 6, .nope_size = 3, .rope_size = 4, .value_size = 2};
            c.moe.memory_efficient = false;
            c.moe.latent_size = 6;
            c.lora = {.rank = 2,
                      .alpha = 2,
                      .rank_stabilized = true,
                      .targets = {"attn", "moe.experts.down", "moe.latent_up"}};
          }),
      make_case("probabilities_on_input",
                [](ModelConfig& c) {
                  c.moe.probs_on_input = true;
                  c.moe.score = ScoreFunction::kSigmoid;
                  c.moe.normalize_top_k = false;
                  c.moe.shared_inner_size = 5;
                }),
      make_case("norms_behind_and_layer_scalars",
                [](ModelConfig& c) {
                  c.post_norms = true;
                  c.layer_scalars = true;
                  c.residual_multiplier = 0.7;
                  c.logit_softcap = 2;
                }),
      make_case("layer_norms",
                [](ModelConfig& c) {
                  c.norm = NormKind::kLayer;
                  c.head_bias = true;
                  c.qkv_bias = c.output_bias = true;
                  c.moe.top_k = c.moe.num_experts;  // no step flips a choice
                }),
      make_case("layer_norms_behind_a_tied_head",
                [](ModelConfig& c) {
                  c.norm = NormKind::kLayer;
                  c.post_norms = true;
                  c.head_bias = c.tie_embeddings = true;
                  c.logit_softcap = 2;
                  c.moe.shared_inner_size = 12;
                  c.moe.separate_norms = true;
                }),
      make_case("layer_norms_and_mtp",
                [](ModelConfig& c) {
                  c.norm = NormKind::kLayer;
                  c.mtp_layers = 1;
                  c.moe.top_k = c.moe.num_experts;
                }),
      make_case("sparse_mixer",
                [](ModelConfig& c) {
                  c.moe.sparse_mixer = 0.9;  // no step flips which experts count
                  c.moe.top_k = c.moe.num_experts;
                  c.moe.normalize_top_k = false;
                }),
      make_case("longrope_beyond_its_context",
                [](ModelConfig& c) {
                  c.rope.scaling = RopeScaling::kLongRope;
                  c.rope.factor = 3;
                  c.rope.original_length = 4;
                  c.rope.short_factors = std::vector<double>(c.rotary_dim() / 2, 1.0);
                  c.rope.long_factors = std::vector<double>(c.rotary_dim() / 2, 2.5);
                }),
      make_case("experts_of_separate_norms",
                [](ModelConfig& c) {
                  c.moe.shared_inner_size = 12;
                  c.moe.separate_norms = true;
                  c.moe.router_norm = true;
                  c.moe.expert_scale = true;
                  c.post_norms = true;
                }),
      make_case("scaled_experts_of_a_share",
                [](ModelConfig& c) {
                  c.moe.router_norm = true;
                  c.moe.expert_scale = true;
                  c.moe.zero_experts = 2;
                  c.moe.top_k = 3;
                  c.moe.top_p = 0.6;
                  c.moe.memory_efficient = false;
                }),
      make_case("softmax_with_expert_bias", [](ModelConfig& c) { c.moe.expert_bias = true; }),
      make_case("latent",
                [](ModelConfig& c) {
                  c.attention = AttentionKind::kLatent;
                  c.num_kv_heads = 0;
                  c.latent = {.kv_rank = 6, .nope_size = 4, .rope_size = 2, .value_size = 5};
                  c.rope.interleaved = true;
                }),
      make_case(
          "latent_queries",
          [](ModelConfig& c) {
            c.attention = AttentionKind::kLatent;
            c.num_kv_heads = 0;
            c.latent = {
                .query_rank = 5, .kv_rank = 6, .nope_size = 3, .rope_size = 4, .value_size = 2};
            c.qkv_bias = c.output_bias = true;
            c.rope.scaling = RopeScaling::kYarn;
            c.rope.factor = 4;
            c.rope.original_length = 3;
            c.rope.mscale = 0.8;
            c.rope.mscale_all_dims = 0.6;
          }),
      make_case("mtp", [](ModelConfig& c) { c.mtp_layers = 1; }),
      make_case("mtp_of_streams",
                [](ModelConfig& c) {
                  c.mtp_layers = 2;
                  c.residual_streams = 3;
                }),
      make_case("mtp_of_two_tied_tokens",
                [](ModelConfig& c) {
                  c.mtp_layers = 2;
                  c.tie_embeddings = true;
                  c.moe.balance_scope = BalanceTokens::kModel;
                }),
      make_case("normed_mtp_of_two_tokens",
                [](ModelConfig& c) {
                  c.mtp_layers = 2;
                  c.mtp_normed = true;
                  c.logits_divisor = 3;
                }),
      make_case("mtp_of_latent_dense_layers",
                [](ModelConfig& c) {
                  c.mtp_layers = 1;
                  c.attention = AttentionKind::kLatent;
                  c.num_kv_heads = 0;
                  c.latent = {.kv_rank = 6, .nope_size = 4, .rope_size = 2, .value_size = 5};
                  c.moe.dense_layers = {1};
                }),
  };
  std::ranges::move(mixer_gradient_cases(), std::back_inserter(cases));
  return cases;
}

inline LossScales test_scales(const TestBatch& batch) {
  const float mean = 1.0F / static_cast<float>(batch.num_valid);
  return {.loss = mean, .balance = 0.1F, .z_loss = 0.05F, .mtp = 0.3F * mean};
}

/// Runs one micro-batch and returns the rig with its gradients.
inline std::unique_ptr<ModelRig> run_once(const ModelConfig& config,
                                          const RecomputePolicy& policy = {},
                                          DType dtype = DType::kF32) {
  auto rig = std::make_unique<ModelRig>(config, tiny_shape(kSequences, kLength, dtype), policy);
  TestBatch batch(config, kSequences, kLength, 5);
  rig->model.begin_step();
  rig->run(batch, test_scales(batch));
  return rig;
}

inline void expect_same_gradients(const ModelRig& a, const ModelRig& b, double tolerance) {
  for (size_t i = 0; i < a.parameters.all().size(); ++i) {
    const ModelParameter& pa = a.parameters.all()[i];
    const ModelParameter& pb = b.parameters.all()[i];
    if (tolerance == 0) {
      expect_bitwise_equal(pa.grad, pb.grad, pa.spec.name);
    } else {
      expect_rows_near(pa.grad, pb.grad, tolerance, pa.spec.name);
    }
  }
}

}  // namespace tessera::testing
