#pragma once

#include "model/build/layer_builder.h"

namespace tessera {

/// How tokens reach the experts of the model's MoE layers, of which it has some.
DispatchChoice choose_dispatcher(const ModelConfig& config, const StageGroups& groups);
/// The same in words, with the clones that there may be.
std::string describe_dispatcher(const ModelConfig& config, const StageGroups& groups);

/// Router, routed experts and shared expert; sets the layer's MoE ports. `normed` is what they read
/// of the layer's state, but for what has a norm of its own (MoeConfig::router_norm,
/// MoeConfig::separate_norms).
ValueId build_moe(LayerBuilder& builder, ValueId state, ValueId normed);

}  // namespace tessera
