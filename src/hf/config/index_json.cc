#include "hf/config/index_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "model/config/limits.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kSparse = "deepseek_sparse_attention";

/// Every layer has an indexer, whatever its `layer_types` say: they may say nothing else.
void check_layer_types(const ConfigJson& config, int64_t num_layers) {
  if (config.is_null("layer_types")) return;
  const json& types = config.value("layer_types");
  const bool known = types.is_array() && std::cmp_equal(types.size(), num_layers) &&
                     std::ranges::all_of(types, [](const json& type) { return type == kSparse; });
  require(known, "{}: 'layer_types' must be {} in each of the {} layers", config.where(), kSparse,
          num_layers);
}

[[noreturn]] void refuse_shared(const ConfigJson& config, const char* key) {
  user_error(
      "{}: by '{}' some layers see what an earlier layer's indexer chose, which is not supported; "
      "each layer must have an indexer of its own",
      config.where(), key);
}

/// GLM's keys for layers without an indexer of their own, in the order in which they are read.
void check_shared(const ConfigJson& config) {
  if (!config.family().has_key("indexer_types")) return;
  const json& types = config.value("indexer_types");
  if (!types.is_null()) {
    const bool full =
        types.is_array() && std::ranges::all_of(types, [](const json& t) { return t == "full"; });
    if (!full) refuse_shared(config, "indexer_types");
    return;
  }
  const json& pattern = config.value("index_topk_pattern");
  if (!pattern.is_null()) {
    const bool full =
        pattern.is_string() &&
        pattern.get_ref<const std::string&>().find_first_not_of('F') == std::string::npos;
    const bool listed = pattern.is_array() &&
                        std::ranges::all_of(pattern, [](const json& t) { return t == "full"; });
    if (!full && !listed) refuse_shared(config, "index_topk_pattern");
    return;
  }
  const json& every = config.value("index_topk_freq");
  if (!every.is_number_integer() || every > 1) refuse_shared(config, "index_topk_freq");
}

}  // namespace

void read_index(const ConfigJson& config, ModelConfig& model) {
  if (!config.family().has_key("index_topk") || config.family().deepseek_v4) return;
  check_layer_types(config, model.num_layers);
  check_shared(config);
  model.index = {.top_k = config.bounded("index_topk", 1, kMaxLength),
                 .num_heads = config.bounded("index_n_heads", 1, kMaxHeads),
                 .head_size = config.bounded("index_head_dim", 2, kMaxWidth),
                 .interleaved = config.family().interleaved_indexer};
}

void write_index(const ModelConfig& model, json& values) {
  if (!values.contains("index_topk") || model.is_compressed()) return;
  values["index_topk"] = model.index.top_k;
  values["index_n_heads"] = model.index.num_heads;
  values["index_head_dim"] = model.index.head_size;
  values["layer_types"] = json(model.num_layers, kSparse);
  if (!values.contains("indexer_types")) return;
  values["indexer_types"] = json(model.num_layers, "full");
  for (const char* other : {"index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"})
    values.erase(other);
}

}  // namespace tessera
