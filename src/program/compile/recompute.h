#pragma once

#include <string>
#include <vector>

#include "program/differentiate.h"

namespace tessera {

/// Rewrites a backward program so that the forward values `dropped` are computed again, just before
/// their first use, instead of being kept. What that needs is read from values still kept, or
/// computed again too. The numbers do not change: the same kernels see the same inputs. Nodes that
/// make what `backward.saved` says are forward values are left out. Throws
/// UserError where a value comes from an operator that may not run twice (routing decisions).
Backward recompute(const Program& forward, const Backward& backward,
                   const std::vector<ValueId>& dropped);

/// Which values a training run computes again instead of keeping: names of forward values, or
/// {"all"} for everything that may run twice.
using RecomputePolicy = std::vector<std::string>;

/// Whether the backward pass computes a forward value again instead of reading it, where it needs
/// it.
bool is_dropped(const Program& forward, ValueId id, const RecomputePolicy& policy);

/// Those of the values that the backward program reads.
std::vector<ValueId> choose_dropped(const Program& forward, const Backward& backward,
                                    const RecomputePolicy& policy);

}  // namespace tessera
