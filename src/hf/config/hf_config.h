#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "hf/config/block_scales.h"
#include "hf/family/family.h"
#include "model/config/config.h"

namespace tessera {

/// A Hugging Face configuration as a model of Tessera.
struct ImportedConfig {
  const Family* family = nullptr;
  ModelConfig model;
  int64_t max_length = 0;  ///< `max_position_embeddings`
  bool of_whole = false;   ///< the text part of a model with encoders of images (Family::whole)
  /// The text of config.json, of a whole that of its text part, but for `quantization_config`.
  std::string json;
  /// Of weights that are stored as E4M3.
  std::optional<BlockScales> scales;
  /// Whether experts' weights may be stored as MXFP4 (packed_tensors.h).
  bool mxfp4 = false;
  /// What the user should know, one line each.
  std::vector<std::string> notes;
};

/// Reads the text of a config.json with the meaning that transformers gives it. Every key is
/// accounted for; one that is unknown, or has a value that is not supported, is a UserError by
/// name. `where` names the file in messages.
ImportedConfig parse_hf_config(std::string_view text, const std::string& where);

/// The same of the file in a folder.
ImportedConfig read_hf_config(const std::filesystem::path& folder);

}  // namespace tessera
