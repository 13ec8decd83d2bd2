#pragma once

#include <vector>

#include "model/run/layer_binder.h"
#include "model/run/pass_order.h"
#include "model/weights/expert_states.h"

namespace tessera {

/// A program forward and backward.
struct BoundPasses {
  BoundProgram forward, backward;
};

/// What the passes over one layer need.
struct BoundLayer {
  const KindProgram* kind = nullptr;
  ExpertState* experts = nullptr;  ///< null for a dense layer
  BoundProgram forward, backward, weights;
  BoundProgram copies;      ///< makes the copies of weights, where it has any
  BoundPasses embedding;    ///< of multi-token prediction
  int64_t moe_idx = -1;     ///< among the chunk's MoE layers; -1 for a dense layer
  OwnedTensor expert_bias;  ///< the device's, where that is not the host

  bool is_mtp() const { return kind->layout.has(Port::kEmbedded); }
};

/// All programs of a chunk, bound to the memory of one micro-batch.
struct BoundChunk {
  BoundPasses embedding;           ///< where the chunk has it
  std::vector<BoundLayer> layers;  ///< in the order of the model
  std::vector<BoundPasses> heads;  ///< by depth; empty where the chunk has no loss
  BoundProgram evaluation;         ///< the head without gradients, likewise

  BoundProgram& find(const ProgramRef& ref);
};

}  // namespace tessera
