#include "hf/config/write_config.h"

#include <fmt/ranges.h>
#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "hf/config/config_json.h"
#include "hf/config/gemma_json.h"
#include "hf/config/hf_config.h"
#include "hf/config/index_json.h"
#include "hf/config/kimi_json.h"
#include "hf/config/mamba_json.h"
#include "hf/config/phi_json.h"
#include "hf/config/plain_model.h"
#include "hf/config/rope_json.h"
#include "hf/config/v4_json.h"

namespace tessera {
namespace {

using nlohmann::json;

/// Sets keys that the family has, and only those.
class ConfigWriter {
 public:
  explicit ConfigWriter(const Family& family)
      : family_(family), values_(json::parse(family.defaults.begin(), family.defaults.end())) {}

  void set(const char* key, json value) {
    if (values_.contains(key)) values_[key] = std::move(value);
  }
  void put(const char* key, json value) { values_[key] = std::move(value); }
  void drop(const char* key) { values_.erase(key); }
  const Family& family() const { return family_; }
  json& values() { return values_; }
  std::string text() const {
    json named = json::object();
    for (const auto& [key, value] : values_.items()) named[file_key(family_, key)] = value;
    return named.dump(2) + "\n";
  }

 private:
  const Family& family_;
  json values_;
};

const char* activation_name_of(Activation activation) {
  // Families of their own have clamped ones.
  if (activation == Activation::kSwiGLUOai || activation == Activation::kSwiGLUClamped)
    return "silu";
  if (activation == Activation::kRelu2) return "relu2";
  if (activation == Activation::kGeGLU || activation == Activation::kGelu) return "gelu";
  const bool approximate =
      activation == Activation::kGeGLUTanh || activation == Activation::kGeluTanh;
  return approximate ? "gelu_pytorch_tanh" : "silu";
}

void write_shape(ConfigWriter& config, const ModelConfig& model) {
  config.set("vocab_size", model.vocab_size);
  config.set("pad_token_id", model.padding_token < 0 ? json() : json(model.padding_token));
  config.set("hidden_size", model.hidden_size);
  config.set("num_hidden_layers", model.num_layers);
  config.set("num_attention_heads", model.num_heads);
  config.set("num_key_value_heads", model.kv_heads());
  config.set("head_dim", model.head_dim());
  config.set("rms_norm_eps", model.norm_eps);
  config.put("hidden_act", activation_name_of(model.activation));
  config.set("swiglu_limit", swiglu_limit(model));
  config.put("initializer_range", model.init_deviation);
  config.put("tie_word_embeddings", model.tie_embeddings);
  config.set("embedding_multiplier", model.embedding_multiplier);
  config.set("mup_enabled", model.embedding_multiplier != 1);
  config.set("residual_multiplier", model.residual_multiplier);
  const double scores = model.attention_multiplier;
  config.set("attention_multiplier", scores > 0 ? scores : plain_scale(model));
  config.set("logits_scaling", model.logits_divisor);
  const bool one_size =
      config.family().is_moe() && !config.family().has_key("moe_intermediate_size");
  config.set("intermediate_size_mlp", model.dense_inner_size());
  config.set("intermediate_size", one_size ? model.moe.inner_size : model.dense_inner_size());
}

void write_attention(ConfigWriter& config, const ModelConfig& model) {
  config.set("attention_bias", model.qkv_bias);
  config.set("qkv_bias", model.qkv_bias);
  config.set("mlp_bias", model.mlp_bias);
  config.set("use_qk_norm", model.qk_norm == QkNorm::kHead || model.qk_norm == QkNorm::kL2);
  config.set("attn_temperature_tuning", model.temperature_scale != 0);
  if (model.temperature_scale != 0) config.set("attn_scale", model.temperature_scale);
  config.set("floor_scale", model.temperature_length);
  const LatentConfig& latent = model.latent;
  config.set("q_lora_rank", latent.query_rank > 0 ? json(latent.query_rank) : json());
  config.set("kv_lora_rank", latent.kv_rank);
  config.set("qk_nope_head_dim", latent.nope_size);
  config.set("qk_rope_head_dim", latent.rope_size);
  config.set("v_head_dim", model.value_dim());
  config.set("attention_value_scale", model.value_multiplier);
}

void write_heads_by_layer(ConfigWriter& config, const ModelConfig& model) {
  json heads = json::array();
  for (int64_t layer = 0; layer < model.num_layers; ++layer)
    heads.push_back(model.of_layer(model.layer_kind(layer)).num_heads);
  config.set("num_attention_heads_per_layer", std::move(heads));
  const bool of_elements = model.gate_function == AttentionGate::kSoftplus;
  config.set("gating", of_elements ? json("per-element") : json(true));
}

/// Llama 4's, whose layers with chunks are those with a rotation.
void write_chunks(ConfigWriter& config, const ModelConfig& model) {
  if (model.window > 0) config.set("attention_chunk_size", model.window);
  json types = json::array();
  json rotated = json::array();
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    types.push_back(model.has_window(layer) ? "chunked_attention" : "full_attention");
    rotated.push_back(model.has_window(layer) ? 1 : 0);
  }
  config.set("layer_types", std::move(types));
  config.set("no_rope_layers", std::move(rotated));
}

void write_windows(ConfigWriter& config, const ModelConfig& model) {
  if (config.family().window == WindowRule::kChunksOfRotated) return write_chunks(config, model);
  // Of families whose layers' types are listed transformers takes no null; the default does
  // nothing.
  const WindowRule rule = config.family().window;
  const bool listed = rule == WindowRule::kListed || rule == WindowRule::kFiveOfSix ||
                      rule == WindowRule::kAllButEvery || rule == WindowRule::kGemma ||
                      rule == WindowRule::kThreeOfFour;
  if (model.window > 0 || !listed)
    config.set("sliding_window", model.window > 0 ? json(model.window) : json());
  config.set("use_sliding_window", model.window > 0);
  json types = json::array();
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    types.push_back(model.has_window(layer) ? "sliding_attention" : "full_attention");
  }
  config.set("layer_types", std::move(types));
}

