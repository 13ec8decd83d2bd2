#pragma once

#include <optional>
#include <string>
#include <vector>

#include "model/build/weight_placement.h"
#include "model/config/config.h"
#include "parallel/stage_groups.h"
#include "program/program.h"

namespace tessera {

/// The shape of one micro-batch, and the storage type of activations and matrix weights. The ranks
/// of TP · CP share it: each has T_l = T / (TP · CP) tokens of its own.
struct BatchShape {
  int64_t num_tokens = 0;       ///< T, all sequences together
  int64_t max_sequences = 1;    ///< bound of the packed sequences; cu_seqlens has one more entry
  int64_t sequence_length = 0;  ///< typical length, for the cost of attention; 0: T
  DType dtype = DType::kF32;
};

/// Keys and values of earlier tokens, for generation: the layer reads and extends caches of
/// `capacity` tokens.
struct CacheShape {
  int64_t capacity = 0;
};

/// One decoder layer as a program, and where its bound values are (-1: this layer has none).
/// Inputs: hidden A [T_l,H], embedded A [T_l,H] (multi-token prediction), positions I32 [T_g or
/// T_l] of the tokens that are rotated, cu_seqlens I32 [max_sequences+1] of the whole micro-batch
/// (training) or start I32 [1] and cache_length I32 [1] (generation), expert_bias F32 [E],
/// earlier_counts F32 [E] (balance over the global batch: see RunningCounts), segments I32 [T_l]
/// (there too, and where ranks share a balance loss: which of the stretches balanced together each
/// token is in), token_order I32 [T] (capacities over a whole micro-batch: see SharedCapacity).
/// Outputs: hidden A [T_l,H]; of an MoE layer also balance_loss F32 [1], z_loss F32 [1], counts F32
/// [E], dropped I64 [1], score_means F32 [E] (see Router): this rank's parts, which add up to the
/// micro-batch's over the ranks that share it, but for z_loss and score_means, whose mean does;
/// with earlier_counts also counts_so_far F32 [E], the next micro-batch's. A layer of multi-token
/// prediction works on W_h · RMSNorm(hidden) + W_e · RMSNorm(embedded), which is DeepSeek-V3's
/// projection of both concatenated (section 2.2).
struct LayerProgram {
  Program forward;
  WeightPlacements placements = {};
  ValueId hidden = -1;
  ValueId embedded = -1;
  ValueId positions = -1;
  ValueId cu_seqlens = -1;
  ValueId start = -1;
  ValueId cache_length = -1;
  ValueId key_cache = -1;
  ValueId value_cache = -1;
  ValueId expert_bias = -1;
  ValueId earlier_counts = -1;
  ValueId segments = -1;
  ValueId token_order = -1;

  ValueId hidden_out = -1;
  ValueId balance_loss = -1;
  ValueId z_loss = -1;
  ValueId score_means = -1;
  ValueId counts = -1;
  ValueId dropped = -1;
  ValueId counts_so_far = -1;
};

/// T_l: a rank's own tokens of a micro-batch.
inline int64_t own_tokens(const BatchShape& shape, const StageGroups& groups) {
  return shape.num_tokens / groups.token_ranks();
}
/// T_g: those of its tensor-parallel group.
inline int64_t group_tokens(const BatchShape& shape, const StageGroups& groups) {
  return own_tokens(shape, groups) * groups.tp->size();
}

/// "moe_layer", "dense_layer", "window_moe_layer" and so on; "mtp_" before those of multi-token
/// prediction.
std::string layer_kind_name(LayerKind kind);

/// Builds the program of the layers of one kind. With a cache the layer generates: it is not meant
/// to be differentiated.
LayerProgram build_layer(const ModelConfig& config, LayerKind kind, const BatchShape& shape,
                         const StageGroups& groups,
                         const std::optional<CacheShape>& cache = std::nullopt);

/// Token ids I32 [T_g] of the tensor-parallel group and this rank's rows of the table A [V,H] →
/// hidden A [T_l,H].
struct EmbeddingProgram {
  Program forward;
  WeightPlacements placements = {};
  ValueId tokens = -1;
  ValueId hidden_out = -1;
};
EmbeddingProgram build_embedding(const ModelConfig& config, const BatchShape& shape,
                                 const StageGroups& groups);

/// Final norm, head and cross-entropy. Inputs: hidden A [T_l,H], labels I32 [T_l] (-100: no loss),
/// gathered_labels I32 [T_g] where the vocabulary is spread over ranks, scale F32 [1]. Outputs:
/// loss F32 [1] (scale times the sum over this rank's valid tokens) and token_loss F32 [T_l].
/// `with_gradient` uses, where the vocabulary is whole, the fused operator, which computes its
/// gradients in the forward pass; the gradient of the loss that its backward program is given must
/// then be 1.
struct HeadProgram {
  Program forward;
  WeightPlacements placements = {};
  ValueId hidden = -1;
  ValueId labels = -1;
  ValueId gathered_labels = -1;
  ValueId scale = -1;
  ValueId loss = -1;
  ValueId token_loss = -1;
};
/// `depth` 0 is the model's head; depth k > 0 that of its k-th layer of multi-token prediction,
/// which has a norm of its own and shares the matrix.
HeadProgram build_head(const ModelConfig& config, const BatchShape& shape,
                       const StageGroups& groups, bool with_gradient, int64_t depth = 0);

/// Final norm and head for generation, on one rank: hidden A [T,H] → logits [T,V] in the storage
/// type.
struct LogitsProgram {
  Program forward;
  ValueId hidden = -1;
  ValueId logits = -1;
};
LogitsProgram build_logits(const ModelConfig& config, const BatchShape& shape);

}  // namespace tessera
