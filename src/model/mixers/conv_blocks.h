#pragma once

#include "model/build/layer_builder.h"

namespace tessera {

/// A gated short convolution (ConvConfig) of the normed hidden states A [T_l,H]: three projections
/// B, C and x, y = C · conv(B · x), and one back, whose result it gives. Its channels are spread
/// over the tensor-parallel group, and exchanged for tokens over CP (sequence_exchange.h). With a
/// cache the last inputs of the convolution, B · x, are kept.
ValueId build_conv(LayerBuilder& builder, ValueId normed);

}  // namespace tessera