/// Which layers have Gated DeltaNet is listed, so nothing is said of an interval.
void write_delta(ConfigWriter& config, const ModelConfig& model) {
  if (!config.family().gated_delta) return;
  config.drop("full_attention_interval");
  const DeltaConfig& delta = model.delta;
  config.set("linear_num_key_heads", delta.num_key_heads);
  config.set("linear_num_value_heads", delta.num_value_heads);
  config.set("linear_key_head_dim", delta.key_size);
  config.set("linear_value_head_dim", delta.value_size);
  config.set("linear_conv_kernel_dim", delta.conv_size);
  json types = json::array();
  for (int64_t layer = 0; layer < model.num_layers; ++layer)
    types.push_back(model.is_delta_layer(layer) ? "linear_attention" : "full_attention");
  config.set("layer_types", std::move(types));
}

void write_conv(ConfigWriter& config, const ModelConfig& model) {
  if (!config.family().gated_conv) return;
  config.drop("tie_embedding");
  config.set("conv_L_cache", model.conv.size);
  config.set("conv_bias", model.conv.bias);
  json types = json::array();
  for (int64_t layer = 0; layer < model.num_layers; ++layer)
    types.push_back(model.is_conv_layer(layer) ? "conv" : "full_attention");
  config.set("layer_types", std::move(types));
}

json bases_by_layer(const ModelConfig& model) {
  json bases = json::array();
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const RopeConfig rope = model.of_layer(model.layer_kind(layer)).rope;
    bases.push_back(rope.fraction == 0 ? 0.0 : rope.base);
  }
  return bases;
}

