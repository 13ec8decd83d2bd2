#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/config/config.h"
#include "model/config/lora.h"
#include "model/config/mixer_config.h"
#include "ops/activation/activation.h"
#include "ops/gather.h"
#include "ops/route_map/route_map.h"
#include "ops/router/router.h"
#include "parallel/pipeline_layout.h"

namespace tessera {

enum class ExpertPath { kGrouped, kBlockSparse };

/// How routers choose in training. In evaluation and generation each token takes its best experts,
/// but where experts choose.
enum class Routing {
  kTopK,      ///< each token its best experts
  kSinkhorn,  ///< the best after Sinkhorn's iteration evened the experts' loads out (ops/sinkhorn)
  /// Each expert its ceil(T·K/E) best tokens of the micro-batch (Expert Choice: Zhou et al., 2022),
  /// which also depends on later tokens: it cannot generate.
  kExpertChoice,
};

/// How hidden states are normed.
enum class NormKind {
  kRms,    ///< RMSNorm (ops/rmsnorm)
  kLayer,  ///< LayerNorm with weight and bias (ops/layer_norm)
};

/// The tokens over which a model's balance loss compares experts.
enum class BalanceTokens {
  kMicroBatch,
  kSequence,
  kGlobalBatch,
  kModel,  ///< the micro-batch's, of all MoE layers together, as Hugging Face's models do
};

/// The tokens among which an expert with a capacity chooses, where ranks share a micro-batch.
enum class CapacityScope {
  kSubSequence,  ///< each rank's own: nothing is exchanged, and drops depend on the layout
  kSequence,     ///< all of the micro-batch, as on one rank
};

enum class RopeScaling { kNone, kLinear, kDynamic, kYarn, kLlama3, kLongRope };

/// The rotary embedding. Scaled variants stretch a model trained on `original_length` tokens.
struct RopeConfig {
  double base = 10000.0;
  /// Share of a head that is rotated, its first elements (standard attention); 0: nothing is.
  double fraction = 1.0;
  /// Pairs are neighbours (2i, 2i + 1) instead of the two halves.
  bool interleaved = false;
  /// The rotated share turns as those pairs of the whole head would that turn fastest, whose halves
  /// they belong to (Gemma 4): the pairs are (i, i + head size / 2).
  bool proportional = false;
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1.0;
  int64_t max_length = 0;  ///< dynamic: beyond it the base grows with the sequence length
  /// yarn, llama3, longrope: the context that the model was trained for
  int64_t original_length = 0;
  double beta_fast = 32.0;      ///< yarn: turns in the original context above which nothing changes
  double beta_slow = 1.0;       ///< yarn: turns below which a frequency is divided by the factor
  bool truncate = true;         ///< yarn: whole indices as the borders of the ramp between them
  double attention_factor = 0;  ///< yarn: amplitude; 0: derived from factor and mscale
  double mscale = 0;            ///< yarn: DeepSeek's weights of the derived amplitude
  double mscale_all_dims = 0;   ///< yarn: also scales the scores of latent attention
  double low_frequency_factor = 1.0;   ///< llama3
  double high_frequency_factor = 4.0;  ///< llama3
  /// longrope: what the frequency of each pair is divided by, of sequences within original_length,
  /// and of those beyond it
  std::vector<double> short_factors;
  std::vector<double> long_factors;
  double short_mscale = 0;  ///< longrope: amplitude within original_length; 0: derived of factor
  double long_mscale = 0;   ///< longrope: amplitude beyond it
  bool operator==(const RopeConfig&) const = default;
};

/// What two layers must share to be the same program.
struct LayerKind {
  bool moe = false;
  bool window = false;
  bool mtp = false;    ///< of multi-token prediction: it joins its input with an embedding first
  bool delta = false;  ///< its mixer is a gated delta rule, not attention
  bool mamba = false;  ///< its mixer is Mamba-2
  bool conv = false;   ///< its mixer is a gated short convolution
  bool no_mixer = false;
  bool no_mlp = false;
  bool hash = false;  ///< its experts are chosen by a table of token ids
  Compression compression = Compression::kNone;
  /// Whether its mixer hands a state from token to token, of which generation keeps one a text.
  bool keeps_state() const { return delta || mamba || conv; }
  bool attends() const { return !keeps_state() && !no_mixer; }
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 takes the 0 of `<` for a pointer
  auto operator<=>(const LayerKind&) const = default;
};

/// The Mixture-of-Experts part of a model. `num_experts` 0 makes every layer dense.
struct MoeConfig {
  int64_t num_experts = 8;
  int64_t top_k = 2;
  int64_t inner_size = 1024;
  /// Biases of the routed experts' two matrices; the second's is weighted as their outputs are.
  bool mlp_bias = false;
  /// One inner size per expert; empty: all have `inner_size`.
  std::vector<int64_t> inner_sizes;
  int64_t first_dense_layers = 0;
  /// Every n-th layer (after the dense ones) has experts.
  int64_t every = 1;
  /// Layers that are dense whatever first_dense_layers and every say.
  std::vector<int64_t> dense_layers;
  ExpertPath experts = ExpertPath::kGrouped;
  int64_t block_size = 128;
  /// Probability before FC2 (its gradient from the saved pre-activation) instead of after it.
  bool memory_efficient = true;
  /// Whether products gather tokens as they read them, so that no expert-ordered copy is made.
  GatherFusion fuse_gather = GatherFusion::kAuto;
  /// Whether the products around experts' activations compute them
  /// (program/fusion/fuse_producers.h).
  bool fuse_activation = false;

