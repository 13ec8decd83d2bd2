#pragma once

#include "model/mixers/attention_inputs.h"
#include "ops/rope/rope.h"

namespace tessera {

/// Compressed attention (DeepSeek-V4: DeepSeek-AI, 2026, section 2.3): low-rank queries, each head
/// normed, and one head of keys, which are the values too; the last elements of heads are rotated
/// as `rotary` says. In layers with compressed tokens also those.
QueryKeyValue build_compressed(LayerBuilder& builder, const AttentionShare& share, ValueId normed,
                               RotarySpec rotary);

/// What heads attended to, turned back and projected group by group, then together: values were
/// rotated at their positions, so that what a query sees of them is of their distance alone.
/// `rotary` as above.
ValueId build_grouped_output(LayerBuilder& builder, const AttentionShare& share, ValueId attended,
                             RotarySpec rotary);

}  // namespace tessera
