#pragma once

#include <filesystem>

#include "checkpoint/checkpoint.h"
#include "hf/tensors/tensor_map.h"
#include "model/config/config.h"

namespace tessera {

/// Writes the low-rank adapters of a checkpoint of `model` into a folder as PEFT's
/// save_pretrained does: adapter_config.json, and adapter_model.safetensors with lora_A [r, in] and
/// lora_B [out, r] of each module. `map` is that of the model without adapters. Modules that are
/// parts of one of Tessera's matrices, as gate and up, have the same lora_A. Throws UserError for
/// adapters of what is no module of its own in Hugging Face's model. Returns the number of modules.
int64_t write_peft_adapters(const std::filesystem::path& folder, const TensorMap& map,
                            const CheckpointReader& reader, const ModelConfig& model);

}  // namespace tessera