/// The older spelling, which all versions of transformers read, where layers rotate alike.
void write_rope_keys(ConfigWriter& config, const ModelConfig& model) {
  if (config.family().rope == RopeRule::kByLayerType) {
    config.set("rope_parameters", write_ropes_by_type(model, config.family()));
    return;
  }
  const RopeRule rule = config.family().rope;
  if (rule == RopeRule::kNever) return;
  if (rule == RopeRule::kByCompression) {
    config.set("rope_parameters", write_compressed_ropes(model, config.family()));
    return;
  }
  const bool by_layer = rule == RopeRule::kByLayer && model.rope.fraction == 0;
  const bool in_windows = by_layer || rule == RopeRule::kWindowsAlone ||
                          rule == RopeRule::kWindowsOnly || rule == RopeRule::kChunksAlone;
  const ModelConfig rotated = model.of_layer({.window = in_windows});
  const RopeConfig& rope = rotated.rope;
  json parameters = write_rope(rope, config.family());
  config.set("rope_parameters", parameters);
  config.put("rope_theta", rope.base);
  config.set("partial_rotary_factor", rope.fraction);
  config.set("rotary_dim", model.rotary_dim());
  config.set("rope_interleave", rope.interleaved);
  config.set("layer_rope_theta", bases_by_layer(model));
  parameters.erase("rope_theta");
  parameters.erase("partial_rotary_factor");
  config.put("rope_scaling", rope.scaling == RopeScaling::kNone ? json() : std::move(parameters));
}

json dense_layers(const ModelConfig& model) {
  json layers = json::array();
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (!model.is_moe_layer(layer)) layers.push_back(layer);
  }
  return layers;
}

json expert_layers(const ModelConfig& model) {
  json layers = json::array();
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (model.is_moe_layer(layer)) layers.push_back(layer);
  }
  return layers;
}

json mlp_types(const ModelConfig& model) {
  json types = json::array();
  for (int64_t layer = 0; layer < model.num_layers; ++layer)
    types.push_back(model.is_moe_layer(layer) ? "sparse" : "dense");
  return types;
}

/// ERNIE's rule for the first layers with experts and the distance of these; whether it gives the
/// others too is seen when the file is read again.
void write_moe_range(ConfigWriter& config, const ModelConfig& model) {
  std::vector<int64_t> layers;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (model.is_moe_layer(layer)) layers.push_back(layer);
  }
  if (layers.empty()) return;
  const int64_t interval = layers.size() > 1 ? layers[1] - layers[0] : 1;
  config.set("moe_layer_start_index", layers.front());
  config.set("moe_layer_end_index", layers.back());
  config.set("moe_layer_interval", interval);
}

int64_t count_first_dense_layers(const ModelConfig& model) {
  int64_t layer = 0;
  while (layer < model.num_layers && !model.is_moe_layer(layer)) ++layer;
  return layer;
}

void write_moe(ConfigWriter& config, const ModelConfig& model) {
  const MoeConfig& moe = model.moe;
  const std::string count(canonical_key(config.family(), "num_experts"));
  config.set(count.c_str(), moe.num_experts);
  config.set("num_experts_per_tok", moe.top_k);
  config.set("moe_intermediate_size", moe.inner_size);
  config.set("decoder_sparse_step", 1);
  config.set("mlp_layer_types", mlp_types(model));
  config.set("moe_layers", expert_layers(model));
  write_moe_range(config, model);
  config.set("mlp_only_layers", dense_layers(model));
  config.set("first_k_dense_replace", count_first_dense_layers(model));
  config.set("shared_expert_intermediate_size", moe.shared_inner_size);
  config.set("shared_intermediate_size", moe.shared_inner_size);
  config.set("n_shared_experts", moe.shared_inner_size / std::max<int64_t>(moe.inner_size, 1));
  config.set("norm_topk_prob", moe.normalize_top_k || moe.score_order == ScoreOrder::kAfterTopK);
  config.set("routed_scaling_factor", moe.score_scale);
  config.set("use_expert_bias", moe.has_expert_bias());
  config.set("n_group", moe.num_groups);
  config.set("topk_group", moe.top_groups);
  config.set("topk_method", moe.num_groups > 1 ? "group_limited_greedy" : "greedy");
  const bool balanced = moe.balance_coefficient > 0 && moe.balance_scope == BalanceTokens::kModel;
  config.set("router_jitter_noise", moe.jitter_experts ? moe.router_jitter : 0.0);
  config.set("output_router_logits", balanced);
  if (balanced) {
    config.set("router_aux_loss_coef", moe.balance_coefficient / static_cast<double>(moe.top_k));
  }
}

