#include "hf/export_plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file/file.h"
#include "hf/config/write_config.h"
#include "hf/tensors/name_list.h"
#include "hf/tensors/prediction_layers.h"
#include "hf/transfer/elements.h"
#include "model/weights/parameters.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

Companions find_companions(const ExportRequest& request) {
  const fs::path& root = request.like.empty() ? request.source : request.like;
  Companions found;
  for (const fs::path& folder : {root / kHfFolder, root}) {
    if (found.folder.empty() && path_exists(folder / "config.json")) found.folder = folder;
  }
  found.has_config = !found.folder.empty();
  require(found.has_config || request.like.empty(),
          "{} has no config.json; --like wants a folder of Hugging Face or a checkpoint made from "
          "one",
          request.like.string());
  if (!found.has_config && path_exists(root / kHfFolder)) found.folder = root / kHfFolder;
  const fs::path record = found.folder / kHfRecordFile;
  if (found.has_config && path_exists(record)) {
    found.record = parse_hf_record(read_text_file(record), record.string());
  }
  return found;
}

/// The model as it is without padding of the vocabulary.
ModelConfig exported_model(const ExportRequest& request, int64_t vocab_size) {
  ModelConfig model = request.model;
  model.vocab_size = vocab_size;
  return model;
}

/// A configuration that came along is kept to the byte, if it is the model's.
void reuse_config(const ExportRequest& request, Export& work) {
  const ImportedConfig config = read_hf_config(work.companions.folder);
  const ModelConfig model = exported_model(request, config.model.vocab_size);
  const auto differences = find_differences(model, config.model);
  require(differences.empty(),
          "the model is not that of {}, where 'here' is the model and 'there' the file: {}",
          (work.companions.folder / "config.json").string(), fmt::join(differences, "; "));
  require(config.model.vocab_size <= request.model.vocab_size,
          "the model has {} tokens, fewer than the {} of {}", request.model.vocab_size,
          config.model.vocab_size, work.companions.folder.string());
  work.family = config.family;
  work.config_text = config.json;
  work.record.layout.vocab_size = config.model.vocab_size;
}

/// With the tokens at which transformers and vLLM end a text, in place of the family's defaults,
/// which mean something else in another vocabulary: those of the original, or the run's own.
std::string with_token_ids(const std::string& config, const ExportRequest& request,
                           const Companions& companions) {
  using json = nlohmann::ordered_json;
  json values = json::parse(config);
  if (companions.has_config) {
    const json original = json::parse(read_text_file(companions.folder / "config.json"));
    for (const char* key : {"bos_token_id", "eos_token_id"})
      if (original.contains(key)) values[key] = original[key];
  } else if (request.end_of_document_id) {
    values["bos_token_id"] = nullptr;
    values["eos_token_id"] = *request.end_of_document_id;
  }
  return values.dump(2) + "\n";
}

void make_config(const ExportRequest& request, Export& work) {
  work.family =
      request.family.empty() ? &find_family_for(request.model) : &find_family(request.family);
  const auto obstacles = inexpressible(*work.family, request.model);
  require(obstacles.empty(),
          "model type '{}' cannot express this model, where 'here' is the model and 'there' the "
          "family: {}",
          work.family->model_type, fmt::join(obstacles, "; "));
  work.config_text = with_token_ids(
      write_hf_config(*work.family, request.model,
                      request.options.dtype.value_or(request.model_dtype), request.max_length),
      request, work.companions);
  work.record.layout.vocab_size = request.model.vocab_size;
}

