#include "model/config/config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.h"
#include "core/text/nearest.h"
#include "model/config/activation_options.h"
#include "model/config/attention_options.h"
#include "model/config/compressed_options.h"
#include "model/config/conv_options.h"
#include "model/config/delta_options.h"
#include "model/config/index_options.h"
#include "model/config/limits.h"
#include "model/config/mamba_options.h"
#include "model/config/norm_options.h"
#include "model/config/residual_options.h"
#include "model/config/rope_options.h"
#include "model/config/rotary.h"
#include "model/config/router_options.h"

namespace tessera {
namespace {

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

bool contains(const std::vector<int64_t>& layers, int64_t layer) {
  return std::ranges::find(layers, layer) != layers.end();
}

constexpr Range kMultiplier = {.min = kMinMultiplier, .max = kMaxMultiplier};

void add_shape_options(ConfigSchema& schema, ModelConfig& config) {
  schema.add("model.vocab_size", &config.vocab_size,
             "Vocabulary; 0 takes the tokenizer's, rounded up to a multiple of 64",
             between(0, kMaxVocabulary));
  schema.add("model.hidden_size", &config.hidden_size, "Width of the residual stream",
             between(1, kMaxWidth));
  schema.add("model.num_layers", &config.num_layers, "Decoder layers", between(1, kMaxLayers));
  schema.add("model.num_heads", &config.num_heads, "Query heads", between(1, kMaxHeads));
  schema.add("model.num_kv_heads", &config.num_kv_heads,
             "Key and value heads; 0: as many as query heads", between(0, kMaxHeads));
  schema.add("model.head_size", &config.head_size, "Size of a head; 0: hidden_size / num_heads",
             between(0, kMaxWidth));
  schema.add("model.inner_size", &config.inner_size,
             "Inner size of dense layers; 0: 4 times hidden_size, two thirds of that when gated",
             between(0, kMaxWidth));
  schema.add("model.window", &config.window, "Attention window in tokens; 0: none",
             between(0, kMaxLength));
  schema.add_enum("model.window_kind", &config.window_kind,
                  {{"sliding", WindowKind::kSliding}, {"chunked", WindowKind::kChunked}},
                  "What layers with the window see: the last model.window tokens; or of their "
                  "document's chunks of that many tokens the own one's, as Llama 4 has it");
  schema.add("model.window_layers", &config.window_layers,
             "Layers with the window, counted from 0; empty: all", between(0, kMaxLayers - 1));
  schema.add("model.layer_scalars", &config.layer_scalars,
             "Each layer multiplies its hidden states by a number that is loaded and not trained, "
             "as Gemma 4 has it");
  schema.add("model.embedding_multiplier", &config.embedding_multiplier,
             "Factor on the embedding's rows, as Granite has it", kMultiplier);
  schema.add("model.residual_multiplier", &config.residual_multiplier,
             "Factor on what attention and MLP add to the hidden states", kMultiplier);
  schema.add("model.logits_divisor", &config.logits_divisor, "What logits are divided by",
             kMultiplier);
  schema.add("model.logit_softcap", &config.logit_softcap,
             "c: logits become c * tanh(logit / c), as Gemma caps them; 0: they stay",
             between(0, kMaxMultiplier));
  schema.add("model.head_bias", &config.head_bias, "A learnt bias of the head's logits");
  schema.add("model.tie_embeddings", &config.tie_embeddings, "One table for embedding and head");
  schema.add("model.padding_token", &config.padding_token,
             "Token whose embedding takes no gradient (PyTorch's padding_idx); -1: none",
             between(-1, kMaxVocabulary - 1));
  schema.add("model.init_deviation", &config.init_deviation,
             "Standard deviation of initial weights", between(kMinDeviation, kMaxDeviation));
  schema.add("model.mtp_layers", &config.mtp_layers,
             "Tokens beyond the next that training predicts too, each by a layer more (multi-token "
             "prediction)",
             between(0, 64));
  schema.add("model.mtp_normed", &config.mtp_normed,
             "Layers of multi-token prediction read the states before them behind the head's norm, "
             "as those of DeepSeek-V3, GLM-4.5 and Qwen3-Next do");
  schema.add("model.mtp_loss_coefficient", &config.mtp_loss_coefficient,
             "Weight of the mean loss of these predictions; DeepSeek-V3 has 0.3 for two thirds of "
             "its training, then 0.1",
             above(0));
}

void add_latent_options(ConfigSchema& schema, LatentConfig& latent) {
  schema.add("latent.query_rank", &latent.query_rank, "Size of the query latent; 0: none",
             between(0, kMaxWidth));
  schema.add("latent.kv_rank", &latent.kv_rank, "Size of the key-value latent",
             between(1, kMaxWidth));
  schema.add("latent.nope_size", &latent.nope_size, "Elements of a head without a position",
             between(1, kMaxWidth));
  schema.add("latent.rope_size", &latent.rope_size, "Rotated elements of a head",
             between(2, kMaxWidth));
  schema.add("latent.value_size", &latent.value_size, "Size of a value head",
             between(1, kMaxWidth));
  schema.add("latent.norm_eps", &latent.norm_eps, "Epsilon of the latents' RMSNorm", kEpsilonRange);
}

void add_expert_options(ConfigSchema& schema, MoeConfig& moe) {
  schema.add("moe.num_experts", &moe.num_experts, "Routed experts of a layer; 0: dense layers only",
             between(0, kMaxExperts));
  schema.add("moe.top_k", &moe.top_k, "Experts that a token goes to", between(1, kMaxExperts));
  schema.add("moe.inner_size", &moe.inner_size, "Inner size of an expert", between(1, kMaxWidth));
  schema.add("moe.inner_sizes", &moe.inner_sizes,
             "Inner size of each expert where they differ; empty: inner_size",
             between(1, kMaxWidth));
  schema.add("moe.mlp_bias", &moe.mlp_bias, "Biases of the routed experts' two matrices");
  schema.add("moe.first_dense_layers", &moe.first_dense_layers, "Leading layers without experts",
             between(0, kMaxLayers));
  schema.add("moe.every", &moe.every, "Every n-th layer after those has experts",
             between(1, kMaxLayers));
  schema.add("moe.dense_layers", &moe.dense_layers,
             "Further layers without experts, counted from 0", between(0, kMaxLayers - 1));
  schema.add_enum(
      "moe.experts", &moe.experts,
      {{"grouped", ExpertPath::kGrouped}, {"block_sparse", ExpertPath::kBlockSparse}},
      "Implementation of the experts: grouped products, or block-sparse products as in MegaBlocks");
  schema.add("moe.block_size", &moe.block_size, "Block of block_sparse: 8, 16, 32, 64 or 128",
             between(1, 128));
  schema.add("moe.memory_efficient", &moe.memory_efficient,
             "Apply the probability before FC2, so that expert outputs need not be kept (grouped "
             "experts)");
  schema.add_enum("moe.fuse_gather", &moe.fuse_gather,
                  {{"auto", GatherFusion::kAuto},
                   {"always", GatherFusion::kAlways},
                   {"never", GatherFusion::kNever}},
                  "Grouped experts gather tokens as their products read them, instead of from a "
                  "copy in the experts' order; auto: where that is faster on a GPU");
  schema.add("moe.fuse_activation", &moe.fuse_activation,
             "Grouped experts' activations and their gradients are computed by the products around "
             "them: less working memory, a little slower on a GPU");
  schema.add("moe.capacity_factor", &moe.capacity_factor,
             "0: dropless; otherwise an expert takes at most ceil(T*K/E * factor) assignments",
             at_least(0));
  schema.add(
      "moe.balance_group_size", &moe.balance_group_size,
      "The balance loss compares groups of this many neighbouring experts, such as a device's",
      between(1, kMaxExperts));
  schema.add("moe.capacity_group_size", &moe.capacity_group_size,
             "This many neighbouring experts share their capacities", between(1, kMaxExperts));
  schema.add_enum(
      "moe.capacity_scope", &moe.capacity_scope,
      {{"sub_sequence", CapacityScope::kSubSequence}, {"sequence", CapacityScope::kSequence}},
      "Tokens that compete for an expert's capacity where ranks share a micro-batch: "
      "each rank's own, or all");
  schema.add("moe.pad_to_capacity", &moe.pad_to_capacity, "Pad each expert's rows to its capacity");
  schema.add_enum("moe.drop_policy", &moe.drop_policy,
                  {{"probability", DropPolicy::kProbs}, {"position", DropPolicy::kPosition}},
                  "Which assignments a full expert drops: the least probable or the last");
  schema.add("moe.shared_inner_size", &moe.shared_inner_size,
             "Inner size of the shared expert; 0: none", between(0, kMaxWidth));
  schema.add("moe.shared_gate", &moe.shared_gate,
             "Gate the shared expert by a sigmoid of the token");
  schema.add("moe.separate_norms", &moe.separate_norms,
             "Routed experts and the shared one have norms of their own, of what they read and "
             "of what they give");
  schema.add("moe.latent_size", &moe.latent_size,
             "Size to which tokens are projected for dispatch and routed experts (LatentMoE); 0: "
             "none",
             between(0, kMaxWidth));
}

void validate_heads(const ModelConfig& config) {
  const bool has_size = config.head_size > 0 || config.is_latent();
  require(has_size || config.hidden_size % config.num_heads == 0,
          "model.hidden_size {} is not divisible by model.num_heads {}; choose a divisor or set "
          "model.head_size",
          config.hidden_size, config.num_heads);
  require(config.num_heads % config.kv_heads() == 0,
          "model.num_heads {} is not a multiple of model.num_kv_heads {}; every KV head serves the "
          "same number of "
          "query heads",
          config.num_heads, config.kv_heads());
}

void validate_latent(const ModelConfig& config) {
  require(
      config.qk_norm == QkNorm::kNone,
      "model.qk_norm does not go with model.attention = \"latent\", which has norms of its own");
  require(config.num_kv_heads == 0 || config.num_kv_heads == config.num_heads,
          "model.num_kv_heads {} does not go with model.attention = \"latent\", where each of the "
          "{} query heads has a key head; leave it 0",
          config.num_kv_heads, config.num_heads);
}

void validate_layer_list(const std::vector<int64_t>& layers, int64_t num_layers, const char* key) {
  for (const int64_t layer : layers) {
    require(layer < num_layers, "{} lists layer {}; the last of the {} layers is {}", key, layer,
            num_layers, num_layers - 1);
  }
}

void validate_layers(const ModelConfig& config) {
  validate_layer_list(config.window_layers, config.num_layers, "model.window_layers");
  validate_layer_list(config.delta_layers, config.num_layers, "model.delta_layers");
  validate_layer_list(config.mamba_layers, config.num_layers, "model.mamba_layers");
  validate_layer_list(config.conv_layers, config.num_layers, "model.conv_layers");
  validate_layer_list(config.compressed.sparse_layers, config.num_layers,
                      "compressed.sparse_layers");
  validate_layer_list(config.compressed.heavy_layers, config.num_layers, "compressed.heavy_layers");
  validate_layer_list(config.layers_without_mixer, config.num_layers, "model.layers_without_mixer");
  validate_layer_list(config.layers_without_mlp, config.num_layers, "model.layers_without_mlp");
  validate_layer_list(config.moe.dense_layers, config.num_layers, "moe.dense_layers");
  require(config.window_layers.empty() || config.window > 0,
          "model.window_layers needs a model.window above 0");
  validate_delta(config);
  validate_mixers(config);
}

/// Groups of neighbouring experts that the balance loss compares, or that share a capacity.
void validate_group_sizes(const MoeConfig& moe) {
  const auto check = [&](int64_t size, const char* key) {
    require(moe.num_experts % size == 0,
            "{} {} does not divide moe.num_experts {}; the nearest that does is {}", key, size,
            moe.num_experts, nearest_divisors(moe.num_experts, size));
  };
  check(moe.balance_group_size, "moe.balance_group_size");
  check(moe.capacity_group_size, "moe.capacity_group_size");
  if (moe.capacity_group_size == 1) return;
  require(moe.capacity_factor > 0,
          "moe.capacity_group_size {} shares capacities, which moe.capacity_factor 0 does not "
          "give; set a factor above 0 (1.0 is the expected load) or a group size of 1",
          moe.capacity_group_size);
  require(!moe.pad_to_capacity,
          "moe.pad_to_capacity pads every expert to a capacity of its own, and "
          "moe.capacity_group_size {} makes experts share one; switch one of them off",
          moe.capacity_group_size);
}

void validate_block_sparse(const MoeConfig& moe) {
  constexpr std::array kBlockSizes = {8, 16, 32, 64, 128};
  require(std::ranges::find(kBlockSizes, moe.block_size) != kBlockSizes.end(),
          "moe.block_size {} is not supported; choose one of {}", moe.block_size,
          fmt::join(kBlockSizes, ", "));
  for (const int64_t size : moe.expert_sizes()) {
    require(
        size % moe.block_size == 0,
        "expert inner size {} is not a multiple of moe.block_size {}, which moe.experts = "
        "\"block_sparse\" needs; the nearest is {}{}",
        size, moe.block_size,
        size < moe.block_size ? "" : fmt::format("{} or ", size / moe.block_size * moe.block_size),
        round_up(size, moe.block_size));
  }
  require(moe.memory_efficient,
          "moe.experts = \"block_sparse\" applies the probability before FC2; moe.memory_efficient "
          "= false works with "
          "\"grouped\" only");
  require(!moe.probs_on_input,
          "moe.experts = \"block_sparse\" multiplies what experts give by the probability; "
          "moe.probs_on_input works with \"grouped\" only");
}

void validate_experts(const MoeConfig& moe) {
  require(moe.top_k <= moe.num_experts, "moe.top_k {} exceeds moe.num_experts {}", moe.top_k,
          moe.num_experts);
  require(
      moe.inner_sizes.empty() || static_cast<int64_t>(moe.inner_sizes.size()) == moe.num_experts,
      "moe.inner_sizes lists {} sizes for {} experts", moe.inner_sizes.size(), moe.num_experts);
  require(!moe.pad_to_capacity || moe.capacity_factor > 0,
          "moe.pad_to_capacity needs a moe.capacity_factor above 0; 1.0 is the expected load");
  require(!moe.shared_gate || moe.shared_inner_size > 0,
          "moe.shared_gate needs a moe.shared_inner_size above 0");
  require(!moe.separate_norms || moe.shared_inner_size > 0,
          "moe.separate_norms are of routed experts and a shared one, and moe.shared_inner_size is "
          "0; set it, or leave moe.separate_norms out");
  validate_router(moe);
  validate_group_sizes(moe);
  if (moe.experts == ExpertPath::kBlockSparse) validate_block_sparse(moe);
}

void validate_latent_experts(const ModelConfig& config) {
  require(config.moe.latent_size < config.hidden_size,
          "moe.latent_size {} is not below model.hidden_size {}, so the projections would save "
          "nothing; choose at most {}, or 0 for experts at the full size",
          config.moe.latent_size, config.hidden_size, config.hidden_size - 1);
}

}  // namespace

std::vector<int64_t> MoeConfig::expert_sizes() const {
  if (!inner_sizes.empty()) return inner_sizes;
  return std::vector<int64_t>(num_experts, inner_size);
}

int64_t ModelConfig::dense_inner_size() const {
  if (inner_size > 0) return inner_size;
  return is_gated() ? round_up(8 * hidden_size / 3, 64) : 4 * hidden_size;
}

int64_t ModelConfig::head_dim() const {
  if (is_latent()) return latent.nope_size + latent.rope_size;
  return head_size > 0 ? head_size : hidden_size / num_heads;
}

int64_t ModelConfig::value_dim() const {
  if (is_latent()) return latent.value_size;
  return value_size > 0 ? value_size : head_dim();
}

int64_t ModelConfig::rotary_dim() const {
  if (is_latent()) return rope.fraction == 0 ? 0 : latent.rope_size;
  if (is_compressed()) return rope.fraction == 0 ? 0 : compressed.rope_size;
  if (rope.proportional && rope.fraction > 0) return head_dim();
  return static_cast<int64_t>(static_cast<double>(head_dim()) * rope.fraction);
}

ModelConfig ModelConfig::of_layer(LayerKind kind) const {
  ModelConfig own = *this;
  if (kind.window && own_window_rope) own.rope = window_rope;
  if (kind.compression != Compression::kNone) own.rope = compressed_rope;
  if (kind.window && window_heads > 0) own.num_heads = window_heads;
  if (kind.window && window_kv_heads > 0) own.num_kv_heads = window_kv_heads;
  if (kind.window && window_head_size > 0) own.head_size = window_head_size;
  if (kind.window && window_sinks) own.attention_sinks = true;
  const bool rotated = own.rotary_dim() > 0;
  if (rotated) own.temperature_scale = 0;
  if (!rotated && qk_norm == QkNorm::kL2) own.qk_norm = QkNorm::kNone;
  if (kind.window) own.keys_as_values = false;
  if (kind.hash) {
    own.moe.routing = Routing::kTopK;
    own.moe.expert_bias = false;
    own.moe.bias_update_speed = 0;
  }
  own.own_window_rope = own.window_sinks = false;
  own.window_heads = own.window_kv_heads = own.window_head_size = 0;
  own.window_rope = {};
  return own;
}

bool ModelConfig::has_temperatures() const {
  if (temperature_scale == 0) return false;  // of_layer() copies all, and layers have no other
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const LayerKind kind = layer_kind(layer);
    if (kind.attends() && of_layer(kind).temperature_scale != 0) return true;
  }
  return false;
}

