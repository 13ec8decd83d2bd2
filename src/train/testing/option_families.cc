#include "train/testing/option_families.h"

#include "train/verify/verify.h"

namespace tessera::testing {
namespace {

void use_latent_attention(Settings& s) {
  s.model.attention = AttentionKind::kLatent;
  s.model.num_kv_heads = 0;
  s.model.latent = {
      .query_rank = 24, .kv_rank = 16, .nope_size = 32, .rope_size = 16, .value_size = 32};
}

void use_compressed_attention(Settings& s) {
  s.model.attention = AttentionKind::kCompressed;
  s.model.num_kv_heads = 0;
  s.model.window = 5;
  s.model.attention_sinks = true;
  s.model.compressed = {.query_rank = 24,
                        .rope_size = 16,
                        .output_groups = 2,
                        .output_rank = 24,
                        .sparse_rate = 2,
                        .heavy_rate = 8};
}

void scale_rope(Settings& s, RopeScaling scaling) {
  s.model.rope.scaling = scaling;
  s.model.rope.factor = 4;
  s.model.rope.original_length = 8;
  s.model.rope.max_length = 8;
}

// clang-format off
constexpr OptionFamily kFamilies[] = {
    {"plain", [](Settings&) {}},
    // The layers.
    {"dense", [](Settings& s) { s.model.moe.num_experts = 0; }},
    {"some_dense", [](Settings& s) { s.model.num_layers = 3; s.model.moe.first_dense_layers = 1;
                                     s.model.moe.dense_layers = {2}; }},
    {"gelu_with_biases", [](Settings& s) { s.model.activation = Activation::kGelu;
                                           s.model.qkv_bias = s.model.output_bias = true;
                                           s.model.mlp_bias = true;
                                           s.model.moe.first_dense_layers = 1; }},
    {"own_head", [](Settings& s) { s.model.tie_embeddings = false; }},
    {"padding_token", [](Settings& s) { s.model.padding_token = 3; }},
    {"multipliers", [](Settings& s) { s.model.embedding_multiplier = 12;
                                      s.model.residual_multiplier = 0.22;
                                      s.model.attention_multiplier = 0.125;
                                      s.model.logits_divisor = 6; }},
    {"predicted_tokens", [](Settings& s) { s.model.mtp_layers = 2; }},
    {"predicted_tokens_of_streams", [](Settings& s) { s.model.mtp_layers = 2;
                                                      s.model.residual_streams = 2; }},
    {"normed_predicted_tokens", [](Settings& s) { s.model.mtp_layers = 2;
                                                  s.model.mtp_normed = true; }},
    // Attention.
    {"window", [](Settings& s) { s.model.window = 5; }},
    {"window_layers", [](Settings& s) { s.model.window = 5; s.model.window_layers = {1}; }},
    {"head_norm", [](Settings& s) { s.model.qk_norm = QkNorm::kHead; }},
    {"all_heads_norm", [](Settings& s) { s.model.qk_norm = QkNorm::kAll; }},
    {"head_norm_after_rotation", [](Settings& s) { s.model.qk_norm = QkNorm::kHead;
                                                   s.model.norm_after_rotation = true; }},
    {"all_heads_norm_after_rotation", [](Settings& s) { s.model.qk_norm = QkNorm::kAll;
                                                        s.model.norm_after_rotation = true; }},
    {"odd_heads", [](Settings& s) { s.model.head_size = 10; }},
    {"part_of_a_head_rotated", [](Settings& s) { s.model.rope.fraction = 0.5;
                                                 s.model.rope.interleaved = true; }},
    {"linear_rope", [](Settings& s) { scale_rope(s, RopeScaling::kLinear); }},
    {"dynamic_rope", [](Settings& s) { scale_rope(s, RopeScaling::kDynamic); }},
    {"yarn", [](Settings& s) { scale_rope(s, RopeScaling::kYarn); }},
    {"longrope", [](Settings& s) { scale_rope(s, RopeScaling::kLongRope);
                                   s.model.head_size = 8;
                                   s.model.rope.short_factors = {1, 1.5, 2, 3};
                                   s.model.rope.long_factors = {1.25, 2, 8, 30};
                                   s.model.rope.long_mscale = 1.2; }},
    {"llama3_rope", [](Settings& s) { scale_rope(s, RopeScaling::kLlama3); }},
    {"latent_attention", use_latent_attention},
    {"chosen_keys", [](Settings& s) { use_latent_attention(s);
                                      s.model.index = {.top_k = 9, .num_heads = 8, .head_size = 20}; }},
    {"compressed_attention", use_compressed_attention},
    {"compressed_tokens", [](Settings& s) { use_compressed_attention(s);
                                            s.model.compressed.sparse_layers = {0};
                                            s.model.compressed.heavy_layers = {1};
                                            s.model.compressed_rope = {.base = 100};
                                            s.model.index = {.top_k = 6, .num_heads = 8,
                                                             .head_size = 20}; }},
    {"latent_attention_whole_queries", [](Settings& s) { use_latent_attention(s);
                                                         s.model.latent.query_rank = 0; }},
    {"attention_sinks", [](Settings& s) { s.model.attention_sinks = true; s.model.window = 5;
                                          s.model.window_layers = {0}; }},
    // Small queries and keys, which become unit vectors, would turn far at a step.
    {"gated_delta", [](Settings& s) { s.schedule.peak_lr = 1e-4;
                                      s.model.delta_layers = {0};
                                      s.model.attention_gate = true;
                                      s.model.delta = {.num_key_heads = 1,
                                                       .num_value_heads = 2,
                                                       .key_size = 64,
                                                       .value_size = 64}; }},
    {"kimi_delta", [](Settings& s) { s.schedule.peak_lr = 1e-4;
                                     use_latent_attention(s);
                                     s.model.rope.fraction = 0;
                                     s.model.delta_layers = {0};
                                     s.model.delta = {.kind = DeltaKind::kKimi,
                                                      .num_key_heads = 2,
                                                      .num_value_heads = 2,
                                                      .key_size = 64,
                                                      .value_size = 64}; }},
    {"kimi_delta_of_documents", [](Settings& s) { s.schedule.peak_lr = 3e-5;
                                                  s.data.split_documents = true;
                                                  s.train.recompute = {"all"};
                                                  s.model.delta_layers = {0, 1};
                                                  s.model.delta = {.kind = DeltaKind::kKimi,
                                                                   .num_key_heads = 2,
                                                                   .num_value_heads = 2,
                                                                   .key_size = 12,
                                                                   .value_size = 7,
                                                                   .conv_size = 3}; }},
    {"gated_delta_of_documents", [](Settings& s) { s.schedule.peak_lr = 3e-5;
                                                   s.data.split_documents = true;
                                                   s.train.recompute = {"all"};
                                                   s.model.delta_layers = {0, 1};
                                                   s.model.delta = {.num_key_heads = 2,
                                                                    .num_value_heads = 4,
                                                                    .key_size = 12,
                                                                    .value_size = 7,
                                                                    .conv_size = 3}; }},
    {"mamba", [](Settings& s) { s.model.mamba_layers = {0};
                                s.model.rope.fraction = 0;
                                s.model.mamba = {.num_heads = 4,
                                                 .head_size = 32,
                                                 .num_groups = 2,
                                                 .state_size = 64}; }},
    {"mamba_of_documents", [](Settings& s) { s.data.split_documents = true;
                                             s.train.recompute = {"all"};
                                             s.model.activation = Activation::kRelu2;
                                             s.model.num_layers = 4;
                                             s.model.mamba_layers = {0, 3};
                                             s.model.layers_without_mlp = {0, 1};
                                             s.model.layers_without_mixer = {2};
                                             s.model.mamba = {.num_heads = 4,
                                                              .head_size = 12,
                                                              .state_size = 7,
                                                              .conv_size = 3,
                                                              .proj_bias = true}; }},
    {"gated_convolution", [](Settings& s) { s.model.conv_layers = {0};
                                            s.model.conv = {.bias = true}; }},
    {"gated_convolution_of_documents", [](Settings& s) { s.data.split_documents = true;
                                                         s.train.recompute = {"all"};
                                                         s.model.conv_layers = {0, 1};
                                                         s.model.conv = {.size = 6}; }},
    {"windows_of_their_own_rotation", [](Settings& s) { s.model.window = 9;
                                                        s.model.window_layers = {1};
                                                        s.model.qk_norm = QkNorm::kHead;
                                                        s.model.own_window_rope = true;
                                                        s.model.window_rope = {.base = 100};
                                                        s.model.rope.fraction = 0; }},
    {"windows_of_their_own_heads", [](Settings& s) { s.model.window = 9;
                                                     s.model.window_layers = {1};
                                                     s.model.window_heads = 8;
                                                     s.model.window_kv_heads = 4;
                                                     s.model.attention_gate = true;
                                                     s.model.gate_function =
                                                         AttentionGate::kSoftplusOfHeads;
                                                     s.model.window_sinks = true;
                                                     s.model.value_size = 32;
                                                     s.model.value_multiplier = 0.7; }},
    {"chunks_and_temperatures", [](Settings& s) { s.model.window = 9;
                                                  s.model.window_kind = WindowKind::kChunked;
                                                  s.model.window_layers = {1};
                                                  s.model.qk_norm = QkNorm::kL2;
                                                  s.model.norm_after_rotation = true;
                                                  s.model.own_window_rope = true;
                                                  s.model.window_rope = {.interleaved = true};
                                                  s.model.rope.fraction = 0;
                                                  s.model.temperature_scale = 0.1;
                                                  s.model.temperature_length = 5; }},
    {"chunks_of_documents", [](Settings& s) { s.data.split_documents = true;
                                              s.train.recompute = {"all"};
                                              s.model.window = 7;
                                              s.model.window_kind = WindowKind::kChunked; }},
    {"windows_of_their_own_head_size", [](Settings& s) { s.model.window = 9;
                                                         s.model.window_layers = {1};
                                                         s.model.window_head_size = 32;
                                                         s.model.window_kv_heads = 4;
                                                         s.model.keys_as_values = true;
                                                         s.model.value_norm = true;
                                                         s.model.qk_norm = QkNorm::kHead;
                                                         s.model.rope.proportional = true;
                                                         s.model.rope.fraction = 0.25; }},
    {"norms_behind", [](Settings& s) { s.model.post_norms = true;
                                       s.model.layer_scalars = true;
                                       s.model.logit_softcap = 5;
                                       s.train.recompute = {"all"}; }},
    {"layer_norms", [](Settings& s) { s.model.norm = NormKind::kLayer;
                                      s.model.head_bias = true;
                                      s.model.tie_embeddings = false; }},
    {"layer_norms_behind", [](Settings& s) { s.model.norm = NormKind::kLayer;
                                             s.model.post_norms = true;
                                             s.model.head_bias = true;
                                             s.model.logit_softcap = 5;
                                             s.train.recompute = {"all"}; }},
    {"residual_streams", [](Settings& s) { s.model.residual_streams = 4;
                                           s.model.residual_sinkhorn_iterations = 6; }},
    {"residual_streams_recomputed", [](Settings& s) { s.model.residual_streams = 2;
                                                      s.model.moe.shared_inner_size = 32;
                                                      s.train.recompute = {"all"}; }},
    // Experts.
    {"probabilities_on_input", [](Settings& s) { s.model.moe.probs_on_input = true;
                                                 s.model.moe.mlp_bias = true;
                                                 s.model.moe.score = ScoreFunction::kSigmoid;
                                                 s.model.moe.normalize_top_k = false; }},
    {"experts_of_separate_norms", [](Settings& s) { s.model.moe.shared_inner_size = 32;
                                                    s.model.moe.separate_norms = true;
                                                    s.model.moe.router_norm = true;
                                                    s.model.moe.expert_scale = true;
                                                    s.model.post_norms = true; }},
    {"biased_experts", [](Settings& s) { s.model.moe.mlp_bias = s.model.moe.router_bias = true;
                                         s.model.activation = Activation::kSwiGLUOai; }},
    {"biased_experts_late", [](Settings& s) { s.model.moe.mlp_bias = true;
                                              s.model.moe.memory_efficient = false;
                                              s.model.moe.inner_sizes = {64, 8, 24, 128}; }},
    {"biased_block_sparse", [](Settings& s) { s.model.moe.mlp_bias = true;
                                              s.model.activation = Activation::kSwiGLUOai;
                                              s.model.moe.experts = ExpertPath::kBlockSparse;
                                              s.model.moe.block_size = 16; }},
    {"biased_block_sparse_of_many_sizes",
     [](Settings& s) { s.model.moe.mlp_bias = true;
                       s.model.moe.experts = ExpertPath::kBlockSparse;
                       s.model.moe.block_size = 8;
                       s.model.moe.inner_sizes = {64, 8, 24, 128}; }},
    {"probabilities_late", [](Settings& s) { s.model.moe.memory_efficient = false; }},
    {"gathers_fused", [](Settings& s) { s.model.moe.fuse_gather = GatherFusion::kAlways;
                                        s.model.moe.shared_inner_size = 32; }},
    {"gathers_fused_into_plain_products",
     [](Settings& s) { s.model.moe.fuse_gather = GatherFusion::kAlways;
                       s.model.moe.inner_sizes = {13, 64, 7, 24}; }},
    {"activations_fused", [](Settings& s) { s.model.moe.fuse_activation = true; }},
    {"gathers_not_fused", [](Settings& s) { s.model.moe.fuse_gather = GatherFusion::kNever; }},
    {"block_sparse", [](Settings& s) { s.model.moe.experts = ExpertPath::kBlockSparse;
                                       s.model.moe.block_size = 16; }},
    {"experts_of_many_sizes", [](Settings& s) { s.model.moe.inner_sizes = {64, 8, 24, 128}; }},
    {"block_sparse_of_many_sizes", [](Settings& s) { s.model.moe.experts = ExpertPath::kBlockSparse;
                                                     s.model.moe.block_size = 8;
                                                     s.model.moe.inner_sizes = {64, 8, 24, 128}; }},
    {"odd_experts", [](Settings& s) { s.model.moe.inner_size = 13; }},
    {"shared_expert", [](Settings& s) { s.model.moe.shared_inner_size = 32; }},
    {"gated_shared_expert", [](Settings& s) { s.model.moe.shared_inner_size = 32;
                                              s.model.moe.shared_gate = true; }},
    {"latent_experts", [](Settings& s) { s.model.moe.latent_size = 32; }},
    // The router.
    {"sigmoid_groups_bias", [](Settings& s) { s.model.moe.num_experts = 8;
                                              s.model.moe.score = ScoreFunction::kSigmoid;
                                              s.model.moe.num_groups = 4;
                                              s.model.moe.top_groups = 2;
                                              s.model.moe.score_scale = 1.5;
                                              s.model.moe.bias_update_speed = 0.01; }},
    {"softmax_bias", [](Settings& s) { s.model.moe.bias_update_speed = 0.01;
                                       s.model.moe.balance_coefficient = 0; }},
    {"roots_of_softplus", [](Settings& s) { s.model.moe.score = ScoreFunction::kSqrtSoftplus;
                                            s.model.moe.score_scale = 1.5;
                                            s.model.moe.bias_update_speed = 0.01;
                                            s.model.activation = Activation::kSwiGLUClamped;
                                            s.model.swiglu_limit = 0.5; }},
    {"hash_layers", [](Settings& s) { s.model.moe.hash_layers = {0};
                                      s.model.moe.score = ScoreFunction::kSqrtSoftplus;
                                      s.model.moe.bias_update_speed = 0.01; }},
    {"scores_after_top_k", [](Settings& s) { s.model.moe.score_order = ScoreOrder::kAfterTopK; }},
    {"not_normalized", [](Settings& s) { s.model.moe.normalize_top_k = false;
                                         s.model.moe.z_loss_coefficient = 0.01; }},
    {"router_jitter", [](Settings& s) { s.model.moe.router_jitter = 0.2;
                                        s.train.recompute = {"all"}; }},
    {"jittered_experts", [](Settings& s) { s.model.moe.router_jitter = 0.1;
                                           s.model.moe.jitter_experts = true;
                                           s.model.moe.shared_inner_size = 32; }},
    {"sparse_mixer", [](Settings& s) { s.model.moe.sparse_mixer = 0.2;
                                       s.model.moe.normalize_top_k = false; }},
    {"drawn_experts", [](Settings& s) { s.model.moe.sparse_mixer = 0.3;
                                        s.model.moe.draw_experts = true;
                                        s.model.moe.normalize_top_k = false;
                                        s.train.recompute = {"all"}; }},
    {"sinkhorn", [](Settings& s) { s.model.moe.routing = Routing::kSinkhorn;
                                   s.model.moe.normalize_top_k = false;
                                   s.model.moe.balance_coefficient = 0;
                                   s.model.vocab_size = 4000; }},
    {"expert_choice", [](Settings& s) { s.model.moe.routing = Routing::kExpertChoice;
                                        s.model.vocab_size = 4000; }},
    {"expert_choice_of_blocks",
     [](Settings& s) { s.model.moe.routing = Routing::kExpertChoice;
                       s.model.moe.experts = ExpertPath::kBlockSparse;
                       s.model.moe.block_size = 16;
                       s.model.moe.top_k = 1;
                       s.model.vocab_size = 4000; }},
    {"top_p", [](Settings& s) { s.model.moe.top_p = 0.6; s.model.moe.top_k = 3; }},
    {"top_p_by_sequence",
     [](Settings& s) { s.model.moe.top_p = 0.4;
                       s.model.moe.top_k = 4;
                       s.model.moe.normalize_top_k = false;
                       s.model.moe.balance_scope = BalanceTokens::kSequence;
                       s.model.moe.experts = ExpertPath::kBlockSparse;
                       s.model.moe.block_size = 16; }},
    {"zero_experts", [](Settings& s) { s.model.moe.zero_experts = 3;
                                       s.model.moe.bias_update_speed = 0.01; }},
    {"zero_experts_and_top_p",
     [](Settings& s) { s.model.moe.zero_experts = 2;
                       s.model.moe.top_k = 3;
                       s.model.moe.top_p = 0.7;
                       s.model.moe.memory_efficient = false;
                       s.model.moe.latent_size = 32;
                       s.model.moe.balance_scope = BalanceTokens::kModel; }},
    {"forced_balance", [](Settings& s) { s.model.moe.force_balanced = true; }},
    {"balance_of_sequences",
     [](Settings& s) { s.model.moe.balance_scope = BalanceTokens::kSequence; }},
    {"balance_of_the_global_batch",
     [](Settings& s) { s.model.moe.balance_scope = BalanceTokens::kGlobalBatch; }},
    {"balance_of_the_model", [](Settings& s) { s.model.moe.balance_scope = BalanceTokens::kModel;
                                               s.model.moe.balance_group_size = 2; }},
    // Capacities.
    {"capacity_by_probability", [](Settings& s) { s.model.moe.capacity_factor = 0.8;
                                                  s.model.vocab_size = 4000; }},
    {"capacity_by_position", [](Settings& s) { s.model.moe.capacity_factor = 0.8;
                                               s.model.moe.drop_policy = DropPolicy::kPosition; }},
    {"capacity_of_the_micro_batch",
     [](Settings& s) { s.model.moe.capacity_factor = 1.0;
                       s.model.moe.drop_policy = DropPolicy::kPosition;
                       s.model.moe.capacity_scope = CapacityScope::kSequence; }},
    {"capacity_of_groups", [](Settings& s) { s.model.moe.capacity_factor = 0.8;
                                             s.model.moe.drop_policy = DropPolicy::kPosition;
                                             s.model.moe.capacity_group_size = 2; }},
    {"padded_to_capacity", [](Settings& s) { s.model.moe.capacity_factor = 1.3;
                                             s.model.moe.drop_policy = DropPolicy::kPosition;
                                             s.model.moe.pad_to_capacity = true; }},
    {"block_sparse_with_capacity",
     [](Settings& s) { s.model.moe.experts = ExpertPath::kBlockSparse;
                       s.model.moe.block_size = 16;
                       s.model.moe.capacity_factor = 0.8;
                       s.model.moe.drop_policy = DropPolicy::kPosition; }},
    {"gathering_dispatcher_with_capacity",
     [](Settings& s) { s.parallel.dispatcher = DispatcherRequest::kAllGather;
                       s.model.moe.capacity_factor = 0.8;
                       s.model.moe.drop_policy = DropPolicy::kPosition; }},
    {"deduplicating_dispatcher_with_capacity",
     [](Settings& s) { s.parallel.dispatcher = DispatcherRequest::kDeduplicated;
                       s.model.moe.capacity_factor = 0.8;
                       s.model.moe.drop_policy = DropPolicy::kPosition; }},
    {"bounded_exchange_with_capacity",
     [](Settings& s) { s.parallel.dispatcher = DispatcherRequest::kAllToAll;
                       s.parallel.exchange = ExchangeSizes::kBounded;
                       s.model.moe.capacity_factor = 0.8;
                       s.model.moe.drop_policy = DropPolicy::kPosition; }},
    // Data and training.
    {"documents_apart", [](Settings& s) { s.data.split_documents = true; }},
    {"best_fit_packing", [](Settings& s) { s.data.split_documents = true;
                                           s.data.packing = Packing::kBestFit; }},
    {"recompute_all", [](Settings& s) { s.train.recompute = {"all"};
                                        s.model.moe.shared_inner_size = 32; }},
    {"recompute_some", [](Settings& s) { s.train.recompute = {"attn_norm", "expert_in"}; }},
    {"recompute_of_layers", [](Settings& s) { s.train.recompute = {"all@0", "expert_act@1"}; }},
    {"offload_all", [](Settings& s) { s.train.offload = {"all"}; }},
    {"offload_some", [](Settings& s) { s.train.offload = {"attn_norm", "expert_pre@1"};
                                       s.train.recompute = {"mlp_norm"};
                                       s.train.offload_rate = 0.1; }},
    {"split_weight_gradients", [](Settings& s) { s.parallel.split_weights = true; }},
    {"clipped", [](Settings& s) { s.train.max_grad_norm = 0.1; s.optimizer.weight_decay = 0.2; }},
    {"not_clipped", [](Settings& s) { s.train.max_grad_norm = 0; s.optimizer.decay_all = true; }},
    {"muon", [](Settings& s) { s.optimizer_kind = OptimizerKind::kMuon;
                               s.model.moe.inner_sizes = {64, 8, 24, 128};
                               s.model.moe.shared_inner_size = 32;
                               s.model.moe.shared_gate = true; }},
    {"qk_clip", [](Settings& s) { s.qk_clip = 0.05; s.model.qkv_bias = true; }},
    {"no_sharding", [](Settings& s) { s.shard.scope = ShardScope::kNone; }},
    {"state_on_host", [](Settings& s) { s.shard.state_on_host = true;
                                        s.shard.bucket_bytes = 1 << 14; }},
    {"updates_on_host", [](Settings& s) { s.shard.state_on_host = s.shard.updates_on_host = true;
                                          s.shard.bucket_bytes = 1 << 14; }},
    {"rounded_gradients", [](Settings& s) { s.shard.gradients = DType::kBF16;
                                            s.train.micro_batch = 1;
                                            s.train.max_grad_norm = 0.1; }},
    {"released_gradients", [](Settings& s) { s.shard.release_gradients = true;
                                             s.shard.state_on_host = true;
                                             s.train.max_grad_norm = 0; }},
};
// clang-format on

}  // namespace

void PrintTo(const OptionFamily& family, std::ostream* out) {
  *out << family.name;
}

std::span<const OptionFamily> option_families() {
  return kFamilies;
}

Settings settings_of(const OptionFamily& family) {
  Settings settings;
  settings.model.vocab_size = 101;
  settings.model.hidden_size = 64;
  settings.model.num_layers = 2;
  settings.model.num_heads = 4;
  settings.model.num_kv_heads = 2;
  settings.model.head_size = 64;
  settings.model.inner_size = 48;
  settings.model.init_deviation = 0.2;
  settings.model.moe = {.num_experts = 4, .top_k = 2, .inner_size = 64};
  settings.data.sequence_length = 40;
  settings.train.micro_batch = 2;
  settings.train.global_batch = 4;
  settings.optimizer.eps = 1e-3;
  settings.schedule = {.kind = ScheduleKind::kConstant, .peak_lr = 1e-2};
  settings = without_data(std::move(settings));
  family.change(settings);
  return settings;
}

}  // namespace tessera::testing
