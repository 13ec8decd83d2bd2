#include "hf/config/v4_json.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "hf/config/rope_json.h"
#include "model/config/limits.h"
#include "ops/stream_weights/stream_rule.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kWholeType = "sliding_attention";
constexpr const char* kSparseType = "compressed_sparse_attention";
constexpr const char* kHeavyType = "heavily_compressed_attention";

/// Keys of older files, which transformers folds into others.
constexpr std::array kOlderKeys = {"compress_ratios", "compress_rate_csa", "compress_rate_hca",
                                   "num_hash_layers", "qk_rope_head_dim"};

/// What a layer sees beside its window.
Compression compression_named(const ConfigJson& config, const json& type) {
  if (type == kWholeType) return Compression::kNone;
  if (type == kSparseType) return Compression::kSparse;
  require(type == kHeavyType,
          "{}: the type {} in layer_types is not supported; supported are {}, {} and {}",
          config.where(), quote_for_message(type.dump()), kWholeType, kSparseType, kHeavyType);
  return Compression::kHeavy;
}

/// The same by the rate of an older file.
Compression compression_of_rate(const ConfigJson& config, const json& rate) {
  if (rate == 0) return Compression::kNone;
  if (rate == 4) return Compression::kSparse;
  require(rate == 128,
          "{}: the rate {} in compress_ratios is not supported; supported are 0, 4 "
          "and 128",
          config.where(), quote_for_message(rate.dump()));
  return Compression::kHeavy;
}

/// A list of at least one entry a layer; null where the file has none. Further entries are of
/// layers of multi-token prediction.
const json* find_layer_list(const ConfigJson& config, const char* key, int64_t num_layers) {
  const json& list = config.value(key);
  if (list.is_null()) return nullptr;
  require(list.is_array() && std::cmp_greater_equal(list.size(), num_layers),
          "{}: '{}' must be a list of one entry for each of the {} layers", config.where(), key,
          num_layers);
  return &list;
}

/// By the first that the file has; without any as DeepSeek-V4-Pro has it.
Compression read_compression(const ConfigJson& config, int64_t layer, int64_t num_layers) {
  if (const json* types = find_layer_list(config, "layer_types", num_layers))
    return compression_named(config, (*types)[layer]);
  if (const json* rates = find_layer_list(config, "compress_ratios", num_layers))
    return compression_of_rate(config, (*rates)[layer]);
  return layer < 2 || layer % 2 == 0 ? Compression::kHeavy : Compression::kSparse;
}

/// A layer type's rate: the older key of its own wins over the object.
int64_t read_compress_rate(const ConfigJson& config, const char* type, const char* older,
                           int64_t otherwise) {
  if (!config.is_null(older)) return config.bounded(older, 1, kMaxLength);
  const json& rates = config.value("compress_rates");
  require(rates.is_null() || rates.is_object(),
          "{}: 'compress_rates' must be an object or null, found {}", config.where(),
          quote_for_message(rates.dump()));
  if (rates.is_null()) return otherwise;
  for (const auto& [name, rate] : rates.items()) {
    require(name == kSparseType || name == kHeavyType,
            "{}: {} in compress_rates is no type of layers", config.where(),
            quote_for_message(name));
  }
  require(rates.contains(type) && rates[type].is_number_unsigned() && rates[type] >= 1 &&
              rates[type] <= kMaxLength,
          "{}: compress_rates: '{}' must be an integer from 1 to {}", config.where(), type,
          kMaxLength);
  return rates[type].get<int64_t>();
}

/// The rotated elements of a head, as transformers counts them.
int64_t read_rotated(const ConfigJson& config, int64_t head_size) {
  constexpr double kPublished = 64.0 / 512.0;
  double factor = kPublished;
  if (!config.is_null("partial_rotary_factor")) {
    factor = config.number("partial_rotary_factor");
  } else if (!config.is_null("qk_rope_head_dim")) {
    factor = static_cast<double>(config.bounded("qk_rope_head_dim", 1, kMaxWidth)) /
             static_cast<double>(head_size);
  }
  return static_cast<int64_t>(static_cast<double>(head_size) * factor);
}

void read_compressed(const ConfigJson& config, ModelConfig& model) {
  model.attention = AttentionKind::kCompressed;
  model.attention_sinks = true;
  model.head_size = config.bounded("head_dim", 1, kMaxWidth);
  model.window = config.bounded("sliding_window", 1, kMaxLength);
  CompressedConfig& compressed = model.compressed;
  compressed = {.query_rank = config.bounded("q_lora_rank", 1, kMaxWidth),
                .rope_size = read_rotated(config, model.head_size),
                .output_groups = config.bounded("o_groups", 1, kMaxHeads),
                .output_rank = config.bounded("o_lora_rank", 1, kMaxWidth),
                .sparse_rate = read_compress_rate(config, kSparseType, "compress_rate_csa", 4),
                .heavy_rate = read_compress_rate(config, kHeavyType, "compress_rate_hca", 128)};
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const Compression found = read_compression(config, layer, model.num_layers);
    if (found == Compression::kSparse) compressed.sparse_layers.push_back(layer);
    if (found == Compression::kHeavy) compressed.heavy_layers.push_back(layer);
  }
  if (compressed.sparse_layers.empty()) return;
  model.index = {.top_k = config.bounded("index_topk", 1, kMaxLength),
                 .num_heads = config.bounded("index_n_heads", 1, kMaxHeads),
                 .head_size = config.bounded("index_head_dim", 2, kMaxWidth)};
}

