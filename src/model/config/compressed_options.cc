#include "model/config/compressed_options.h"

#include <algorithm>

#include "core/error.h"
#include "model/config/limits.h"

namespace tessera {

void add_compressed_options(ConfigSchema& schema, CompressedConfig& compressed) {
  schema.add("compressed.query_rank", &compressed.query_rank,
             "Size of the latent of queries of compressed attention", between(1, kMaxWidth));
  schema.add("compressed.rope_size", &compressed.rope_size,
             "Last elements of a head that are rotated", between(2, kMaxWidth));
  schema.add("compressed.output_groups", &compressed.output_groups,
             "Groups of heads that are each projected to compressed.output_rank",
             between(1, kMaxHeads));
  schema.add("compressed.output_rank", &compressed.output_rank,
             "Size that a group of heads is projected to before the output projection",
             between(1, kMaxWidth));
  schema.add("compressed.sparse_rate", &compressed.sparse_rate,
             "Tokens from one entry to the next in the layers of compressed.sparse_layers; each is "
             "made of twice as many",
             between(1, kMaxLength));
  schema.add("compressed.heavy_rate", &compressed.heavy_rate,
             "Tokens of an entry in the layers of compressed.heavy_layers", between(1, kMaxLength));
  schema.add("compressed.sparse_layers", &compressed.sparse_layers,
             "Layers that see compressed tokens of a small rate beside their window, of which an "
             "indexer ([index]) chooses, as DeepSeek-V4's CSA; counted from 0",
             between(0, kMaxLayers - 1));
  schema.add("compressed.heavy_layers", &compressed.heavy_layers,
             "Layers that see all compressed tokens of a large rate beside their window, as "
             "DeepSeek-V4's HCA; counted from 0",
             between(0, kMaxLayers - 1));
}

namespace {

/// Layers with compressed tokens attend, and are of one kind.
void validate_compressed_layers(const ModelConfig& config) {
  const CompressedConfig& compressed = config.compressed;
  const auto check = [&](const std::vector<int64_t>& layers, const char* key) {
    for (const int64_t layer : layers) {
      require(layer >= config.num_layers || config.is_attention_layer(layer),
              "{} lists layer {}, which has no attention; leave it out of one of the lists", key,
              layer);
    }
  };
  check(compressed.sparse_layers, "compressed.sparse_layers");
  check(compressed.heavy_layers, "compressed.heavy_layers");
  for (const int64_t layer : compressed.sparse_layers) {
    require(std::ranges::find(compressed.heavy_layers, layer) == compressed.heavy_layers.end(),
            "compressed.sparse_layers and compressed.heavy_layers both list layer {}; leave it out "
            "of one of them",
            layer);
  }
  require(compressed.sparse_layers.empty() || config.index.is_on(),
          "compressed.sparse_layers are not empty, but index.top_k is 0, so that nothing chooses "
          "among their compressed tokens; set index.top_k, such as 512");
  require(!compressed.has_entries() || config.window > 0,
          "layers of compressed.sparse_layers and compressed.heavy_layers see whole tokens of a "
          "window, and model.window is 0; set it, such as 128");
}

}  // namespace

void validate_compressed(const ModelConfig& config) {
  const CompressedConfig& compressed = config.compressed;
  if (!config.is_compressed()) {
    require(!compressed.has_entries(),
            "[compressed] lists layers, but model.attention is not \"compressed\"; set that, or "
            "leave [compressed] out");
    return;
  }
  const auto refuses = [](bool is_set, const char* key, const char* instead) {
    require(!is_set, "{} does not go with model.attention = \"compressed\"; {}", key, instead);
  };
  refuses(config.num_kv_heads > 1, "model.num_kv_heads above 1", "leave it 0: there is one head");
  refuses(config.qk_norm != QkNorm::kNone, "model.qk_norm",
          "leave it out: there are norms of its own");
  refuses(config.qkv_bias, "model.qkv_bias", "leave it out");
  refuses(config.output_bias, "model.output_bias", "leave it out");
  refuses(config.attention_gate, "model.attention_gate", "leave it out");
  refuses(config.value_size > 0, "model.value_size", "leave it 0: keys are the values");
  refuses(config.value_multiplier != 1, "model.value_multiplier", "leave it out");
  refuses(config.value_norm, "model.value_norm", "leave it out");
  refuses(config.keys_as_values, "model.keys_as_values", "leave it out: keys are the values");
  refuses(config.temperature_scale != 0, "model.temperature_scale", "set it to 0");
  refuses(!config.window_layers.empty(), "model.window_layers",
          "leave it out: all layers have the window");
  refuses(config.window_kind != WindowKind::kSliding, "model.window_kind = \"chunked\"",
          "leave it out");
  refuses(config.own_window_rope, "model.window_rope",
          "leave it out: layers with compressed tokens have [compressed_rope]");
  refuses(config.window_heads > 0, "model.window_heads", "leave it 0");
  refuses(config.window_kv_heads > 0, "model.window_kv_heads", "leave it 0");
  refuses(config.window_head_size > 0, "model.window_head_size", "leave it 0");
  refuses(config.window_sinks, "model.window_sinks", "set model.attention_sinks");
  require(compressed.rope_size <= config.head_dim(),
          "compressed.rope_size {} is above the size of a head, {}; set it to {} or less",
          compressed.rope_size, config.head_dim(), config.head_dim());
  require(config.num_heads % compressed.output_groups == 0,
          "compressed.output_groups {} does not divide model.num_heads {}; choose a divisor",
          compressed.output_groups, config.num_heads);
  validate_compressed_layers(config);
}

}  // namespace tessera
