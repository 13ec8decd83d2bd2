#pragma once

#include "model/build/layer_builder.h"

namespace tessera {

/// "gate_up" where the MLP is gated, else "up".
std::string first_matrix_name(const ModelConfig& config);

/// The dense MLP with weights "<name>.gate_up" (or ".up") and "<name>.down", and their biases where
/// the model has them.
ValueId build_mlp(LayerBuilder& builder, const std::string& name, ValueId normed,
                  int64_t inner_size);

}  // namespace tessera
