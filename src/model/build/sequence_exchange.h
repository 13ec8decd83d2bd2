#pragma once

#include "core/slice.h"
#include "model/build/layer_builder.h"

namespace tessera {

// Context parallelism of mixers that hand something from token to token: the ranks of CP, which
// have some tokens each, exchange heads for tokens, so that each runs whole sequences of some of
// the heads of its tensor-parallel rank. Without context parallelism nothing is exchanged.

/// P: the ranks of CP.
int64_t sequence_parts(const StageGroups& groups);
/// Which of `num_heads` heads, those of the tensor-parallel rank, this rank runs: N / P of them, or
/// one, which neighbours have too, where there are fewer heads than ranks. REQUIRES one number to
/// be a multiple of the other.
IndexRange sequence_heads(const StageGroups& groups, int64_t num_heads);

/// x A [T_g, N·D] -> A [B·S, ...]: those heads of all tokens of the micro-batch, in order.
ValueId gather_sequences(LayerBuilder& builder, ValueId x, int64_t num_heads,
                         const std::string& name);
/// The way back: x A [B·S, (N/P)·D] -> A [T_g, N·D].
ValueId scatter_sequences(LayerBuilder& builder, ValueId x, int64_t num_heads,
                          const std::string& name);

}  // namespace tessera
