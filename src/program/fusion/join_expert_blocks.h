#pragma once

#include "program/program.h"

namespace tessera {

/// For GPUs, and for BF16 alone: where a layer's experts are block-sparse products and have one
/// size, makes them the grouped products that they are. The values of their block-diagonal
/// matrices, the blocks of a block-row side by side (TopologyView), are the rows [R, g] that
/// grouped products keep, and all that is done for those serves blocks too: activations inside
/// products, gathers. The topology is no longer made, and where all experts are on this rank, rows
/// are no longer padded to whole blocks. Experts of different sizes stay as they are.
Program join_expert_blocks(const Program& program);

}  // namespace tessera
