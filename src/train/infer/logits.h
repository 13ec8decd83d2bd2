#pragma once

#include <filesystem>

#include "train/infer/loaded_model.h"

namespace tessera {

/// Reads `input_ids` I64 [B, S] from a safetensors file and writes the model's `logits` F32
/// [B, S, V] to another: for comparing a model with other implementations. Throws UserError, also
/// for logits that are NaN or infinite unless they are allowed.
void write_logits(LoadedModel& model, const std::filesystem::path& input_ids,
                  const std::filesystem::path& output, bool allow_nonfinite = false);

}  // namespace tessera
