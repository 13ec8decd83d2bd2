#pragma once

#include "model/mixers/attention_inputs.h"
#include "ops/rope/rope.h"
#include "ops/sparse_attention/sparse_attention.h"

namespace tessera {

/// What a layer with compressed tokens attends to.
struct EntryKeys {
  ValueId keys = -1;    ///< A [T + E, D]: of tokens, then of entries; or the cache of both
  ValueId chosen = -1;  ///< I32 [T, W + K], rows of those (WindowChoice)
};

/// Compresses tokens (DeepSeek-V4: DeepSeek-AI, 2026, sections 2.3.1 and 2.3.2), and chooses what
/// each sees of entries and of the window. `normed` has this rank's tokens, `query_latent` and
/// `keys` those that it attends with; `rotary` is of the layer's heads. REQUIRES a layer with
/// compressed tokens.
EntryKeys build_entries(LayerBuilder& builder, const AttentionShare& share, ValueId normed,
                        ValueId query_latent, ValueId keys, const RotarySpec& rotary);

/// What attention to these costs.
SparseSight entry_sight(const LayerBuilder& builder);

}  // namespace tessera
