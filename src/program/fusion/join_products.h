#pragma once

#include <vector>

#include "program/program.h"

namespace tessera {

/// Small products become one operator each (ops/linear/joined_linear.h): those of the same rows by
/// several weights, those that are summed one onto the other, as the gradients of such rows are,
/// and the gradients of the weights. Small are those that are short beside their launches on a GPU
/// (suits_joined_kernel) and in BF16. What is computed keeps its bits, as far as the back end's
/// products do not depend on their sizes. `kept` are the intermediates that outlive a run.
Program join_products(const Program& program, const std::vector<ValueId>& kept);

}  // namespace tessera
