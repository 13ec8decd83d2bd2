#include "model/config/attention_options.h"

#include "core/error.h"
#include "model/config/limits.h"

namespace tessera {

void add_attention_options(ConfigSchema& schema, ModelConfig& config) {
  schema.add(
      "model.delta_layers", &config.delta_layers,
      "Layers whose mixer is a gated delta rule, as [delta] says, counted from 0; the others "
      "have attention",
      between(0, kMaxLayers - 1));
  schema.add("model.mamba_layers", &config.mamba_layers,
             "Layers whose mixer is Mamba-2, sized by [mamba], counted from 0",
             between(0, kMaxLayers - 1));
  schema.add("model.conv_layers", &config.conv_layers,
             "Layers whose mixer is a gated short convolution, sized by [conv], counted from 0",
             between(0, kMaxLayers - 1));
  schema.add("model.layers_without_mixer", &config.layers_without_mixer,
             "Layers of an MLP or experts alone, as Nemotron-H has them",
             between(0, kMaxLayers - 1));
  schema.add("model.layers_without_mlp", &config.layers_without_mlp, "Layers of a mixer alone",
             between(0, kMaxLayers - 1));
  schema.add("model.window_rope", &config.own_window_rope,
             "Rotate layers with the window as [window_rope] says, the others as [rope] does");
  schema.add("model.window_heads", &config.window_heads,
             "Query heads of layers with the window; 0: as many as those of the others",
             between(0, kMaxHeads));
  schema.add("model.window_kv_heads", &config.window_kv_heads,
             "Key and value heads of layers with the window; 0: as many as those of the others",
             between(0, kMaxHeads));
  schema.add("model.window_head_size", &config.window_head_size,
             "Size of a head in layers with the window; 0: as in the others",
             between(0, kMaxWidth));
  schema.add("model.window_sinks", &config.window_sinks,
             "model.attention_sinks in layers with the window alone");
  schema.add("model.value_size", &config.value_size,
             "Size of a value head of standard attention; 0: that of a key head",
             between(0, kMaxWidth));
  schema.add("model.value_multiplier", &config.value_multiplier, "Factor on attention's values",
             {.min = kMinMultiplier, .max = kMaxMultiplier});
  schema.add("model.keys_as_values", &config.keys_as_values,
             "Layers without a window have no value projection: what keys are made of, neither "
             "normed nor rotated, are their values");
  schema.add("model.value_norm", &config.value_norm,
             "RMSNorm of each value head, without a weight");
  schema.add(
      "model.attention_gate", &config.attention_gate,
      "Multiply what attention gives by model.gate_function of a projection of the hidden state");
  schema.add_enum("model.gate_function", &config.gate_function,
                  {{"sigmoid", AttentionGate::kSigmoid},
                   {"softplus", AttentionGate::kSoftplus},
                   {"softplus_of_heads", AttentionGate::kSoftplusOfHeads}},
                  "Function of model.attention_gate, of each element or of each head");
  schema.add_enum("model.attention", &config.attention,
                  {{"standard", AttentionKind::kStandard},
                   {"latent", AttentionKind::kLatent},
                   {"compressed", AttentionKind::kCompressed}},
                  "Standard (grouped-query) attention; DeepSeek's multi-latent attention, sized by "
                  "[latent]; or DeepSeek-V4's attention to a window and compressed tokens, sized "
                  "by [compressed]");
  schema.add_enum("model.qk_norm", &config.qk_norm,
                  {{"none", QkNorm::kNone},
                   {"head", QkNorm::kHead},
                   {"all", QkNorm::kAll},
                   {"l2", QkNorm::kL2}},
                  "RMSNorm of queries and keys: of each head, or of all heads as one row; l2: of "
                  "each head, without a weight, in layers with a rotation, as Llama 4 has it");
  schema.add("model.norm_after_rotation", &config.norm_after_rotation,
             "Rotate queries and keys before model.qk_norm, not after it");
  schema.add("model.attention_multiplier", &config.attention_multiplier,
             "Factor on the attention scores; 0: 1 / sqrt(head size)", between(0, kMaxMultiplier));
  schema.add("model.temperature_scale", &config.temperature_scale,
             "In layers without a rotation queries are multiplied by 1 + this * log(1 + "
             "floor((position + 1) / model.temperature_length)), as Llama 4 has it; 0: off",
             between(0, kMaxMultiplier));
  schema.add("model.temperature_length", &config.temperature_length,
             "Tokens after which model.temperature_scale begins to count", between(1, kMaxLength));
  schema.add("model.qkv_bias", &config.qkv_bias,
             "Biases of the query, key and value projections (latent: of those into the latents)");
  schema.add("model.output_bias", &config.output_bias, "Bias of the attention's output projection");
  schema.add("model.attention_sinks", &config.attention_sinks,
             "A learnt logit of each head in the denominator of its softmax, as gpt-oss has it");
  schema.add("model.mlp_bias", &config.mlp_bias,
             "Biases of dense and shared MLPs; of routed experts: moe.mlp_bias");
}

namespace {

void validate_values(const ModelConfig& config) {
  if (!config.keys_as_values) return;
  const ModelConfig others = config.of_layer({});
  require(others.value_dim() == others.head_dim(),
          "model.keys_as_values takes keys of {} elements as values, and model.value_size is {}; "
          "leave model.value_size out",
          others.head_dim(), config.value_size);
  require(config.window == 0 || !config.window_layers.empty(),
          "model.keys_as_values is of layers without a window, and all have one; list those with "
          "it in model.window_layers, or leave model.keys_as_values out");
}

}  // namespace

void validate_attention(const ModelConfig& config) {
  const auto needs_window = [&](bool is_set, const char* key) {
    require(!is_set || config.window > 0,
            "{} is of layers with a window, and model.window is 0; set the window, or leave it out",
            key);
  };
  needs_window(config.window_kind != WindowKind::kSliding, "model.window_kind");
  needs_window(config.own_window_rope, "model.window_rope");
  needs_window(config.window_heads > 0, "model.window_heads");
  needs_window(config.window_kv_heads > 0, "model.window_kv_heads");
  needs_window(config.window_head_size > 0, "model.window_head_size");
  needs_window(config.window_sinks, "model.window_sinks");
  require(config.temperature_scale == 0 || !config.is_latent(),
          "model.temperature_scale does not go with model.attention = \"latent\"; set it to 0");
  require(config.temperature_scale == 0 || config.has_temperatures(),
          "model.temperature_scale is of layers without a rotation, and all layers with attention "
          "have one; set it to 0, or rope.fraction = 0 (with model.window_rope, layers with a "
          "window keep theirs)");
  if (config.is_latent()) {
    const auto refuses = [](bool is_set, const char* key, const char* instead) {
      require(!is_set, "{} does not go with model.attention = \"latent\"; {}", key, instead);
    };
    refuses(config.window_heads > 0, "model.window_heads", "leave it 0");
    refuses(config.window_kv_heads > 0, "model.window_kv_heads", "leave it 0");
    refuses(config.window_head_size > 0, "model.window_head_size", "leave it 0");
    refuses(config.keys_as_values, "model.keys_as_values", "leave it out");
    refuses(config.value_norm, "model.value_norm", "leave it out");
    refuses(config.value_size > 0, "model.value_size", "set latent.value_size");
    refuses(config.value_multiplier != 1, "model.value_multiplier", "leave it out");
  }
  validate_values(config);
  const ModelConfig windows = config.of_layer({.window = true});
  require(windows.num_heads % windows.kv_heads() == 0,
          "layers with a window have {} query heads (model.window_heads), no multiple of their {} "
          "key-value heads (model.window_kv_heads); every KV head serves the same number of query "
          "heads",
          windows.num_heads, windows.kv_heads());
}

}  // namespace tessera
