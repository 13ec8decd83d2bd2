#pragma once

#include "model/build/layer_builder.h"

namespace tessera {

/// How tokens reach the experts of the model's MoE layers, of which it has some.
DispatchChoice choose_dispatcher(const ModelConfig& config, const StageGroups& groups);
/// The same in words, with the clones that there may be.
std::string describe_dispatcher(const ModelConfig& config, const StageGroups& groups);

/// Router, routed experts and shared expert; sets the layer's MoE ports.
ValueId build_moe(LayerBuilder& builder, ValueId normed);

}  // namespace tessera