std::vector<ResolvedValue> resolve(ModelConfig model) {
  ConfigSchema schema;
  add_model_options(schema, model);
  return schema.resolved();
}

}  // namespace

std::string write_hf_config(const Family& family, const ModelConfig& model, DType dtype,
                            int64_t max_length) {
  ConfigWriter config(family);
  config.put("model_type", family.model_type);
  config.put("architectures", json::array({family.architecture}));
  config.put("torch_dtype", dtype == DType::kBF16 ? "bfloat16" : "float32");
  const bool dynamic = model.rope.scaling == RopeScaling::kDynamic;
  config.set("max_position_embeddings", dynamic ? model.rope.max_length : max_length);
  write_shape(config, model);
  write_attention(config, model);
  write_windows(config, model);
  write_heads_by_layer(config, model);
  write_delta(config, model);
  write_conv(config, model);
  write_rope_keys(config, model);
  if (family.is_moe()) write_moe(config, model);
  write_mamba(family, model, config.values());
  write_gemma(family, model, config.values());
  write_index(model, config.values());
  write_kimi(family, model, config.values());
  write_v4(family, model, config.values());
  write_phi(family, model, config.values());
  return config.text();
}

std::vector<std::string> find_differences(const ModelConfig& here, const ModelConfig& there) {
  ModelConfig a = plain_model(here);
  const ModelConfig b = plain_model(there);
  // A model without a bias computes what one with a bias of zeros does.
  a.moe.expert_bias |= b.moe.expert_bias;
  const auto left = resolve(a);
  const auto right = resolve(b);
  std::vector<std::string> differences;
  for (size_t i = 0; i < left.size(); ++i) {
    if (left[i].value == right[i].value) continue;
    differences.push_back(
        fmt::format("{}: {} here, {} there", left[i].key, left[i].value, right[i].value));
  }
  return differences;
}

namespace {

/// Why a family does not express a model.
struct Obstacles {
  std::vector<std::string> texts;
  bool is_far = false;  ///< its models are of another kind, so that no key was compared
};

Obstacles find_obstacles(const Family& family, const ModelConfig& model) {
  if (model.is_gated() == family.plain_mlps)
    return {{fmt::format("model.activation: the family's MLPs are {}",
                         family.plain_mlps ? "without gates" : "gated")},
            true};
  const std::string text = write_hf_config(family, model, DType::kF32, 2048);
  try {
    return {find_differences(model, parse_hf_config(text, "config.json").model)};
  } catch (const UserError& error) {
    return {{error.what()}, true};
  }
}

}  // namespace

std::vector<std::string> inexpressible(const Family& family, const ModelConfig& model) {
  return find_obstacles(family, model).texts;
}

const Family& find_family_for(const ModelConfig& model) {
  std::string nearest;
  std::pair<bool, size_t> least = {true, SIZE_MAX};
  for (const Family& family : families()) {
    const Obstacles obstacles = find_obstacles(family, model);
    if (obstacles.texts.empty()) return family;
    const std::pair<bool, size_t> found = {obstacles.is_far, obstacles.texts.size()};
    if (found >= least) continue;
    least = found;
    nearest = fmt::format("{} ({})", family.model_type, fmt::join(obstacles.texts, "; "));
  }
  user_error(
      "no model family of transformers expresses this model; the nearest is {}, where 'here' "
      "is the model and 'there' the family",
      nearest);
}

}  // namespace tessera
