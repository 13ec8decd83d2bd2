#include "hf/tensors/hf_tensors.h"

#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/file/file.h"
#include "hf/tensors/name_list.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// A file beside the index: nothing that leads out of the folder.
void check_shard_name(const std::string& name, std::string_view where) {
  const bool plain = !name.empty() && name.find('/') == std::string::npos &&
                     name.find('\0') == std::string::npos && name.ends_with(".safetensors");
  require(plain,
          "{}: weight_map names the file {}; expected the name of a .safetensors file in the "
          "same folder",
          where, quote_for_message(name));
}

fs::path find_weights(const fs::path& folder) {
  const bool single = path_exists(folder / kHfWeightsFile);
  const bool sharded = path_exists(folder / kHfIndexFile);
  require(single || sharded,
          "{} has neither {} nor {}; weights in other formats (pytorch_model.bin, GGUF) must be "
          "converted to safetensors first",
          folder.string(), kHfWeightsFile, kHfIndexFile);
  require(!single || !sharded, "{} has both {} and {}; remove the one that is out of date",
          folder.string(), kHfWeightsFile, kHfIndexFile);
  return folder / (single ? kHfWeightsFile : kHfIndexFile);
}

}  // namespace

std::map<std::string, std::string> parse_hf_index(std::string_view text, std::string_view where) {
  constexpr int kMaxDepth = 4;
  const nlohmann::json index = parse_strict_json(text, where, kMaxDepth);
  require_members(index, {"metadata", "weight_map"}, where);
  const nlohmann::json& map = json_member(index, "weight_map", where);
  require(map.is_object(), "{}: weight_map must be an object, found {}", where, map.type_name());
  std::map<std::string, std::string> files;
  for (const auto& [name, value] : map.items()) {
    const std::string& file =
        json_text(value, fmt::format("the file of {}", quote_for_message(name)), where);
    check_shard_name(file, where);
    files[name] = file;
  }
  return files;
}

HfTensors::HfTensors(const fs::path& path) : path_(path) {
  std::error_code ignored;
  const fs::path weights = fs::is_directory(path, ignored) ? find_weights(path) : path;
  if (weights.filename() == kHfIndexFile) {
    open_shards(weights);
  } else {
    open_file(weights);
  }
}

void HfTensors::open_file(const fs::path& path) {
  files_.push_back(std::make_unique<SafetensorsReader>(path));
  const SafetensorsReader& file = *files_.back();
  for (const SafetensorsEntry& entry : file.entries()) {
    const auto [place, is_new] = tensors_.emplace(entry.name, HfTensor{&entry, &file});
    require(is_new, "the tensor {} is in two files, {} and {}", quote_for_message(entry.name),
            place->second.file->path().string(), path.string());
  }
}

void HfTensors::open_shards(const fs::path& index) {
  constexpr int64_t kMaxBytes = int64_t{1} << 28;
  const auto map = parse_hf_index(read_text_file(index, kMaxBytes), index.string());
  std::set<std::string> shards;
  for (const auto& [name, file] : map) shards.insert(file);
  for (const std::string& shard : shards) open_file(index.parent_path() / shard);
  std::vector<std::string> misplaced;
  for (const auto& [name, file] : map) {
    const HfTensor* found = find(name);
    if (found == nullptr || found->file->path().filename() != file) misplaced.push_back(name);
  }
  require(misplaced.empty(), "{}: these tensors are not in the files that it names: {}",
          index.string(), list_names(misplaced));
  std::vector<std::string> unlisted;
  for (const auto& [name, tensor] : tensors_) {
    if (!map.contains(name)) unlisted.push_back(name);
  }
  require(unlisted.empty(), "{}: its files hold tensors that it does not list: {}", index.string(),
          list_names(unlisted));
}

void HfTensors::name_as_text_model(std::string_view prefix, std::string_view part) {
  rename([&](const std::string& name) {
    return name.starts_with(prefix) ? fmt::format("{}{}", part, name.substr(prefix.size())) : name;
  });
}

void HfTensors::rename(const std::function<std::string(const std::string&)>& to) {
  std::map<std::string, HfTensor, std::less<>> renamed;
  for (const auto& [name, tensor] : tensors_) {
    const std::string other = to(name);
    require(renamed.emplace(other, tensor).second, "{} has {} twice, once as {}", path_.string(),
            quote_for_message(other), quote_for_message(name));
  }
  tensors_ = std::move(renamed);
}

const HfTensor* HfTensors::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

int64_t HfTensors::num_bytes() const {
  int64_t total = 0;
  for (const auto& [name, tensor] : tensors_) total += std::ssize(tensor.bytes());
  return total;
}

}  // namespace tessera
