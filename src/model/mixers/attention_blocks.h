#pragma once

#include "model/build/layer_builder.h"

namespace tessera {

/// The attention block of a layer, of either kind, from the normed hidden state to what is added to
/// the residual stream. With the builder's cache it attends to earlier tokens too.
ValueId build_attention(LayerBuilder& builder, ValueId normed);

}  // namespace tessera