void read_residual_streams(const ConfigJson& config, ModelConfig& model) {
  model.residual_streams = config.bounded("hc_mult", 1, kMaxStreams);
  require(model.residual_streams > 1,
          "{}: 'hc_mult' is 1, and one stream with weights of its own is not supported; it must be "
          "from 2 to {}",
          config.where(), kMaxStreams);
  model.residual_sinkhorn_iterations =
      config.bounded("hc_sinkhorn_iters", 1, kMaxSinkhornIterations);
  model.residual_eps = config.positive("hc_eps");
}

/// By a list of the layers' types; without it, so many first ones.
void read_hash_layers(const ConfigJson& config, ModelConfig& model) {
  const json* types = find_layer_list(config, "mlp_layer_types", model.num_layers);
  constexpr int64_t kPublished = 3;
  const int64_t first = config.is_null("num_hash_layers")
                            ? kPublished
                            : config.bounded("num_hash_layers", 0, kMaxLayers);
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const json type = types != nullptr ? (*types)[layer] : json(layer < first ? "hash_moe" : "moe");
    require(type == "hash_moe" || type == "moe",
            "{}: the type {} in mlp_layer_types is not supported; supported are hash_moe and moe",
            config.where(), quote_for_message(type.dump()));
    if (type == "hash_moe") model.moe.hash_layers.push_back(layer);
  }
}

const char* layer_type_name(Compression compression) {
  switch (compression) {
    case Compression::kSparse:
      return kSparseType;
    case Compression::kHeavy:
      return kHeavyType;
    case Compression::kNone:
      break;
  }
  return kWholeType;
}

}  // namespace

void read_v4(const ConfigJson& config, ModelConfig& model) {
  if (!config.family().deepseek_v4) return;
  read_compressed(config, model);
  read_residual_streams(config, model);
  read_hash_layers(config, model);
}

void write_v4(const Family& family, const ModelConfig& model, json& values) {
  if (!family.deepseek_v4) return;
  const CompressedConfig& compressed = model.compressed;
  json types = json::array();
  json mlps = json::array();
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    types.push_back(layer_type_name(model.compression(layer)));
    mlps.push_back(model.is_hash_layer(layer) ? "hash_moe" : "moe");
  }
  values["layer_types"] = types;
  values["mlp_layer_types"] = mlps;
  values["compress_rates"] = {{kSparseType, compressed.sparse_rate},
                              {kHeavyType, compressed.heavy_rate}};
  values["q_lora_rank"] = compressed.query_rank;
  values["o_groups"] = compressed.output_groups;
  values["o_lora_rank"] = compressed.output_rank;
  values["sliding_window"] = model.window;
  values["partial_rotary_factor"] = rotated_share(model);
  values["rope_theta"] = model.rope.base;
  values["compress_rope_theta"] = model.compressed_rope.base;
  if (model.index.is_on()) {
    values["index_topk"] = model.index.top_k;
    values["index_n_heads"] = model.index.num_heads;
    values["index_head_dim"] = model.index.head_size;
  }
  values["hc_mult"] = model.residual_streams;
  values["hc_sinkhorn_iters"] = model.residual_sinkhorn_iterations;
  values["hc_eps"] = model.residual_eps;
  values["scoring_func"] = score_name(model.moe.score);
  for (const char* key : kOlderKeys) values.erase(key);
}

std::string saved_v4_name(const std::string& published) {
  constexpr std::string_view kScale = ".scale";
  constexpr std::string_view kKeyNorm = ".attn.kv_norm.weight";
  const auto without = [&](std::string_view end) {
    return published.substr(0, published.size() - end.size());
  };
  if (published.ends_with(kScale)) return saved_v4_name(without(kScale) + ".weight") + "_scale_inv";
  // transformers' way back takes it for a compressor's norm.
  if (published.ends_with(kKeyNorm)) return saved_v4_name(without(kKeyNorm) + ".attn.norm.weight");
  if (published == "embed.weight") return "model.embed_tokens.weight";
  if (published == "norm.weight") return "model.norm.weight";
  if (published.starts_with("hc_head_")) return "model.hc_head.hc_" + published.substr(8);
  return published.starts_with("layers.") ? "model." + published : published;
}

}  // namespace tessera
