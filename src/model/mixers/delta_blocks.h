#pragma once

#include "model/build/layer_builder.h"

namespace tessera {

/// The Gated DeltaNet block of a layer (Gated Delta Networks: Yang et al., 2024, section 3.4), or
/// that of Kimi Delta Attention (Kimi Linear: Kimi Team, 2025, figure 3), from the normed hidden
/// state to what is added to the residual stream. The ranks of a tensor-parallel group have some
/// heads each, and those of CP exchange them for tokens (sequence_exchange.h). With the builder's
/// cache tokens go on from earlier ones' states.
ValueId build_delta(LayerBuilder& builder, ValueId normed);

/// The block of the layer's kind: that one, Mamba-2's, or attention. REQUIRES a mixer.
ValueId build_mixer(LayerBuilder& builder, ValueId normed);

}  // namespace tessera
