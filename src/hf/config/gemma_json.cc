#include "hf/config/gemma_json.h"

#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "model/config/limits.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kPerLayer = "per_layer_config";

/// Key and value heads of a layer.
struct LayerHeads {
  int64_t size = 0;
  int64_t kv_heads = 0;
  bool operator==(const LayerHeads&) const = default;
};

int64_t layer_number(const std::string& text, int64_t num_layers, const std::string& where) {
  int64_t layer = -1;
  const char* end = text.data() + text.size();
  const auto [read, error] = std::from_chars(text.data(), end, layer);
  require(error == std::errc() && read == end && layer >= 0 && layer < num_layers,
          "{}: '{}' has an entry {}; expected the number of a layer, from 0 to {}", where,
          kPerLayer, quote_for_message(text), num_layers - 1);
  return layer;
}

/// What an entry of `per_layer_config` says of a layer that otherwise has `heads`.
LayerHeads read_entry(const json& entry, LayerHeads heads, const std::string& where) {
  require(entry.is_object(), "{}: '{}' must have an object for each layer, found {}", where,
          kPerLayer, quote_for_message(entry.dump()));
  const auto read = [&](const json& value, const std::string& key, int64_t most) {
    const int64_t found = json_size(value, key, where);
    require(found >= 1 && found <= most, "{}: '{}' of '{}' is {}; from 1 to {} are supported",
            where, key, kPerLayer, found, most);
    return found;
  };
  for (const auto& [key, value] : entry.items()) {
    require(key == "head_dim" || key == "num_key_value_heads",
            "{}: the key {} of '{}' is not supported; supported are head_dim and "
            "num_key_value_heads",
            where, quote_for_message(key), kPerLayer);
    if (key == "head_dim") {
      heads.size = read(value, key, kMaxWidth);
    } else {
      heads.kv_heads = read(value, key, kMaxHeads);
    }
  }
  return heads;
}

/// Heads of layers without a window, and with one, of which `per_layer_config` says what differs.
std::array<LayerHeads, 2> read_listed_heads(const ConfigJson& config, const ModelConfig& model,
                                            const LayerHeads& base) {
  const json& entries = config.value(kPerLayer);
  require(entries.is_object(), "{}: '{}' must be an object, found {}", config.where(), kPerLayer,
          quote_for_message(entries.dump()));
  std::vector<LayerHeads> layers(model.num_layers, base);
  for (const auto& [key, entry] : entries.items()) {
    const int64_t layer = layer_number(key, model.num_layers, config.where());
    layers[layer] = read_entry(entry, base, config.where());
  }
  std::array<std::optional<LayerHeads>, 2> of_type;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    auto& own = of_type[model.has_window(layer) ? 1 : 0];
    require(!own || *own == layers[layer],
            "{}: '{}' gives layers of one type heads of {} and {} elements, {} and {} of them for "
            "keys and values; they must be alike",
            config.where(), kPerLayer, own.value_or(base).size, layers[layer].size,
            own.value_or(base).kv_heads, layers[layer].kv_heads);
    own = layers[layer];
  }
  return {of_type[0].value_or(base), of_type[1].value_or(base)};
}

/// The same by the keys of layers without a window.
LayerHeads read_global_heads(const ConfigJson& config, const LayerHeads& base) {
  LayerHeads heads = {.size = config.bounded("global_head_dim", 1, kMaxWidth),
                      .kv_heads = base.kv_heads};
  const char* key = "num_global_key_value_heads";
  // transformers reads it of such layers alone.
  if (config.flag("attention_k_eq_v") && !config.is_null(key))
    heads.kv_heads = config.bounded(key, 1, kMaxHeads);
  return heads;
}

void read_layer_heads(const ConfigJson& config, ModelConfig& model) {
  const LayerHeads base = {.size = model.head_size, .kv_heads = model.num_kv_heads};
  const auto [others, windows] = config.is_null(kPerLayer)
                                     ? std::array{read_global_heads(config, base), base}
                                     : read_listed_heads(config, model, base);
  model.head_size = others.size;
  model.num_kv_heads = others.kv_heads;
  if (model.window == 0) return;
  if (windows.size != others.size) model.window_head_size = windows.size;
  if (windows.kv_heads != others.kv_heads) model.window_kv_heads = windows.kv_heads;
}

/// The layers whose heads no keys of their own can say.
json heads_by_layer(const ModelConfig& model) {
  json layers = json::object();
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (model.has_window(layer)) continue;
    layers[std::to_string(layer)] = {{"head_dim", model.head_dim()},
                                     {"num_key_value_heads", model.kv_heads()}};
  }
  return layers;
}

}  // namespace

void read_gemma(const ConfigJson& config, ModelConfig& model) {
  if (!config.family().gemma) return;
  const int64_t per_layer = config.size("hidden_size_per_layer_input", 0);
  require(per_layer == 0,
          "{}: 'hidden_size_per_layer_input' is {} (256 where it is missing): inputs of each layer "
          "are not supported, only 0 is",
          config.where(), per_layer);
  model.layer_scalars = model.value_norm = true;
  model.embedding_multiplier = std::sqrt(static_cast<double>(model.hidden_size));
  model.attention_multiplier = 1;
  model.keys_as_values = config.flag("attention_k_eq_v");
  if (!config.is_null("final_logit_softcapping")) {
    model.logit_softcap = config.positive("final_logit_softcapping");
    require(model.logit_softcap <= kMaxMultiplier,
            "{}: 'final_logit_softcapping' is {}; at most {} is supported", config.where(),
            model.logit_softcap, kMaxMultiplier);
  }
  read_layer_heads(config, model);
}

void read_gemma_experts(const ConfigJson& config, ModelConfig& model) {
  if (!config.family().gemma || model.moe.num_experts == 0) return;
  model.moe.router_norm = model.moe.expert_scale = model.moe.separate_norms = true;
  model.moe.shared_inner_size = model.inner_size;
}

void write_gemma(const Family& family, const ModelConfig& model, json& values) {
  if (!family.gemma) return;
  const ModelConfig windows = model.of_layer({.window = model.window > 0});
  const bool same_count = windows.kv_heads() == model.kv_heads();
  values["head_dim"] = windows.head_dim();
  values["num_key_value_heads"] = windows.kv_heads();
  values["global_head_dim"] = model.head_dim();
  values["attention_k_eq_v"] = model.keys_as_values;
  values["num_global_key_value_heads"] = same_count ? json() : json(model.kv_heads());
  values.erase(kPerLayer);  // of which transformers takes null for an empty one
  if (!same_count && !model.keys_as_values) values[kPerLayer] = heads_by_layer(model);
  values["final_logit_softcapping"] = model.logit_softcap > 0 ? json(model.logit_softcap) : json();
  values["hidden_size_per_layer_input"] = 0;
  const bool experts = model.num_moe_layers() > 0;
  values["enable_moe_block"] = experts;
  if (experts) {
    values["intermediate_size"] = model.moe.shared_inner_size;
    return;
  }
  for (const char* key : {"num_experts", "num_experts_per_tok", "moe_intermediate_size"})
    values[key] = json();
}

}  // namespace tessera
