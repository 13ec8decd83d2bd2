#pragma once

#include "train/memory/layer_choices.h"
#include "train/memory/policy_trial.h"

namespace tessera {

/// A policy of one rank's layers that a search judged.
struct FoundPolicy {
  LayerChoices choices;
  PolicyCost cost;
};

/// How far the layers of a kind may differ: uniform choices are found with a few trials and are
/// short to write.
enum class PolicyGrain : uint8_t { kLayers, kUniform };

struct PolicySearchResult {
  FoundPolicy kept;  ///< nothing chosen
  FoundPolicy best;  ///< of those within the limit the fastest; `fits` says whether there is one
  bool fits = false;
  FoundPolicy least;  ///< with the fewest bytes of all that were judged
};

/// Chooses what a rank's layers compute again or offload beside what `base` says, so that the rank
/// keeps to `limit` in the least time: of what fits, the fewest seconds, then the fewest
/// offloaded bytes, then the fewest bytes.
///
/// Every candidate is compiled, placed and judged as a whole (PolicyTrial). Candidates are: for
/// several limits of the working memory, layers from the last to the first that take one option
/// after the other (order_options), the least time for a byte first, as far as the limit asks for;
/// the same with the first 1, 2, 3, ... layers offloading everything, or the values that cost the
/// most to compute again; and what users would write by hand for all layers: everything, or one
/// value, recomputed, offloaded or both. The best of them is then improved layer by layer. Nothing
/// is offloaded on the host, where it would save nothing. Of uniform choices layers of a kind take
/// options together, what is offloaded is all that they keep, and nothing is improved after that.
PolicySearchResult search_policy(const PolicyTrial& trial, const SavedPolicy& base,
                                 const MemoryLimit& limit,
                                 PolicyGrain grain = PolicyGrain::kLayers);

}  // namespace tessera
