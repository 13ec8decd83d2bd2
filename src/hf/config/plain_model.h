#pragma once

#include "model/config/config.h"

namespace tessera {

/// The same model without what does not change its outputs, each choice said in one way only.
ModelConfig plain_model(const ModelConfig& model);

/// What a clamped SwiGLU clamps its inputs to, as it is configured where it is, so that no bit of
/// it is lost; 0 of other activations.
double swiglu_limit(const ModelConfig& model);

/// The factor on attention scores where no multiplier says another.
double plain_scale(const ModelConfig& model);

}  // namespace tessera
