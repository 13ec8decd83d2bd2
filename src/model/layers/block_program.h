#pragma once

#include "model/build/model_program.h"

namespace tessera {

/// What stands between a layer's norm and its residual addition.
enum class LayerBlock : uint8_t { kAttention, kMlp, kMoe };

/// One block of a layer of the kind as a program of its own: the very operators that build_layer
/// has there. `hidden` is the normed hidden state A [T_l,H], `hidden_out` what is added to the
/// residual stream; other ports are as build_layer's.
/// REQUIRES kind.moe for kMoe, and not for kMlp.
ModelProgram build_block(const ModelConfig& config, LayerBlock block, LayerKind kind,
                         const BatchShape& shape, const StageGroups& groups);

}  // namespace tessera
