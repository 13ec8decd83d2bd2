#pragma once

#include <optional>

#include "model/build/layer_builder.h"

namespace tessera {

/// The attention block of a layer, of either kind, from the normed hidden state to what is added to
/// the residual stream. With a cache it attends to earlier tokens too.
ValueId build_attention(LayerBuilder& builder, ValueId normed,
                        const std::optional<CacheShape>& cache);

}  // namespace tessera
