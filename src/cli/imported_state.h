#pragma once

#include <filesystem>
#include <string>

#include "checkpoint/checkpoint.h"
#include "hf/config/hf_config.h"

namespace tessera {

/// The state of a checkpoint made from a Hugging Face folder, which no training wrote: settings
/// under which the model computes what it did, and the tokenizer that comes along.
std::string imported_state(const ImportedConfig& config, DType dtype,
                           const std::filesystem::path& source);

/// The vocabulary of a checkpoint whose settings leave it to the tokenizer.
int64_t resolved_vocab_size(const CheckpointReader& reader);

}  // namespace tessera
