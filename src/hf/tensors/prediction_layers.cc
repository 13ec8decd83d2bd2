#include "hf/tensors/prediction_layers.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "hf/tensors/map_builder.h"
#include "model/layers/vocabulary_program.h"

namespace tessera {
namespace {

constexpr const char* kCountKey = "num_nextn_predict_layers";

std::string layer_name(int64_t layer, std::string_view end) {
  return fmt::format("model.layers.{}.{}", layer, end);
}

/// The number behind "model.layers."; -1: none.
int64_t layer_of(const std::string& name) {
  constexpr std::string_view kPrefix = "model.layers.";
  if (!name.starts_with(kPrefix)) return -1;
  const std::string digits =
      name.substr(kPrefix.size(), name.find('.', kPrefix.size()) - kPrefix.size());
  const bool is_number = !digits.empty() && digits.size() < 10 &&
                         std::ranges::all_of(digits, [](char c) { return c >= '0' && c <= '9'; });
  return is_number ? std::stoll(digits) : -1;
}

/// How many of those layers a folder has under the family's names.
int64_t count_prediction_layers(const Family& family, int64_t num_layers,
                                const HfTensors& tensors) {
  if (family.predictions == PredictionNames::kApart)
    return tensors.find("mtp.fc.weight") != nullptr ? 1 : 0;
  int64_t count = 0;
  while (family.predictions == PredictionNames::kStreams &&
         tensors.find(fmt::format("mtp.{}.e_proj.weight", count)) != nullptr)
    ++count;
  while (family.predictions == PredictionNames::kBehindLayers &&
         tensors.find(layer_name(num_layers + count, "eh_proj.weight")) != nullptr)
    ++count;
  return count;
}

/// Whether its layers read states behind the final norm.
bool reads_normed(const Family& family) {
  return family.predictions != PredictionNames::kStreams;
}

}  // namespace

std::vector<std::string> find_prediction_tensors(const HfTensors& tensors, int64_t num_layers) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors.all()) {
    if (name.starts_with("model.mtp_") || name.starts_with("mtp.") || layer_of(name) >= num_layers)
      names.push_back(name);
  }
  return names;
}

void take_predictions(ImportedConfig& config, const HfTensors& tensors) {
  ModelConfig& model = config.model;
  model.mtp_layers = count_prediction_layers(*config.family, model.num_layers, tensors);
  model.mtp_normed = model.mtp_layers > 0 && reads_normed(*config.family);
  if (model.mtp_layers > 0)
    config.notes.push_back(fmt::format(
        "model.mtp_layers is {}: multi-token prediction is taken in, and trained where it is left "
        "so",
        model.mtp_layers));
}

std::string why_without_predictions(const Family& family, const ModelConfig& model) {
  if (model.mtp_layers == 0) return "";
  if (family.predictions == PredictionNames::kNone)
    return fmt::format("files of model type '{}' have no names for it here", family.model_type);
  if (!model.mtp_normed && reads_normed(family))
    return "its layers read states before the final norm, and those of published models behind it "
           "(model.mtp_normed)";
  if (family.predictions == PredictionNames::kApart && model.mtp_layers > 1)
    return fmt::format("files of model type '{}' have one layer of it, and the model {}",
                       family.model_type, model.mtp_layers);
  return "";
}

std::string with_prediction_count(const Family& family, const std::string& config, int64_t count) {
  using json = nlohmann::ordered_json;
  const bool has_key = family.predictions == PredictionNames::kBehindLayers ||
                       family.predictions == PredictionNames::kStreams;
  if (!has_key) return config;
  json values = json::parse(config);
  if (values.contains(kCountKey) && values[kCountKey] == count) return config;
  values[kCountKey] = count;
  return values.dump(2) + "\n";
}

void MapBuilder::add_prediction(int64_t layer) {
  if (family_.predictions == PredictionNames::kStreams) return add_stream_prediction(layer);
  const int64_t depth = layer - model_.num_layers;
  const int64_t size = model_.hidden_size;
  const bool apart = family_.predictions == PredictionNames::kApart;
  const std::string hf =
      apart ? fmt::format("mtp.layers.{}.", depth) : fmt::format("model.layers.{}.", layer);
  add_layer(layer, hf);
  const std::string beside = apart ? "mtp." : hf;
  link_norm(beside + (apart ? "pre_fc_norm_embedding.weight" : "enorm.weight"), size,
            own_ + "embed_norm.weight");
  link_norm(beside + (apart ? "pre_fc_norm_hidden.weight" : "hnorm.weight"), size,
            own_ + "hidden_norm.weight");
  // One projection of embedding and state side by side.
  link_groups(add_hf(beside + (apart ? "fc.weight" : "eh_proj.weight"), {size, 2 * size}), size,
              {{"embed_proj.weight", 1}, {"hidden_proj.weight", 1}}, size);
  link_norm(beside + (apart ? "norm.weight" : "shared_head.norm.weight"), size,
            head_norm_name(depth + 1));
  if (apart) return;
  const Shape table{layout_.vocab_size, size};
  if (layout_.repeated_embedding)
    map_.copies.emplace_back(add_hf(hf + "embed_tokens.weight", table), embedding_);
  if (layout_.repeated_head)
    map_.copies.emplace_back(add_hf(hf + "shared_head.head.weight", table), head_);
}

}  // namespace tessera
