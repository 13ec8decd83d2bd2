#pragma once

#include "model/config/config.h"

namespace tessera {

/// The factor on attention scores where no multiplier says another.
double plain_scale(const ModelConfig& model);

/// The same model without what does not change its outputs, each choice said in one way only.
ModelConfig plain_model(const ModelConfig& model);

}  // namespace tessera
