#pragma once

#include "model/build/layer_builder.h"

namespace tessera {

/// What the router decided for this rank's tokens.
struct RoutedTokens {
  ValueId probs_TK = -1;
  ValueId expert_idx_TK = -1;
};

/// What the router reads of the tokens.
ValueId jitter_tokens(LayerBuilder& builder, ValueId normed);

/// Chooses experts for the tokens, and sets the ports of balance.
RoutedTokens build_router(LayerBuilder& builder, ValueId tokens);

/// What experts that compute nothing give, -1 where there are none; the choices of the others are
/// left.
ValueId take_zero_experts(LayerBuilder& builder, ValueId tokens, RoutedTokens& routing);

}  // namespace tessera
