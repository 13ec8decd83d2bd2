#pragma once

#include <string_view>
#include <vector>

#include "hf/config/config_json.h"

namespace tessera {

/// The layers whose type in `layer_types` is not full attention but `other`; no third one may be.
std::vector<int64_t> read_layer_types(const ConfigJson& config, int64_t num_layers,
                                      std::string_view other);

/// Which layers have a sliding window, by the family's rule.
void read_windows(const ConfigJson& config, ModelConfig& model);

/// Llama 4's factors of queries in layers without a rotation. REQUIRES that windows and rotations
/// are read.
void read_temperatures(const ConfigJson& config, ModelConfig& model);

/// Numbers of heads, and sinks, where layers with a window have their own.
void read_window_heads(const ConfigJson& config, ModelConfig& model);

/// The function of attention's gate, where `gating` says it (Laguna).
void read_gating(const ConfigJson& config, ModelConfig& model);

}  // namespace tessera
