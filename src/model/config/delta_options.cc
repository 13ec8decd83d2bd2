#include "model/config/delta_options.h"

#include "core/error.h"
#include "model/config/limits.h"
#include "ops/short_conv/short_conv.h"

namespace tessera {

void add_delta_options(ConfigSchema& schema, DeltaConfig& delta) {
  schema.add_enum("delta.kind", &delta.kind,
                  {{"gated", DeltaKind::kGated}, {"kimi", DeltaKind::kKimi}},
                  "What the layers of model.delta_layers have: \"gated\": Gated DeltaNet; "
                  "\"kimi\": Kimi Delta Attention, with a decay for each element of a key");
  schema.add("delta.num_key_heads", &delta.num_key_heads,
             "Query and key heads of the layers of model.delta_layers", between(1, kMaxHeads));
  schema.add("delta.num_value_heads", &delta.num_value_heads,
             "Their value heads, a multiple of the key heads", between(1, kMaxHeads));
  schema.add("delta.key_size", &delta.key_size, "Size of a query or key head",
             between(1, kMaxWidth));
  schema.add("delta.value_size", &delta.value_size, "Size of a value head", between(1, kMaxWidth));
  schema.add("delta.conv_size", &delta.conv_size,
             "Tokens of the short convolution of queries, keys and values",
             between(1, ShortConv::kMaxTaps));
}

void validate_delta(const ModelConfig& config) {
  for (const int64_t layer : config.window_layers) {
    require(!config.is_delta_layer(layer),
            "model.window_layers and model.delta_layers both list layer {}; only attention has a "
            "window",
            layer);
  }
  const DeltaConfig& delta = config.delta;
  require(config.delta_layers.empty() || delta.num_value_heads % delta.num_key_heads == 0,
          "delta.num_value_heads {} is not a multiple of delta.num_key_heads {}",
          delta.num_value_heads, delta.num_key_heads);
  require(config.delta_layers.empty() || !delta.is_kimi() ||
              delta.num_value_heads == delta.num_key_heads,
          "delta.kind is \"kimi\", whose heads each have keys of their own, but "
          "delta.num_value_heads is {} and delta.num_key_heads {}; make them equal",
          delta.num_value_heads, delta.num_key_heads);
  require(
      !config.attention_gate || !config.is_latent(),
      "model.attention_gate does not go with model.attention = \"latent\"; leave one of them out");
}

}  // namespace tessera
