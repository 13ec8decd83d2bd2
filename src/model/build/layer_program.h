#pragma once

#include <optional>
#include <string>
#include <vector>

#include "model/build/ports.h"
#include "model/build/weight_placement.h"
#include "program/differentiate.h"

namespace tessera {

/// A program of the model before it is compiled, the ports by which it is bound
/// (model/build/ports.h says what each is) and where its weights lie.
struct ModelProgram {
  Program forward;
  WeightPlacements placements = {};
  PortMap ports = {};
  /// Accumulators that the forward program itself adds to: weight → accumulator.
  std::vector<Link> accumulators = {};

  bool has(Port port) const { return ports.has(port); }
  ValueId at(Port port) const { return ports.at(port); }
};

/// The program's weights that training leaves as they are.
std::vector<ValueId> frozen_weights(const ModelProgram& program);

/// "moe_layer", "dense_layer", "window_moe_layer", "delta_moe_layer", "mamba_only_layer" and so on;
/// "mtp_" before those of multi-token prediction.
std::string layer_kind_name(LayerKind kind);

/// What a layer of multi-token prediction calls the norm of the head that reads the same states
/// (ModelConfig::mtp_normed). It is no weight of the layer's own, but head_norm_name's.
inline constexpr std::string_view kPreviousNorm = "previous_norm.weight";
/// A layer's table of the experts of token ids, F32 [V, K] (MoeConfig::hash_layers).
inline constexpr std::string_view kHashTable = "moe.hash_table";
/// The weight of the final norm (depth 0), or of that before the head of a predicted token.
std::string head_norm_name(int64_t depth);
/// Its bias, where it is a LayerNorm.
std::string head_norm_bias_name(int64_t depth);
/// What names of the weights begin with by which that head reads residual streams.
std::string head_streams_name(int64_t depth);

/// Builds the program of the layers of one kind. What an MoE layer gives of its losses and counts
/// is this rank's part: they add up to the micro-batch's over the ranks that share it, except
/// z_loss and score_means, whose mean does. A layer of multi-token prediction works on W_h ·
/// RMSNorm(hidden) + W_e · RMSNorm(embedded), which is DeepSeek-V3's projection of both
/// concatenated (section 2.2); hidden may be normed as the head before it does. With residual
/// streams each is joined so (join_embedding_to_streams). With a cache the layer generates: it is
/// not meant to be differentiated.
ModelProgram build_layer(const ModelConfig& config, LayerKind kind, const BatchShape& shape,
                         const StageGroups& groups,
                         const std::optional<CacheShape>& cache = std::nullopt);

/// This rank's rows of the table A [V,H] for the tokens of its tensor-parallel group, each rank
/// then having the hidden states of its own tokens.
ModelProgram build_embedding(const ModelConfig& config, const BatchShape& shape,
                             const StageGroups& groups);

/// Final norm, head and cross-entropy. `with_gradient` uses, where the vocabulary is whole, the
/// fused operator, which computes its gradients in the forward pass; the gradient of the loss that
/// its backward program is given must then be 1. `depth` 0 is the model's head; depth k > 0 that of
/// its k-th layer of multi-token prediction, which has a norm of its own and shares the matrix.
ModelProgram build_head(const ModelConfig& config, const BatchShape& shape,
                        const StageGroups& groups, bool with_gradient, int64_t depth = 0);

/// Final norm and head for generation, on one rank. With `chosen_rows` also the choice of the
/// tokens that come next to so many rows, which have logits then: all T in their order, or fewer.
ModelProgram build_logits(const ModelConfig& config, const BatchShape& shape,
                          int64_t chosen_rows = 0);

}  // namespace tessera
