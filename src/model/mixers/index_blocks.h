#pragma once

#include "model/mixers/attention_inputs.h"
#include "ops/rope/rope.h"

namespace tessera {

/// The indexer's part of a layer with latent attention: what its scores are made of, from the
/// query latent of the tokens that this rank attends with, and the normed hidden state of its own.
/// `rotary`: of latent attention. Where all keys are seen there are its weights alone.
IndexValues build_index(LayerBuilder& builder, const AttentionShare& share, ValueId normed,
                        ValueId query_latent, RotarySpec rotary);

/// The keys that each token attends to: rows of packed keys, or of the caches, to which it appends
/// its own.
ValueId build_choice(LayerBuilder& builder, const IndexValues& index);

}  // namespace tessera