double ModelConfig::attention_scale() const {
  if (!is_latent() || rope.scaling == RopeScaling::kNone || rope.mscale_all_dims == 0)
    return attention_multiplier;
  const double scale = yarn_scale(rope.factor, rope.mscale_all_dims);
  if (attention_multiplier > 0) return scale * scale * attention_multiplier;
  return scale * scale / std::sqrt(static_cast<double>(head_dim()));
}

bool ModelConfig::has_window(int64_t layer) const {
  if (is_mtp_layer(layer)) return has_window(num_layers - 1);
  const bool attends =
      has_mixer(layer) && !is_delta_layer(layer) && !is_mamba_layer(layer) && !is_conv_layer(layer);
  return window > 0 && attends && (window_layers.empty() || contains(window_layers, layer));
}

bool ModelConfig::is_delta_layer(int64_t layer) const {
  return contains(delta_layers, is_mtp_layer(layer) ? num_layers - 1 : layer);
}

bool ModelConfig::is_mamba_layer(int64_t layer) const {
  return contains(mamba_layers, is_mtp_layer(layer) ? num_layers - 1 : layer);
}

Compression ModelConfig::compression(int64_t layer) const {
  if (is_mtp_layer(layer)) return Compression::kNone;
  if (contains(compressed.sparse_layers, layer)) return Compression::kSparse;
  return contains(compressed.heavy_layers, layer) ? Compression::kHeavy : Compression::kNone;
}

