#pragma once

#include <span>
#include <vector>

#include "step/build/step_runs.h"

namespace tessera {

/// A part of a run of one of two passes.
struct MergedPart {
  bool is_forward = false;
  size_t run = 0;  ///< among those of its pass
  RunPart part;
};

/// The order in which a forward and a backward pass run side by side. Their runs are cut where they
/// wait for exchanges; next is always the part that can begin first, by estimates of what parts and
/// exchanges take, and of two that of the pass which has more left to do. Each pass keeps its own
/// order.
///
/// The head adds to gradients in its forward pass, perhaps to the embedding's: it comes behind what
/// the backward pass adds to those, which is the order, and gives the bits, of passes one behind
/// the other.
///
/// Ranks that exchange must come to the same order. They do where their programs have the same
/// shapes; where they have not (`same_shapes`), parts take turns by their number alone.
std::vector<MergedPart> merge_runs(std::span<const StepRun> forward,
                                   std::span<const StepRun> backward, bool same_shapes);

}  // namespace tessera
