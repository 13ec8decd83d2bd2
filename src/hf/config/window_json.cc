#include "hf/config/window_json.h"

#include <nlohmann/json.hpp>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "model/config/limits.h"

namespace tessera {
namespace {

using nlohmann::json;

/// All layers but every n-th.
std::vector<int64_t> layers_between(int64_t num_layers, int64_t interval) {
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < num_layers; ++i) {
    if ((i + 1) % interval != 0) layers.push_back(i);
  }
  return layers;
}

std::vector<int64_t> five_of_six_layers(int64_t num_layers) {
  std::vector<int64_t> layers;
  for (int64_t i = 1; i < num_layers; ++i) {
    if ((i + 1) % 6 != 0) layers.push_back(i);
  }
  return layers;
}

std::vector<int64_t> three_of_four_layers(int64_t num_layers) {
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < num_layers; ++i) {
    if (i % 4 != 0) layers.push_back(i);
  }
  return layers;
}

/// Layers with a window by the rule of a family that has `layer_types`.
std::vector<int64_t> default_window_layers(const ConfigJson& config, int64_t num_layers) {
  const WindowRule rule = config.family().window;
  if (rule == WindowRule::kListed) return {};
  if (rule == WindowRule::kFiveOfSix) return five_of_six_layers(num_layers);
  if (rule == WindowRule::kGemma) return layers_between(num_layers, 6);
  if (rule == WindowRule::kThreeOfFour) return three_of_four_layers(num_layers);
  if (rule == WindowRule::kAllButEvery) {
    return layers_between(num_layers, config.bounded("sliding_window_pattern", 1, kMaxLayers));
  }
  const bool alternating = config.family().window == WindowRule::kAlternating;
  const int64_t border = alternating ? num_layers : config.size("max_window_layers", 0);
  const bool even = alternating || config.family().window == WindowRule::kEvenLayers;
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < num_layers; ++i) {
    if (even ? i % 2 == 0 && i < border : i >= border) layers.push_back(i);
  }
  return layers;
}

void set_window(ModelConfig& model, int64_t window, std::vector<int64_t> layers) {
  if (layers.empty()) return;
  model.window = window;
  if (std::cmp_less(layers.size(), model.num_layers)) model.window_layers = std::move(layers);
}

/// Layers that are rotated by Llama 4's rule.
std::vector<int64_t> read_rotated_layers(const ConfigJson& config, int64_t num_layers) {
  constexpr const char* kKey = "no_rope_layers";
  const int64_t interval = config.bounded("no_rope_layer_interval", 1, kMaxLayers);
  const json& list = config.value(kKey);
  require(list.is_null() || list.is_array(), "{}: '{}' must be a list or null, found {}",
          config.where(), kKey, quote_for_message(list.dump()));
  require(list.empty() || std::cmp_greater_equal(list.size(), num_layers),
          "{}: '{}' must be a list of a number for each of the {} layers, empty or null",
          config.where(), kKey, num_layers);
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < num_layers; ++i) {
    if (list.empty() ? (i + 1) % interval != 0 : json_size(list[i], kKey, config.where()) != 0)
      layers.push_back(i);
  }
  return layers;
}

/// Chunks in the layers that are rotated, which a list of types may only repeat.
void read_chunks(const ConfigJson& config, ModelConfig& model) {
  const int64_t chunk = config.bounded("attention_chunk_size", 1, kMaxLength);
  std::vector<int64_t> layers = read_rotated_layers(config, model.num_layers);
  require(config.is_null("layer_types") ||
              read_layer_types(config, model.num_layers, "chunked_attention") == layers,
          "{}: 'layer_types' must be chunked_attention in the layers with a rotation, as "
          "'no_rope_layers' says, and full_attention in the others; nothing else is supported",
          config.where());
  if (!layers.empty()) model.window_kind = WindowKind::kChunked;
  set_window(model, chunk, std::move(layers));
}

