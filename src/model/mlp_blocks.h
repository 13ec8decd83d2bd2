#pragma once

#include "model/layer_builder.h"

namespace tessera {

/// "gate_up" where the MLP is gated, else "up".
std::string first_matrix_name(const ModelConfig& config);

/// The dense MLP with weights "<name>.gate_up" (or ".up") and "<name>.down", and their biases where
/// the model has them.
ValueId build_mlp(LayerBuilder& builder, const std::string& name, ValueId normed,
                  int64_t inner_size);

/// How tokens reach the experts of the model's MoE layers, of which it has some.
DispatchChoice choose_dispatcher(const ModelConfig& config, const StageGroups& groups);

/// Router, routed experts and shared expert; sets the layer's MoE values.
ValueId build_moe(LayerBuilder& builder, ValueId normed);

}  // namespace tessera