  /// MoE layers whose tokens have the experts that a table gives their ids (ops/hash_experts),
  /// which nothing trains; the router's scores are their probabilities. They are not balanced.
  std::vector<int64_t> hash_layers;

  ScoreFunction score = ScoreFunction::kSoftmax;
  ScoreOrder score_order = ScoreOrder::kBeforeTopK;
  bool normalize_top_k = true;
  double score_scale = 1.0;
  /// Probabilities multiply what routed experts read, not what they give (Llama 4).
  bool probs_on_input = false;
  /// eps of SparseMixer (ops/sparse_mixer), which makes the probabilities instead: of each choice
  /// by a softmax over those experts whose logits are near the best that is left; 0: off.
  double sparse_mixer = 0.0;
  /// In training its experts are drawn with these probabilities.
  bool draw_experts = false;
  /// A learnt bias of the router's logits, unlike expert_bias also of the probabilities.
  bool router_bias = false;
  /// The router reads the layer's state by a norm of its own, divided by the root of its width,
  /// instead of what experts read (Gemma 4).
  bool router_norm = false;
  /// A learnt factor of each expert on its probabilities (ops/expert_scale).
  bool expert_scale = false;
  int64_t num_groups = 1;
  int64_t top_groups = 1;
  GroupScore group_score = GroupScore::kTopTwoSum;
  Routing routing = Routing::kTopK;
  /// A token takes the fewest of its top_k experts whose scores reach this share of all experts'
  /// (ops/top_p); 1: all top_k.
  double top_p = 1.0;
  /// Routed to like experts, behind these, but give the token back: nothing is dispatched or
  /// computed (ops/zero_experts).
  int64_t zero_experts = 0;
  /// Routes round-robin instead of by score, for measuring with perfect balance.
  bool force_balanced = false;
  /// In training, what routers read is multiplied by random factors from 1 - this to 1 + this
  /// (ops/jitter); with jitter_experts what routed experts read is, too.
  double router_jitter = 0.0;
  bool jitter_experts = false;

  double balance_coefficient = 0.01;
  BalanceTokens balance_scope = BalanceTokens::kMicroBatch;
  /// The balance loss compares groups of this many consecutive experts, such as those of a device.
  int64_t balance_group_size = 1;
  double z_loss_coefficient = 0.0;
  /// Auxiliary-loss-free balancing (DeepSeek-V3): a bias on the scores, for the choice only, moved
  /// by `bias_update_speed` a step. 0 switches it off.
  double bias_update_speed = 0.0;
  /// A bias that is there though nothing moves it, as in a loaded model.
  bool expert_bias = false;

  /// 0: dropless. Otherwise each expert takes at most ceil(T·K/E · factor) assignments.
  double capacity_factor = 0.0;
  bool pad_to_capacity = false;
  CapacityScope capacity_scope = CapacityScope::kSubSequence;
  /// This many consecutive experts share their capacities.
  int64_t capacity_group_size = 1;
  DropPolicy drop_policy = DropPolicy::kProbs;