bool ModelConfig::is_conv_layer(int64_t layer) const {
  return contains(conv_layers, is_mtp_layer(layer) ? num_layers - 1 : layer);
}

bool ModelConfig::has_mixer(int64_t layer) const {
  return !contains(layers_without_mixer, layer);
}

bool ModelConfig::has_mlp(int64_t layer) const {
  return !contains(layers_without_mlp, layer);
}

bool ModelConfig::has_dense_layers() const {
  for (int64_t layer = 0; layer < all_layers(); ++layer) {
    if (has_mlp(layer) && !is_moe_layer(layer)) return true;
  }
  return false;
}

bool ModelConfig::is_moe_layer(int64_t layer) const {
  if (is_mtp_layer(layer)) return is_moe_layer(num_layers - 1);
  if (!has_mlp(layer)) return false;
  if (moe.num_experts == 0 || layer < moe.first_dense_layers) return false;
  if (contains(moe.dense_layers, layer)) return false;
  return (layer - moe.first_dense_layers) % moe.every == moe.every - 1;
}

int64_t ModelConfig::num_moe_layers() const {
  int64_t count = 0;
  for (int64_t layer = 0; layer < all_layers(); ++layer) count += is_moe_layer(layer) ? 1 : 0;
  return count;
}

bool ModelConfig::is_hash_layer(int64_t layer) const {
  return contains(moe.hash_layers, layer);
}

