#include <cmath>
#include <nlohmann/json.hpp>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/file/file.h"
#include "hf/config/config_json.h"
#include "hf/config/gemma_json.h"
#include "hf/config/hf_config.h"
#include "hf/config/index_json.h"
#include "hf/config/kimi_json.h"
#include "hf/config/mamba_json.h"
#include "hf/config/moe_json.h"
#include "hf/config/phi_json.h"
#include "hf/config/rope_json.h"
#include "hf/config/v4_json.h"
#include "hf/config/window_json.h"
#include "model/config/limits.h"
#include "ops/short_conv/short_conv.h"

namespace tessera {
namespace {

using nlohmann::json;

std::optional<int64_t> optional_bounded(const ConfigJson& config, std::string_view key,
                                        int64_t most) {
  if (config.is_null(key)) return std::nullopt;
  return config.bounded(key, 1, most);
}

/// The deviation of initial weights, where the file has one.
void read_deviation(const ConfigJson& config, ModelConfig& model) {
  const double found = config.number("initializer_range");
  if (found <= 0) return;
  require(found >= kMinDeviation && found <= kMaxDeviation,
          "{}: 'initializer_range' is {}; it must be from {} to {}", config.where(), found,
          kMinDeviation, kMaxDeviation);
  model.init_deviation = found;
}

/// Of a family whose MLPs have no gates.
Activation read_plain_activation(const ConfigJson& config) {
  const std::string& name = config.text("hidden_act");
  if (name == "relu2") return Activation::kRelu2;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::kGeluTanh;
  user_error("{}: '{}' is {}; supported are relu2, gelu, gelu_new and gelu_pytorch_tanh",
             config.where(), config.spelled("hidden_act"), quote_for_message(name));
}

Activation read_activation(const ConfigJson& config) {
  if (config.family().plain_mlps) return read_plain_activation(config);
  const std::string& name = config.text("hidden_act");
  if (config.family().clamped_swiglu) {
    require(name == "silu", "{}: 'hidden_act' is {}; only silu is supported here", config.where(),
            quote_for_message(name));
    return config.family().deepseek_v4 ? Activation::kSwiGLUClamped : Activation::kSwiGLUOai;
  }
  if (name == "silu" || name == "swish") return Activation::kSwiGLU;
  if (name == "gelu") return Activation::kGeGLU;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::kGeGLUTanh;
  user_error("{}: 'hidden_act' is {}; supported are silu, gelu, gelu_new and gelu_pytorch_tanh",
             config.where(), quote_for_message(name));
}

/// Granite's multipliers, where the family has them.
void read_multipliers(const ConfigJson& config, ModelConfig& model) {
  const auto read = [&](const char* key, double& to) {
    if (!config.family().has_key(key)) return;
    to = config.positive(key);
    require(to >= kMinMultiplier && to <= kMaxMultiplier,
            "{}: '{}' is {}; it must be from {} to {}", config.where(), key, to, kMinMultiplier,
            kMaxMultiplier);
  };
  read("embedding_multiplier", model.embedding_multiplier);
  if (config.family().has_key("mup_enabled") && config.flag("mup_enabled"))
    model.embedding_multiplier = std::sqrt(static_cast<double>(model.hidden_size));
  read("residual_multiplier", model.residual_multiplier);
  read("attention_multiplier", model.attention_multiplier);
  read("logits_scaling", model.logits_divisor);
  if (!config.is_null("attention_value_scale"))
    read("attention_value_scale", model.value_multiplier);
}

/// The row of the embedding that PyTorch keeps out of training; negative ids count from the end.
int64_t read_padding_token(const ConfigJson& config, int64_t vocab_size) {
  if (config.is_null("pad_token_id")) return -1;
  const json& value = config.value("pad_token_id");
  require(value.is_number_integer(), "{}: 'pad_token_id' must be an integer or null, found {}",
          config.where(), quote_for_message(value.dump()));
  const auto id = value.get<int64_t>();
  require(id >= -vocab_size && id < vocab_size,
          "{}: 'pad_token_id' is {}, outside the vocabulary of {}", config.where(), id, vocab_size);
  return id < 0 ? vocab_size + id : id;
}

/// The key of the inner size of dense MLPs; where there are none, that of experts.
std::string_view dense_key(const Family& family) {
  if (family.deepseek_v4) return "moe_intermediate_size";
  return family.has_key("intermediate_size_mlp") ? "intermediate_size_mlp" : "intermediate_size";
}

void read_shape(const ConfigJson& config, ModelConfig& model) {
  model.vocab_size = config.bounded("vocab_size", 1, kMaxVocabulary);
  model.padding_token = read_padding_token(config, model.vocab_size);
  model.hidden_size = config.bounded("hidden_size", 1, kMaxWidth);
  model.num_layers = config.family().mamba == MambaRule::kNemotron
                         ? count_mamba_layers(config)
                         : config.bounded("num_hidden_layers", 1, kMaxLayers);
  model.num_heads = config.bounded("num_attention_heads", 1, kMaxHeads);
  model.inner_size = config.bounded(dense_key(config.family()), 1, kMaxWidth);
  model.activation = read_activation(config);
  if (config.family().has_key("swiglu_limit")) model.swiglu_limit = config.positive("swiglu_limit");
  model.norm_eps = config.positive("rms_norm_eps");
  require(model.norm_eps <= 1, "{}: 'rms_norm_eps' must be at most 1, found {}", config.where(),
          model.norm_eps);
  const bool short_name = !config.is_null("tie_embedding");  // which transformers prefers
  model.tie_embeddings = config.flag(short_name ? "tie_embedding" : "tie_word_embeddings");
  read_deviation(config, model);
  read_multipliers(config, model);
}

void read_heads(const ConfigJson& config, ModelConfig& model) {
  const Family& family = config.family();
  model.num_kv_heads =
      optional_bounded(config, "num_key_value_heads", kMaxHeads).value_or(model.num_heads);
  const auto head_size = optional_bounded(config, "head_dim", kMaxWidth);
  require(head_size || model.hidden_size % model.num_heads == 0,
          "{}: hidden_size {} is not divisible by num_attention_heads {}", config.where(),
          model.hidden_size, model.num_heads);
  model.head_size = head_size.value_or(model.hidden_size / model.num_heads);
  if (family.has_key("v_head_dim")) {
    const int64_t value_size = config.bounded("v_head_dim", 1, kMaxWidth);
    if (value_size != model.head_size) model.value_size = value_size;
  }
  model.qk_norm = family.qk_norm;
  model.norm_after_rotation = family.norm_after_rotation;
  if (family.has_key("use_qk_norm")) {
    const QkNorm used = family.qk_norm == QkNorm::kNone ? QkNorm::kHead : family.qk_norm;
    model.qk_norm = config.flag("use_qk_norm") ? used : QkNorm::kNone;
    model.norm_after_rotation &= model.qk_norm != QkNorm::kNone;
  }
}

/// transformers derives these from the sizes of the heads' parts and reads them nowhere else.
void check_derived_size(const ConfigJson& config, std::string_view key, int64_t expected) {
  const auto found = config.optional_size(key);
  require(!found || *found == expected, "{}: '{}' is {}, and the parts of a head give {}",
          config.where(), key, found.value_or(0), expected);
}

void read_latent(const ConfigJson& config, ModelConfig& model) {
  model.attention = AttentionKind::kLatent;
  LatentConfig& latent = model.latent;
  latent.query_rank = optional_bounded(config, "q_lora_rank", kMaxWidth).value_or(0);
  latent.kv_rank = config.bounded("kv_lora_rank", 1, kMaxWidth);
  latent.nope_size = config.bounded("qk_nope_head_dim", 1, kMaxWidth);
  latent.rope_size = config.bounded("qk_rope_head_dim", 1, kMaxWidth);
  latent.value_size = config.bounded("v_head_dim", 1, kMaxWidth);
  check_derived_size(config, "head_dim", latent.rope_size);
  check_derived_size(config, "qk_head_dim", latent.nope_size + latent.rope_size);
  const int64_t kv_heads =
      optional_bounded(config, "num_key_value_heads", kMaxHeads).value_or(model.num_heads);
  require(kv_heads == model.num_heads,
          "{}: num_key_value_heads {} differs from num_attention_heads {}; with latent attention "
          "each query head has a key head",
          config.where(), kv_heads, model.num_heads);
}

void read_biases(const ConfigJson& config, ModelConfig& model) {
  const Family& family = config.family();
  const bool attention = family.has_key("attention_bias") && config.flag("attention_bias");
  model.qkv_bias =
      attention || family.qkv_bias || (family.has_key("qkv_bias") && config.flag("qkv_bias"));
  model.output_bias = attention && family.output_bias;
  model.mlp_bias = family.has_key("mlp_bias") && config.flag("mlp_bias");
  model.attention_sinks = family.attention_sinks;
  model.post_norms = !family.out_norms[0].empty();
}

/// Gated DeltaNet in all layers but every n-th, where no list says which.
void read_delta(const ConfigJson& config, ModelConfig& model) {
  if (!config.family().gated_delta) return;
  require(model.activation == Activation::kSwiGLU,
          "{}: 'hidden_act' is {}; only silu is supported here, of the short convolutions too",
          config.where(), quote_for_message(config.text("hidden_act")));
  model.attention_gate = true;
  model.delta = {.num_key_heads = config.bounded("linear_num_key_heads", 1, kMaxHeads),
                 .num_value_heads = config.bounded("linear_num_value_heads", 1, kMaxHeads),
                 .key_size = config.bounded("linear_key_head_dim", 1, kMaxWidth),
                 .value_size = config.bounded("linear_value_head_dim", 1, kMaxWidth),
                 .conv_size = config.bounded("linear_conv_kernel_dim", 1, ShortConv::kMaxTaps)};
  if (!config.is_null("layer_types")) {
    model.delta_layers = read_layer_types(config, model.num_layers, "linear_attention");
    return;
  }
  const int64_t interval = config.bounded("full_attention_interval", 1, kMaxLayers);
  for (int64_t i = 0; i < model.num_layers; ++i) {
    if ((i + 1) % interval != 0) model.delta_layers.push_back(i);
  }
}

/// Gated short convolutions in the layers of a list.
void read_conv(const ConfigJson& config, ModelConfig& model) {
  if (!config.family().gated_conv) return;
  require(model.activation == Activation::kSwiGLU, "{}: 'hidden_act' is {}; only silu is supported",
          config.where(), quote_for_message(config.text("hidden_act")));
  model.conv = {.size = config.bounded("conv_L_cache", 1, ShortConv::kMaxTaps),
                .bias = config.flag("conv_bias")};
  model.conv_layers = read_layer_types(config, model.num_layers, "conv");
}

/// OLMoE's norms are of the hidden size.
void check_olmoe_heads(const ConfigJson& config, const ModelConfig& model) {
  require(model.qk_norm != QkNorm::kAll || config.family().has_key("head_dim") ||
              model.num_heads * model.head_dim() == model.hidden_size,
          "{}: {} heads of {} elements do not make hidden_size {}", config.where(), model.num_heads,
          model.head_dim(), model.hidden_size);
}

}  // namespace

ImportedConfig parse_hf_config(std::string_view given, const std::string& where) {
  const std::optional<std::string> inner = find_text_config(given, where);
  const std::string_view text = inner ? *inner : given;
  const ConfigJson config(text, where);
  ImportedConfig imported;
  imported.of_whole = inner.has_value();
  imported.family = &config.family();
  const json& quantization = config.value("quantization_config");
  imported.mxfp4 = read_mxfp4(quantization, where);
  if (!imported.mxfp4) imported.scales = read_block_scales(quantization, where);
  imported.json = imported.scales || imported.mxfp4 ? without_quantization(text) : text;
  ModelConfig& model = imported.model;
  model.moe.num_experts = 0;
  imported.max_length = config.size("max_position_embeddings");
  read_shape(config, model);
  if (imported.family->attention == AttentionKind::kLatent) {
    read_latent(config, model);
  } else if (imported.family->deepseek_v4) {
    read_v4(config, model);
  } else {
    read_heads(config, model);
  }
  read_index(config, model);
  read_biases(config, model);
  read_windows(config, model);
  read_window_heads(config, model);
  read_gemma(config, model);
  read_gating(config, model);
  read_delta(config, model);
  read_kimi(config, model);
  read_conv(config, model);
  read_rope(config, model);
  read_temperatures(config, model);
  if (imported.family->is_moe()) read_moe(config, model, imported.notes);
  read_gemma_experts(config, model);
  read_phi(config, model);
  read_mamba(config, model);
  check_olmoe_heads(config, model);
  try {
    validate(model);
  } catch (const UserError& error) {
    user_error("{}: {}", where, error.what());
  }
  return imported;
}

ImportedConfig read_hf_config(const std::filesystem::path& folder) {
  constexpr int64_t kMaxBytes = int64_t{16} << 20;
  const std::filesystem::path path = folder / "config.json";
  return parse_hf_config(read_text_file(path, kMaxBytes), path.string());
}

}  // namespace tessera
