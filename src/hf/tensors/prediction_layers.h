#pragma once

#include <string>
#include <vector>

#include "hf/config/hf_config.h"
#include "hf/tensors/hf_tensors.h"

namespace tessera {

// Layers of multi-token prediction, which published files have and transformers' models do not:
// behind the last layer, or under names of their own (PredictionNames).

/// Tensors that are, or seem to be, of multi-token prediction, of any family: those of layers
/// behind the last one, and those named so.
std::vector<std::string> find_prediction_tensors(const HfTensors& tensors, int64_t num_layers);

/// Gives the model of a configuration the layers that the folder has. Says so in a note.
void take_predictions(ImportedConfig& config, const HfTensors& tensors);

/// Why the family's files cannot hold the model's layers of multi-token prediction; "" where they
/// can, or where there are none.
std::string why_without_predictions(const Family& family, const ModelConfig& model);

/// The text of a config.json, to the byte where it says already that there are `count` layers, or
/// where the family has no key for it.
std::string with_prediction_count(const Family& family, const std::string& config, int64_t count);

}  // namespace tessera
