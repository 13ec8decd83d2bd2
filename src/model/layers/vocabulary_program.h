#pragma once

#include <string>

#include "model/build/model_program.h"

namespace tessera {

/// The weight of the final norm (depth 0), or of that before the head of a predicted token.
std::string head_norm_name(int64_t depth);
/// Its bias, where it is a LayerNorm.
std::string head_norm_bias_name(int64_t depth);

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
