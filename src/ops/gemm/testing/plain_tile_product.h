#pragma once

#include <cstdint>

#include "ops/gemm/gemm.h"

namespace tessera::testing {

/// multiply_on_tiles with registers that are plain arrays, for any processor.
void multiply_on_plain_tiles(const Gemm& product, uint32_t* scratch);

}  // namespace tessera::testing