/// Layout and types: as they came, where nothing else is asked for.
void decide_layout(const ExportRequest& request, Export& work) {
  const int64_t vocab_size = work.record.layout.vocab_size;
  if (work.companions.record) work.record = *work.companions.record;
  work.record.layout.vocab_size = vocab_size;
  if (!work.companions.record) work.record.dtype = request.model_dtype;
  if (request.options.dtype) {
    work.record.dtype = *request.options.dtype;
    work.record.other_dtypes.clear();
  }
  const bool one_tensor = work.family->expert_tensors != ExpertTensors::kPlain;
  require(!one_tensor || request.fused_experts.value_or(true),
          "the experts of model type '{}' are in one tensor for each layer; leave --experts split "
          "out",
          work.family->model_type);
  require(!work.family->plain_mlps || !request.fused_experts.value_or(false),
          "the experts of model type '{}' are one by one; leave --experts fused out",
          work.family->model_type);
  if (one_tensor) {
    work.record.layout.fused_experts = true;
    work.record.layout.plain_moe_name = false;
  } else if (request.fused_experts) {
    work.record.layout.fused_experts = *request.fused_experts;
    work.record.layout.plain_moe_name = *request.fused_experts && work.family->moe_name != "mlp";
  }
}

/// transformers keeps these in F32 whatever the others are.
bool stays_f32(const Family& family, const std::string& name) {
  if (family.has_correction_bias() && name.ends_with(family.correction_name)) return true;
  return family.deepseek_v4 &&
         (name.find(".hc_") != std::string::npos || name.ends_with("norm.weight") ||
          name.ends_with(".attn_sink") || name.ends_with(".ape"));
}

void choose_types(Export& work, bool from_record) {
  for (MappedTensor& tensor : work.map.hf) {
    tensor.dtype = work.record.dtype_of(tensor.name);
    if (tensor.is_whole_numbers) {
      if (!is_whole_storage(tensor.dtype)) tensor.dtype = DType::kI64;
      continue;
    }
    if (!from_record && stays_f32(*work.family, tensor.name)) tensor.dtype = DType::kF32;
  }
}

void check_own_tensors(const TensorMap& map, const ExportSource& source) {
  std::vector<std::string> wrong;
  for (const MappedTensor& tensor : map.own) {
    const auto place = source.shapes.find(tensor.name);
    if (place == source.shapes.end() || !(place->second == tensor.shape)) {
      wrong.push_back(fmt::format("{} {}", tensor.name, tensor.shape.to_string()));
    }
  }
  require(wrong.empty(), "{}: tensors of its configuration are missing or of another shape: {}",
          source.where, list_names(wrong));
  std::vector<std::string> left_over;
  for (const auto& [name, shape] : source.shapes) {
    if (std::ranges::find(map.own, name, &MappedTensor::name) == map.own.end()) {
      left_over.push_back(name);
    }
  }
  std::erase_if(left_over, is_mtp_parameter);
  if (source.merges) std::erase_if(left_over, is_adapter_parameter);
  require(left_over.empty(), "{}: tensors that its configuration does not have: {}", source.where,
          list_names(left_over));
}

/// With the layers of multi-token prediction of `given`, where the family has names for them.
void keep_predictions(const ModelConfig& given, Export& work) {
  if (given.mtp_layers == 0) return;
  const std::string why = why_without_predictions(*work.family, given);
  if (!why.empty()) {
    work.notes.push_back("multi-token prediction is left out: " + why);
    return;
  }
  work.model.mtp_layers = given.mtp_layers;
  work.model.mtp_normed = given.mtp_normed;
  work.config_text = with_prediction_count(*work.family, work.config_text, given.mtp_layers);
}

}  // namespace

Export prepare_export(const ExportRequest& request, const ModelConfig& given,
                      const ExportSource& source) {
  Export work{.model = request.model};
  work.companions = find_companions(request);
  if (!work.companions.has_config || !request.family.empty()) {
    make_config(request, work);
    work.companions.record.reset();  // of another family, perhaps
  } else {
    reuse_config(request, work);
  }
  decide_layout(request, work);
  keep_predictions(given, work);
  work.map = map_tensors(*work.family, work.model, request.model_dtype, work.record.layout);
  choose_types(work, work.companions.record && !request.options.dtype);
  check_own_tensors(work.map, source);
  const int64_t padding = request.model.vocab_size - work.record.layout.vocab_size;
  if (padding > 0) {
    work.notes.push_back(fmt::format("{} rows of padding of the vocabulary are removed", padding));
  }
  return work;
}

ExportRequest plain_request(ExportRequest request) {
  request.model = without_adapters(without_prediction(std::move(request.model)));
  return request;
}

}  // namespace tessera
