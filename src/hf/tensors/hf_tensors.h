#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/safetensors.h"

namespace tessera {

/// A tensor of a Hugging Face folder: its entry and the file that it is in.
struct HfTensor {
  const SafetensorsEntry* entry = nullptr;
  const SafetensorsReader* file = nullptr;

  std::span<const std::byte> bytes() const { return file->bytes(*entry); }
};

/// The tensors of a Hugging Face model, mapped for reading: one safetensors file, or a folder with
/// model.safetensors or with model.safetensors.index.json and its shards. Throws UserError for
/// damaged files, a tensor that is in two of them, and an index that does not fit its shards.
class HfTensors {
 public:
  explicit HfTensors(const std::filesystem::path& path);

  /// Takes tensors whose names begin with `prefix` for those of a model of text alone, whose names
  /// begin with `part` instead.
  void name_as_text_model(std::string_view prefix, std::string_view part);

  /// Gives every tensor the name that `to` has for it, where no two may be the same.
  void rename(const std::function<std::string(const std::string&)>& to);

  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, HfTensor, std::less<>>& all() const { return tensors_; }
  /// Null where there is none of that name.
  const HfTensor* find(std::string_view name) const;
  int64_t num_bytes() const;

 private:
  void open_file(const std::filesystem::path& path);
  void open_shards(const std::filesystem::path& index);

  std::filesystem::path path_;
  std::vector<std::unique_ptr<SafetensorsReader>> files_;
  std::map<std::string, HfTensor, std::less<>> tensors_;
};

/// The content of a model.safetensors.index.json: each tensor's file, which is in the same folder.
/// Throws UserError that starts with `where`.
std::map<std::string, std::string> parse_hf_index(std::string_view text, std::string_view where);

inline constexpr const char* kHfIndexFile = "model.safetensors.index.json";
inline constexpr const char* kHfWeightsFile = "model.safetensors";

}  // namespace tessera
