#pragma once

#include <string>
#include <vector>

#include "train/memory/policy_trial.h"

namespace tessera {

/// Names that a layer computes again, and what the layer then comes to.
struct LayerOption {
  std::vector<std::string> names;  ///< sorted; those that it computes again in any case included
  LayerCost cost;
};

/// The values that layers of a key keep and may compute again, by the node that makes them: one
/// value of a node costs as much as all. What `base` offloads by name is left out; so is what makes
/// no thousandth of the layer's bytes, or no 32nd of its node's, such as the statistics of norms.
std::vector<std::vector<std::string>> find_droppable(const PolicyTrial& trial,
                                                     const LayerProgramKey& base);

/// Ways to compute more again in layers of a key: those that no other way beats in bytes, working
/// memory and time at once, `base` itself in front. Dropped values need one another, so each is
/// compiled and judged: from nothing to everything by most bytes for the time, and back from
/// everything to nothing by most time for the bytes, within several limits of the working memory.
std::vector<LayerOption> find_layer_options(const PolicyTrial& trial, const LayerProgramKey& base);

/// The options with at most `transient` bytes of working memory, from the first on by the least
/// time for a byte: each next keeps less and takes longer. Empty where the first has more.
std::vector<size_t> order_options(const std::vector<LayerOption>& options, int64_t transient);

}  // namespace tessera