/// Numbers of heads by a list for all layers, which may depend on the window alone.
void read_listed_heads(const ConfigJson& config, ModelConfig& model) {
  constexpr const char* kKey = "num_attention_heads_per_layer";
  if (config.is_null(kKey)) return;
  const json& list = config.value(kKey);
  require(list.is_array() && std::cmp_equal(list.size(), model.num_layers),
          "{}: '{}' must be a list of one number for each of the {} layers", config.where(), kKey,
          model.num_layers);
  int64_t heads[2] = {0, 0};  // of layers without a window, and with
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    int64_t& own = heads[model.has_window(layer) ? 1 : 0];
    const int64_t found = json_size(list[layer], "a number of heads", config.where());
    require(found >= 1 && found <= kMaxHeads, "{}: '{}' lists {} heads; from 1 to {} are supported",
            config.where(), kKey, found, kMaxHeads);
    require(own == 0 || own == found,
            "{}: '{}' has {} and {} heads in layers of one type, which must be alike",
            config.where(), kKey, own, found);
    own = found;
  }
  model.num_heads = heads[0] > 0 ? heads[0] : heads[1];
  if (heads[1] > 0 && heads[1] != model.num_heads) model.window_heads = heads[1];
}

}  // namespace

std::vector<int64_t> read_layer_types(const ConfigJson& config, int64_t num_layers,
                                      std::string_view other) {
  const json& types = config.value("layer_types");
  require(types.is_array() && std::cmp_equal(types.size(), num_layers),
          "{}: 'layer_types' must be a list of one type for each of the {} layers", config.where(),
          num_layers);
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < num_layers; ++i) {
    const std::string& type = json_text(types[i], "a type in layer_types", config.where());
    require(type == "full_attention" || type == other,
            "{}: the layer type {} is not supported; supported are full_attention and {}",
            config.where(), quote_for_message(type), other);
    if (type == other) layers.push_back(i);
  }
  return layers;
}

void read_windows(const ConfigJson& config, ModelConfig& model) {
  const WindowRule rule = config.family().window;
  if (rule == WindowRule::kNone) return;
  if (rule == WindowRule::kChunksOfRotated) return read_chunks(config, model);
  const bool switched =
      !config.family().has_key("use_sliding_window") || config.flag("use_sliding_window");
  const bool has_window = switched && !config.is_null("sliding_window");
  if (rule == WindowRule::kSize || rule == WindowRule::kSwitched) {
    if (has_window) model.window = config.bounded("sliding_window", 1, kMaxLength);
    return;
  }
  const bool listed = !config.is_null("layer_types");
  std::vector<int64_t> layers;
  if (listed) layers = read_layer_types(config, model.num_layers, "sliding_attention");
  if (!listed && has_window) layers = default_window_layers(config, model.num_layers);
  if (rule == WindowRule::kGemma) std::erase(layers, model.num_layers - 1);
  require(layers.empty() || has_window,
          "{}: 'layer_types' lists sliding_attention, but there is no window: set {}sliding_window",
          config.where(),
          config.family().has_key("use_sliding_window") ? "use_sliding_window and " : "");
  if (has_window)
    set_window(model, config.bounded("sliding_window", 1, kMaxLength), std::move(layers));
}

void read_temperatures(const ConfigJson& config, ModelConfig& model) {
  if (!config.family().has_key("attn_temperature_tuning")) return;
  if (!config.flag("attn_temperature_tuning")) return;
  model.temperature_scale = config.number("attn_scale");
  require(model.temperature_scale >= 0 && model.temperature_scale <= kMaxMultiplier,
          "{}: 'attn_scale' is {}; it must be from 0 to {}", config.where(),
          model.temperature_scale, kMaxMultiplier);
  model.temperature_length = config.bounded("floor_scale", 1, kMaxLength);
  if (!model.has_temperatures()) model.temperature_scale = 0;
}

void read_gating(const ConfigJson& config, ModelConfig& model) {
  if (config.family().gate_name.empty()) return;
  model.attention_gate = true;
  if (!config.family().has_key("gating")) return;
  const json& gating = config.value("gating");
  const bool of_heads = gating == true || gating == "per-head";
  require(of_heads || gating == "per-element",
          "{}: 'gating' is {}; supported are true, \"per-head\" and \"per-element\"",
          config.where(), quote_for_message(gating.dump()));
  model.gate_function = of_heads ? AttentionGate::kSoftplusOfHeads : AttentionGate::kSoftplus;
}

void read_window_heads(const ConfigJson& config, ModelConfig& model) {
  read_listed_heads(config, model);
  if (!config.family().mimo_windows || model.window == 0) return;
  model.window_sinks = true;
  model.window_kv_heads = 2 * model.kv_heads();
  require(model.window_kv_heads <= kMaxHeads,
          "{}: 'num_key_value_heads' is {}, twice which layers with a window have; at most {} are "
          "supported",
          config.where(), model.kv_heads(), kMaxHeads);
}

}  // namespace tessera
