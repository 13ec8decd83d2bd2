#pragma once

#include <span>

#include "core/tensor.h"
#include "hf/config/hf_config.h"
#include "hf/tensors/hf_tensors.h"
#include "hf/tensors/tensor_map.h"

namespace tessera {

/// Reads tensors in Hugging Face's names and layout (weights, but also e.g. their gradients) into
/// Tessera's: `tensors` are all parameters of the model and the expert biases of its MoE layers,
/// F32 or BF16. Values are converted, and rounded where a type narrows. Padded vocabulary rows, and
/// expert biases that the family does not have, become zero. Throws UserError when tensors are
/// missing, left over or of another shape.
void load_hf_tensors(const ImportedConfig& config, const HfTensors& source,
                     std::span<const NamedTensor> tensors);

}  // namespace tessera
