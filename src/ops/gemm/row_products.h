#pragma once

#include "ops/gemm/gemm.h"

namespace tessera {

/// How a product is computed: gemm, or gemm_of_rows.
using GemmFunction = void (*)(const Gemm&);

/// gemm whose rows do not depend on one another: a row of C has the same bits whatever other rows
/// the product has, and however many threads. For decoding, where the weights' bytes are the cost;
/// with many rows it is slower than gemm, whose bits are others. REQUIRES an A that is not
/// transposed.
void gemm_of_rows(const Gemm& product);

}  // namespace tessera