int64_t ModelConfig::num_balanced_layers() const {
  int64_t count = 0;
  for (int64_t layer = 0; layer < all_layers(); ++layer)
    count += is_moe_layer(layer) && !is_hash_layer(layer) ? 1 : 0;
  return count;
}

ModelConfig without_prediction(ModelConfig config) {
  config.mtp_layers = 0;
  config.mtp_normed = false;
  return config;
}

ModelConfig without_adapters(ModelConfig config) {
  config.lora = {};
  return config;
}

void add_model_options(ConfigSchema& schema, ModelConfig& config) {
  add_shape_options(schema, config);
  add_norm_options(schema, config);
  add_activation_options(schema, config);
  add_residual_options(schema, config);
  add_attention_options(schema, config);
  add_rope_options(schema, config.rope, "rope");
  add_rope_options(schema, config.window_rope, "window_rope");
  add_rope_options(schema, config.compressed_rope, "compressed_rope");
  add_latent_options(schema, config.latent);
  add_compressed_options(schema, config.compressed);
  add_index_options(schema, config.index);
  add_delta_options(schema, config.delta);
  add_mamba_options(schema, config.mamba);
  add_conv_options(schema, config.conv);
  add_expert_options(schema, config.moe);
  add_router_options(schema, config.moe);
}

void validate(const ModelConfig& config) {
  require(config.vocab_size > 0, "model.vocab_size is not set and no tokenizer gives it");
  require(config.vocab_size <= kMaxVocabulary,
          "a vocabulary of {} tokens is too large; at most {} are supported", config.vocab_size,
          kMaxVocabulary);
  require(config.padding_token < config.vocab_size,
          "model.padding_token {} is outside the vocabulary of {}", config.padding_token,
          config.vocab_size);
  validate_heads(config);
  if (config.is_latent()) validate_latent(config);
  validate_compressed(config);
  validate_norms(config);
  validate_activation(config);
  validate_residual(config);
  validate_index(config);
  validate_attention(config);
  validate_rope(config);
  validate_layers(config);
  require(config.moe.num_experts > 0 || config.moe.zero_experts == 0,
          "moe.zero_experts {} are beside other experts, and moe.num_experts is 0; set one of them",
          config.moe.zero_experts);
  if (config.moe.num_experts > 0) {
    validate_experts(config.moe);
    validate_latent_experts(config);
  }
  validate_hash_layers(config);
  validate_lora(config);
  check_parameter_count(config);
}

}  // namespace tessera
