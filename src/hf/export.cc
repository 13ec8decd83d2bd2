#include <fmt/ranges.h>
#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/file/file.h"
#include "hf/convert.h"
#include "hf/family/name_list.h"
#include "hf/family/prediction_layers.h"
#include "hf/family/write_config.h"
#include "hf/folder_builder.h"
#include "hf/hf_record.h"
#include "hf/merged_adapters.h"
#include "hf/peft_adapters.h"
#include "hf/tensor_writer.h"
#include "hf/verify.h"
#include "model/weights/parameters.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// What config.json, tokenizer and layout are taken from, if anything.
struct Companions {
  fs::path folder;  ///< empty: nothing
  bool has_config = false;
  std::optional<HfRecord> record;
};

struct Export {
  ModelConfig model;  ///< what is written
  const Family* family = nullptr;
  std::string config_text;
  Companions companions;
  HfRecord record;
  TensorMap map;
  std::vector<std::string> notes;
};

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

void make_config(const ExportRequest& request, Export& work) {
  work.family =
      request.family.empty() ? &find_family_for(request.model) : &find_family(request.family);
  const auto obstacles = inexpressible(*work.family, request.model);
  require(obstacles.empty(),
          "model type '{}' cannot express this model, where 'here' is the model and 'there' the "
          "family: {}",
          work.family->model_type, fmt::join(obstacles, "; "));
  work.config_text =
      write_hf_config(*work.family, request.model,
                      request.options.dtype.value_or(request.model_dtype), request.max_length);
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

/// transformers keeps this one in F32 whatever the others are.
bool stays_f32(const Family& family, const std::string& name) {
  return family.has_correction_bias() && name.ends_with(family.correction_name);
}

void choose_types(Export& work, bool from_record) {
  for (MappedTensor& tensor : work.map.hf) {
    tensor.dtype = work.record.dtype_of(tensor.name);
    if (!from_record && stays_f32(*work.family, tensor.name)) tensor.dtype = DType::kF32;
  }
}

void check_own_tensors(const TensorMap& map, const CheckpointReader& reader, bool merges) {
  std::vector<std::string> wrong;
  const auto& found = reader.manifest().tensors;
  for (const MappedTensor& tensor : map.own) {
    const auto place = found.find(tensor.name);
    if (place == found.end() || !(place->second.shape == tensor.shape)) {
      wrong.push_back(fmt::format("{} {}", tensor.name, tensor.shape.to_string()));
    }
  }
  require(wrong.empty(), "{}: tensors of its configuration are missing or of another shape: {}",
          reader.path().string(), list_names(wrong));
  std::vector<std::string> left_over;
  for (const std::string& name : reader.names(TensorGroup::kModel)) {
    if (std::ranges::find(map.own, name, &MappedTensor::name) == map.own.end()) {
      left_over.push_back(name);
    }
  }
  std::erase_if(left_over, is_mtp_parameter);
  if (merges) std::erase_if(left_over, is_adapter_parameter);
  require(left_over.empty(), "{}: tensors that its configuration does not have: {}",
          reader.path().string(), list_names(left_over));
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

/// Of a request without multi-token prediction, of which `given` may have layers.
Export prepare(const ExportRequest& request, const ModelConfig& given,
               const CheckpointReader& reader, bool merges) {
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
  check_own_tensors(work.map, reader, merges);
  const int64_t padding = request.model.vocab_size - work.record.layout.vocab_size;
  if (padding > 0) {
    work.notes.push_back(fmt::format("{} rows of padding of the vocabulary are removed", padding));
  }
  return work;
}

std::string shard_name(size_t index, size_t count) {
  if (count == 1) return kHfWeightsFile;
  return fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

void write_index(const fs::path& folder, const nlohmann::json& weight_map, int64_t num_bytes) {
  const nlohmann::json index = {{"metadata", {{"total_size", num_bytes}}},
                                {"weight_map", weight_map}};
  write_file_synced(folder / kHfIndexFile, index.dump(2) + "\n");
}

void write_weights(const fs::path& folder, const Export& work, ElementSource& source,
                   const ExportRequest& request, ConversionProgress& progress) {
  const Plan plan = plan_to_hf(work.map);
  const std::span<const MappedTensor> tensors = work.map.hf;
  const auto borders = split_shards(tensors, request.options.shard_bytes);
  const size_t num_files = borders.size() - 1;
  nlohmann::json weight_map = nlohmann::json::object();
  for (size_t i = 0; i < num_files; ++i) {
    const std::string file = shard_name(i, num_files);
    const size_t count = borders[i + 1] - borders[i];
    const auto part = tensors.subspan(borders[i], count);
    write_shard(
        {folder / file, part, std::span(plan).subspan(borders[i], count), {{"format", "pt"}}},
        source, progress);
    for (const MappedTensor& tensor : part) weight_map[tensor.name] = file;
  }
  if (num_files > 1) write_index(folder, weight_map, count_bytes(tensors));
}

/// The trained model's own tokenizer, under the names that transformers looks for.
void write_tokenizer(const fs::path& folder, const ExportRequest& request) {
  if (request.tokenizer.empty() || path_exists(folder / "tokenizer.json") ||
      path_exists(folder / "tokenizer.model")) {
    return;
  }
  const bool is_json = request.tokenizer.extension() == ".json";
  write_file_synced(folder / (is_json ? "tokenizer.json" : "tokenizer.model"),
                    read_text_file(request.tokenizer));
  if (!is_json) return;
  const nlohmann::json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                 {"eos_token", request.end_of_document}};
  write_file_synced(folder / "tokenizer_config.json", config.dump(2) + "\n");
}

void write_companions(const fs::path& folder, const Export& work, const ExportRequest& request) {
  if (!work.companions.folder.empty()) copy_companion_files(work.companions.folder, folder);
  write_tokenizer(folder, request);
  write_file_synced(folder / "config.json", work.config_text);
}

VerifyReport verify_export(const fs::path& folder, const Export& work, ElementSource& source,
                           ConversionProgress& progress) {
  const HfTensors tensors(folder);
  check_tensors(work.map, tensors, {});
  const auto target = make_hf_source(work.map, tensors, std::nullopt);
  VerifyRequest request{.names = {},
                        .back = plan_to_own(work.map),
                        .source = &source,
                        .target = target.get(),
                        .advance = [&](int64_t num_bytes) { progress.advance(num_bytes); }};
  for (const MappedTensor& tensor : work.map.own) request.names.push_back(tensor.name);
  return verify_round_trip(request);
}

/// Neither multi-token prediction nor adapters: the model of Hugging Face.
ExportRequest plain_request(ExportRequest request) {
  request.model = without_adapters(without_prediction(std::move(request.model)));
  return request;
}

/// Adapters alone, which have no configuration and tokenizer of a model beside them.
ConvertReport export_adapters(const ExportRequest& request) {
  require(request.model.lora.is_on(), "{} has no low-rank adapters; leave --adapters out",
          request.source.string());
  FolderBuilder folder(request.target);
  const CheckpointReader reader(request.source);
  const ExportRequest decoder = plain_request(request);
  const Export work = prepare(decoder, decoder.model, reader, true);
  ConvertReport report{.model_type = std::string(work.family->model_type), .notes = work.notes};
  report.num_target_tensors =
      2 * write_peft_adapters(folder.path(), work.map, reader, request.model);
  for (const std::string& name : reader.names(TensorGroup::kModel)) {
    if (!is_adapter_parameter(name)) continue;
    const auto& tensor = reader.manifest().tensors.at(name);
    report.num_source_tensors += 1;
    report.source_bytes += tensor.shape.num_elements() * dtype_size(tensor.dtype);
  }
  report.target_bytes =
      static_cast<int64_t>(std::filesystem::file_size(folder.path() / "adapter_model.safetensors"));
  folder.publish();
  return report;
}

}  // namespace

ConvertReport export_hf(const ExportRequest& request) {
  if (request.adapters_only) return export_adapters(request);
  const ExportRequest decoder = plain_request(request);
  const LoraConfig& lora = request.model.lora;
  FolderBuilder folder(request.target);
  const CheckpointReader reader(request.source);
  Export work = prepare(decoder, request.model, reader, lora.is_on());
  ConvertReport report{.model_type = std::string(work.family->model_type),
                       .num_source_tensors = static_cast<int64_t>(work.map.own.size()),
                       .num_target_tensors = static_cast<int64_t>(work.map.hf.size()),
                       .source_bytes = count_bytes(work.map.own),
                       .target_bytes = count_bytes(work.map.hf),
                       .notes = {}};
  folder.require_space(report.target_bytes);
  const int64_t checked = request.options.verify ? 2 * report.source_bytes : 0;
  ConversionProgress progress(request.options.progress, report.target_bytes + checked);
  const auto source = lora.is_on() ? make_merged_source(work.map, reader, request.model)
                                   : make_checkpoint_source(work.map, reader);
  progress.begin("writing");
  write_weights(folder.path(), work, *source, decoder, progress);
  judge_nonfinite(source->nonfinite(), request.source.string(), request.options.allow_nonfinite,
                  work.notes);
  write_companions(folder.path(), work, decoder);
  if (request.options.verify) {
    progress.begin("verifying");
    const VerifyReport verified = verify_export(folder.path(), work, *source, progress);
    report.num_verified = verified.num_tensors;
    report.num_narrowed = verified.num_narrowed;
  }
  folder.publish();
  report.notes = std::move(work.notes);
  if (lora.is_on())
    report.notes.push_back(
        fmt::format("adapters of rank {} are merged into the weights", lora.rank));
  return report;
}

}  // namespace tessera