  int64_t shared_inner_size = 0;
  bool shared_gate = false;
  /// Routed experts and the shared one each have norms of their own, of what they read and of what
  /// they give, before it is added up (Gemma 4).
  bool separate_norms = false;

  /// l: routed experts work on a projection of the token to this size, made after routing and
  /// before dispatch, and their sum is projected back (LatentMoE: Megatron-Core MoE, section 7.3).
  /// The router and the shared expert see the whole token. 0: no projections.
  int64_t latent_size = 0;

  /// Whether a full expert compares its tokens' probabilities: those of equal tokens differ by
  /// rounding alone, so layouts may drop different ones.
  bool drops_by_probability() const {
    const bool drops = capacity_factor > 0 && drop_policy == DropPolicy::kProbs;
    return num_experts > 0 && (drops || experts_choose());
  }
  bool experts_choose() const { return routing == Routing::kExpertChoice; }
  /// Experts of a token that are told apart for dispatch: where experts choose, perhaps all.
  int64_t choices() const { return experts_choose() ? num_experts : top_k; }
  /// What the router chooses from.
  int64_t router_outputs() const { return num_experts + zero_experts; }
  bool has_expert_bias() const { return expert_bias || bias_update_speed > 0; }
  /// F_e of every expert.
  std::vector<int64_t> expert_sizes() const;
};

/// A decoder-only language model, with norms before attention and MLP and perhaps behind them.
struct ModelConfig {
  int64_t vocab_size = 0;  ///< 0: the tokenizer's, rounded up to a multiple of 64
  int64_t hidden_size = 256;
  int64_t num_layers = 4;
  int64_t num_heads = 4;
  int64_t num_kv_heads = 0;  ///< 0: as many as num_heads
  int64_t head_size = 0;     ///< 0: hidden_size / num_heads
  int64_t value_size = 0;    ///< of a value head of standard attention; 0: head_size
  int64_t inner_size = 0;  ///< of dense layers; 0: 4 · hidden_size, rounded for gated activations
  int64_t window = 0;      ///< attention window in tokens; 0: none
  WindowKind window_kind = WindowKind::kSliding;
  /// Layers with the window; empty: all.
  std::vector<int64_t> window_layers;
  /// Layers with the window are rotated as `window_rope` says, the others as `rope` does.
  bool own_window_rope = false;
  int64_t window_heads = 0;      ///< of layers with the window; 0: num_heads
  int64_t window_kv_heads = 0;   ///< of layers with the window; 0: num_kv_heads
  int64_t window_head_size = 0;  ///< of layers with the window; 0: head_size
  bool window_sinks = false;     ///< attention_sinks in layers with the window alone
  /// Layers whose mixer is a gated delta rule, sized by `delta`; the others have attention.
  std::vector<int64_t> delta_layers;
  /// Layers whose mixer is Mamba-2, sized by `mamba`.
  std::vector<int64_t> mamba_layers;
  /// Layers whose mixer is a gated short convolution, sized by `conv`.
  std::vector<int64_t> conv_layers;
  /// Layers of an MLP or experts alone, and of a mixer alone.
  std::vector<int64_t> layers_without_mixer;
  std::vector<int64_t> layers_without_mlp;
  AttentionKind attention = AttentionKind::kStandard;
  QkNorm qk_norm = QkNorm::kNone;
  bool norm_after_rotation = false;  ///< queries and keys are rotated, then normed (Hunyuan)
  /// Layers without a window have no value projection: values are what keys are made of, neither
  /// normed nor rotated (Gemma 4).
  bool keys_as_values = false;
  bool value_norm = false;  ///< RMSNorm of each value head, without a weight
  bool qkv_bias = false;    ///< latent attention: on the projections into the latents
  bool output_bias = false;
  /// A learnt logit of each head that joins the softmax's denominator (ops/attention_sink).
  bool attention_sinks = false;
  /// What attention gives is multiplied by `gate_function` of a projection of the hidden state
  /// (Gated Attention for Large Language Models: Qiu et al., 2025).
  bool attention_gate = false;
  AttentionGate gate_function = AttentionGate::kSigmoid;
  bool mlp_bias = false;  ///< of dense and shared MLPs; routed experts have moe.mlp_bias
  Activation activation = Activation::kSwiGLU;
  NormKind norm = NormKind::kRms;
  /// What a clamped SwiGLU clamps its inputs to; 0: as the published models (published_limit).
  double swiglu_limit = 0;
  double norm_eps = 1e-5;
  /// What attention and MLP or experts give is normed before it joins the hidden states (Gemma 2
  /// Technical Report: Gemma Team, 2024, table 1).
  bool post_norms = false;
  /// The hidden states are so many streams, of which mixer and MLP read a weighted sum each, and
  /// which they join and mix by weights of their own (manifold-constrained hyper-connections, mHC:
  /// Xie et al., 2026; ops/stream_weights); 1: one stream, to which they add.
  int64_t residual_streams = 1;
  int64_t residual_sinkhorn_iterations = 20;
  double residual_eps = 1e-6;
  /// A layer multiplies the hidden states that it gives by a number, which is loaded, not trained.
  bool layer_scalars = false;
  /// Granite's multipliers (maximal update parametrization: Yang et al., Tensor Programs V, 2022):
  /// of the embedding's rows, and of what attention and MLP add to the hidden states.
  double embedding_multiplier = 1.0;
  double residual_multiplier = 1.0;
  double attention_multiplier = 0;  ///< factor on the attention scores; 0: 1 / sqrt(head_dim)
  double value_multiplier = 1.0;    ///< factor on attention's values (MiMo-V2)
  /// In layers without a rotation the query at position p is multiplied by 1 + temperature_scale ·
  /// log(1 + floor((p + 1) / temperature_length)), as Llama 4 has it (after Scalable-Softmax:
  /// Nakanishi, 2025); 0: by nothing.
  double temperature_scale = 0;
  int64_t temperature_length = 8192;
  double logits_divisor = 1.0;  ///< of the head's logits
  double logit_softcap = 0;     ///< c: logits become c · tanh(logit / c); 0: as they are
  bool head_bias = false;       ///< a learnt bias of the head's logits
  bool tie_embeddings = true;
  /// A token whose embedding takes no gradient, as PyTorch's padding_idx; -1: none.
  int64_t padding_token = -1;
  double init_deviation = 0.02;
  /// D: this many tokens beyond the next one are predicted in training, each by a layer more
  /// (multi-token prediction: DeepSeek-V3, section 2.2). They are numbered on behind the decoder's
  /// layers and are of the kind of the last of these, but that compressed attention sees its window
  /// alone, as in DeepSeek-V4.
  int64_t mtp_layers = 0;
  /// Each reads the states before it behind the norm of the head that reads them too, as published
  /// models' do, instead of before that norm.
  bool mtp_normed = false;
  /// λ: the mean of the D losses enters the objective times this.
  double mtp_loss_coefficient = 0.3;
  RopeConfig rope;
  RopeConfig window_rope;
  RopeConfig compressed_rope;  ///< of layers with compressed entries
  LatentConfig latent;
  CompressedConfig compressed;
  IndexConfig index;
  DeltaConfig delta;
  MambaConfig mamba;
  ConvConfig conv;
  MoeConfig moe;
  LoraConfig lora;

