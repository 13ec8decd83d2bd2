#include "hf/export_files.h"

#include <nlohmann/json.hpp>

#include "core/file/file.h"
#include "hf/hf_record.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string shard_name(size_t index, size_t count) {
  if (count == 1) return kHfWeightsFile;
  return fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

void write_index(const fs::path& folder, const nlohmann::json& weight_map, int64_t num_bytes) {
  const nlohmann::json index = {{"metadata", {{"total_size", num_bytes}}},
                                {"weight_map", weight_map}};
  write_file_synced(folder / kHfIndexFile, index.dump(2) + "\n");
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

}  // namespace

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

void write_companions(const fs::path& folder, const Export& work, const ExportRequest& request) {
  if (!work.companions.folder.empty()) copy_companion_files(work.companions.folder, folder);
  write_tokenizer(folder, request);
  write_file_synced(folder / "config.json", work.config_text);
}

}  // namespace tessera
