#pragma once

#include "model/build/layer_builder.h"

namespace tessera {

/// The Mamba-2 block of a layer (Transformers are SSMs: Dao and Gu, 2024, section 7.1), from the
/// normed hidden state to what is added to the residual stream. The ranks of a tensor-parallel
/// group have some groups of heads each, and those of CP exchange them for tokens
/// (sequence_exchange.h). With the builder's cache tokens go on from earlier ones'
/// states.
ValueId build_mamba(LayerBuilder& builder, ValueId normed);

}  // namespace tessera
