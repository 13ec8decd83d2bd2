#pragma once

#include "train/testing/draw.h"
#include "train/testing/random_layout.h"

namespace tessera::testing {

// Mixers that layers of a drawn model have in place of attention, or beside it.

/// Gated DeltaNet in some layers, where tokens of a sequence are not spread, and a gate.
void draw_delta(Draw& draw, RandomLayout& result);

/// Mamba-2 in some layers, and layers of one part alone.
void draw_mamba(Draw& draw, RandomLayout& result);

/// A rotation of their own for layers with a window, or gated short convolutions in some layers
/// that would attend.
void draw_mixed(Draw& draw, RandomLayout& result);

/// Windows that are chunks, plain norms of queries and keys, and temperatures of queries.
void draw_chunks(Draw& draw, RandomLayout& result);

/// Compressed attention in place of another kind: windows alone where tokens of a sequence are
/// spread, else also compressed tokens, all of which are seen, so that rounding flips no choice.
void draw_compressed_attention(Draw& draw, RandomLayout& result);

/// Where routers read jittered tokens, nothing may keep those before, which may be named for
/// offload.
void draw_noise(Draw& draw, Settings& settings);

/// Probabilities before experts, and norms and scales of routers and experts of their own.
void draw_expert_norms(Draw& draw, RandomLayout& result);

/// Several residual streams.
void draw_streams(Draw& draw, RandomLayout& result);

/// A bias adds the same to the scores of all keys that are not rotated: its gradient is rounding,
/// of which AdamW makes steps.
void drop_idle_biases(ModelConfig& model);

/// The limit of a clamped SwiGLU: the published one, or one that many inputs are above.
void draw_limit(Draw& draw, ModelConfig& model);

/// Tables of token ids that choose experts in some layers.
void draw_hash_layers(Draw& draw, RandomLayout& result);

/// LayerNorms and a bias of the head, where no layers of multi-token prediction share them.
void draw_state_norms(Draw& draw, RandomLayout& result);

/// SparseMixer's probabilities, perhaps of drawn experts, where nothing else makes choices.
void draw_sparse_mixer(Draw& draw, RandomLayout& result);

}  // namespace tessera::testing