  bool has_streams() const { return residual_streams > 1; }
  /// Width of the hidden states between layers.
  int64_t state_width() const { return residual_streams * hidden_size; }
  bool is_latent() const { return attention == AttentionKind::kLatent; }
  bool is_compressed() const { return attention == AttentionKind::kCompressed; }
  /// KV heads that attention sees; latent attention makes one for each query head, compressed
  /// attention one for all.
  int64_t kv_heads() const {
    if (is_compressed()) return 1;
    return num_kv_heads > 0 && !is_latent() ? num_kv_heads : num_heads;
  }
  /// Size of a query or key head.
  int64_t head_dim() const;
  int64_t value_dim() const;
  /// Whether some layer's queries have temperatures.
  bool has_temperatures() const;
  /// Whether layers with a window see chunks.
  bool has_chunks() const { return window > 0 && window_kind == WindowKind::kChunked; }
  /// Logits of attention's gates.
  int64_t gate_width() const {
    return gate_function == AttentionGate::kSoftplusOfHeads ? num_heads : num_heads * value_dim();
  }
  /// The model as a layer of this kind has it: rotation, heads, sinks, norms of queries and keys,
  /// and temperatures are that layer's.
  ModelConfig of_layer(LayerKind kind) const;
  /// Elements of a head that `rope` rotates.
  int64_t rotary_dim() const;
  /// Factor on the attention scores, that of a stretched rotation included; 0: 1 / sqrt(head_dim).
  double attention_scale() const;
  int64_t dense_inner_size() const;
  ActivationFunction activation_function() const { return {activation, swiglu_limit}; }
  bool is_gated() const { return tessera::is_gated(activation); }
  bool is_moe_layer(int64_t layer) const;
  bool has_window(int64_t layer) const;
  bool is_delta_layer(int64_t layer) const;
  bool is_mamba_layer(int64_t layer) const;
  bool is_conv_layer(int64_t layer) const;
  Compression compression(int64_t layer) const;
  bool has_mixer(int64_t layer) const;
  bool has_mlp(int64_t layer) const;  ///< dense, or of experts
  /// Whether its mixer is attention.
  bool is_attention_layer(int64_t layer) const { return layer_kind(layer).attends(); }
  /// Whether some mixer hands a state from token to token.
  bool has_states() const {
    return !delta_layers.empty() || !mamba_layers.empty() || !conv_layers.empty();
  }
  bool is_hash_layer(int64_t layer) const;
  bool is_mtp_layer(int64_t layer) const { return layer >= num_layers; }
  LayerKind layer_kind(int64_t layer) const {
    return {.moe = is_moe_layer(layer),
            .window = has_window(layer),
            .mtp = is_mtp_layer(layer),
            .delta = is_delta_layer(layer),
            .mamba = is_mamba_layer(layer),
            .conv = is_conv_layer(layer),
            .no_mixer = !has_mixer(layer),
            .no_mlp = !has_mlp(layer),
            .hash = is_hash_layer(layer),
            .compression = compression(layer)};
  }
  /// Decoder layers and those of multi-token prediction.
  int64_t all_layers() const { return num_layers + mtp_layers; }
  LayerCounts layer_counts() const { return {num_layers, mtp_layers, mtp_normed}; }
  /// Of all layers.
  int64_t num_moe_layers() const;
  /// Of those whose loads training evens out: not by a table of token ids.
  int64_t num_balanced_layers() const;
  /// Whether some layer has an MLP without experts.
  bool has_dense_layers() const;
  /// Width of what routed experts read and write: rows that are dispatched are so wide.
  int64_t expert_width() const { return moe.latent_size > 0 ? moe.latent_size : hidden_size; }
};

/// The model without its layers of multi-token prediction, as all but training uses it.
ModelConfig without_prediction(ModelConfig config);
/// The model without adapters, as it is where they are merged.
ModelConfig without_adapters(ModelConfig config);

/// Binds every key of [model], [rope], [window_rope], [compressed_rope], [latent], [compressed],
/// [index], [delta], [mamba], [conv] and [moe].
void add_model_options(ConfigSchema& schema, ModelConfig& config);

/// Refuses impossible combinations with the arithmetic that fails and what to do. `vocab_size` must
/// be resolved.
void validate(const ModelConfig& config);

/// Published and laptop-sized shapes, as TOML for ConfigSchema::load_preset.
struct Preset {
  std::string name;
  std::string description;
  std::string toml;
};
const std::vector<Preset>& presets();
/// Throws UserError with the nearest name where there is none.
const Preset& find_preset(const std::string& name);

/// Weights of the whole model, and those that one token meets (embedding table counted in neither
/// sense of FLOPs but in both counts; of the routed experts top_k).
struct ParameterCount {
  int64_t total = 0;
  int64_t active = 0;
  int64_t trained = 0;  ///< of the total
};
/// Counts that 64 bits do not hold are the largest that they do.
ParameterCount count_parameters(const ModelConfig& config);

/// Refuses a model of more parameters than can be, with its sizes; part of validate().
void check_parameter_count(const ModelConfig& config);

}  // namespace tessera
