#include "hf/config/kimi_json.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "hf/config/window_json.h"
#include "model/config/limits.h"
#include "ops/short_conv/short_conv.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kNested = "linear_attn_config";

/// The object of published files, empty where there is none.
json nested_of(const ConfigJson& config) {
  if (config.is_null(kNested)) return json::object();
  const json& nested = config.value(kNested);
  const std::string where = fmt::format("{}: {}", config.where(), kNested);
  require(nested.is_object(), "{} must be an object, found {}", where,
          quote_for_message(nested.dump()));
  require_members(
      nested, {"head_dim", "num_heads", "short_conv_kernel_size", "kda_layers", "full_attn_layers"},
      where);
  return nested;
}

/// A size of the object, or where that does not say it, of the key beside it.
int64_t read_size(const ConfigJson& config, const json& nested, const char* name, const char* key,
                  int64_t most) {
  if (!nested.contains(name)) return config.bounded(key, 1, most);
  const std::string where = fmt::format("{}: {}", config.where(), kNested);
  const int64_t found = json_size(nested[name], name, where);
  require(found >= 1 && found <= most, "{}: '{}' is {}; it must be from 1 to {}", where, name,
          found, most);
  return found;
}

/// Layers of one list of the object, counted from 0.
std::set<int64_t> read_list(const ConfigJson& config, const json& nested, const char* name,
                            int64_t num_layers) {
  const std::string where = fmt::format("{}: {}", config.where(), kNested);
  require(nested[name].is_array(), "{}: '{}' must be a list of layers, found {}", where, name,
          quote_for_message(nested[name].dump()));
  std::set<int64_t> layers;
  for (const json& value : nested[name]) {
    const int64_t layer = json_size(value, "a layer", where);
    require(layer >= 1 && layer <= num_layers,
            "{}: '{}' lists layer {}; layers are counted from 1 to {}", where, name, layer,
            num_layers);
    layers.insert(layer - 1);
  }
  return layers;
}

/// The layers with Kimi Delta Attention as the object lists them: each layer is in one list.
std::optional<std::vector<int64_t>> read_nested_layers(const ConfigJson& config, const json& nested,
                                                       int64_t num_layers) {
  if (!nested.contains("kda_layers") || !nested.contains("full_attn_layers")) return std::nullopt;
  const std::set<int64_t> kimi = read_list(config, nested, "kda_layers", num_layers);
  const std::set<int64_t> full = read_list(config, nested, "full_attn_layers", num_layers);
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    require(kimi.contains(layer) != full.contains(layer),
            "{}: {}: layer {} must be in one of 'kda_layers' and 'full_attn_layers'",
            config.where(), kNested, layer + 1);
  }
  return std::vector<int64_t>(kimi.begin(), kimi.end());
}

std::vector<int64_t> read_layers(const ConfigJson& config, const json& nested, int64_t num_layers) {
  if (!config.is_null("layer_types"))
    return read_layer_types(config, num_layers, "linear_attention");
  if (const auto listed = read_nested_layers(config, nested, num_layers)) return *listed;
  std::vector<int64_t> layers;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    if (layer == 0 || layer % 4 != 0) layers.push_back(layer);
  }
  return layers;
}

}  // namespace

void read_kimi(const ConfigJson& config, ModelConfig& model) {
  if (!config.family().kimi_delta) return;
  require(model.activation == Activation::kSwiGLU,
          "{}: 'hidden_act' is {}; only silu is supported here, of the short convolutions too",
          config.where(), quote_for_message(config.text("hidden_act")));
  const json nested = nested_of(config);
  const int64_t heads = read_size(config, nested, "num_heads", "linear_num_heads", kMaxHeads);
  const int64_t size = read_size(config, nested, "head_dim", "linear_head_dim", kMaxWidth);
  model.delta = {.kind = DeltaKind::kKimi,
                 .num_key_heads = heads,
                 .num_value_heads = heads,
                 .key_size = size,
                 .value_size = size,
                 .conv_size = read_size(config, nested, "short_conv_kernel_size",
                                        "linear_conv_kernel_dim", ShortConv::kMaxTaps)};
  model.delta_layers = read_layers(config, nested, model.num_layers);
}

void write_kimi(const Family& family, const ModelConfig& model, json& values) {
  if (!family.kimi_delta) return;
  const DeltaConfig& delta = model.delta;
  json types = json::array();
  json kimi = json::array();
  json full = json::array();
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const bool is_kimi = model.is_delta_layer(layer);
    types.push_back(is_kimi ? "linear_attention" : "full_attention");
    (is_kimi ? kimi : full).push_back(layer + 1);
  }
  values["layer_types"] = types;
  values["linear_num_heads"] = delta.num_value_heads;
  values["linear_head_dim"] = delta.value_size;
  values["linear_conv_kernel_dim"] = delta.conv_size;
  values[kNested] = {{"num_heads", delta.num_value_heads},
                     {"head_dim", delta.value_size},
                     {"short_conv_kernel_size", delta.conv_size},
                     {"kda_layers", kimi},
                     {"full_attn_layers", full}};
}

}  // namespace tessera
