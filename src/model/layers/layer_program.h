#pragma once

#include <optional>
#include <string>

#include "model/build/model_program.h"

namespace tessera {

/// "moe_layer", "dense_layer", "window_moe_layer", "delta_moe_layer", "mamba_only_layer" and so on;
/// "mtp_" before those of multi-token prediction.
std::string layer_kind_name(LayerKind kind);

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

}  // namespace tessera
