#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/blend.h"

namespace tessera {

/// The datasets of a run and how they are mixed.
struct BlendPlan {
  std::vector<std::string> prefixes;  ///< of all token files, in the order of their first mention
  /// Weights, one a prefix, each from a step on; the first from step 0.
  struct Change {
    int64_t first_step = 0;
    std::vector<double> weights;
  };
  std::vector<Change> changes;

  /// The same by samples.
  Blend make_blend(int64_t samples_per_step) const;
};

/// Reads data.blend, entries "WEIGHT PREFIX", and data.blend_changes, entries "STEP: WEIGHT
/// PREFIX"; those of one step are the whole blend from that step on. Throws UserError that names
/// the entry.
BlendPlan parse_blend(const std::vector<std::string>& blend,
                      const std::vector<std::string>& changes);

}  // namespace tessera
