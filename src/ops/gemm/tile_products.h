#pragma once

#include <cstdint>

#include "ops/gemm/gemm.h"

namespace tessera {

/// Words of scratch memory, at a multiple of 64 bytes, for multiply_on_tiles.
int64_t tile_scratch_words();

/// Runs a product of BF16 on this thread's tile registers. REQUIRES may_use_tiles(), and extents of
/// at least 1.
void multiply_on_tiles(const Gemm& product, uint32_t* scratch);

/// Whether gemm_on_tiles takes a product: BF16 inputs, large enough that filling registers with
/// zeros costs little, and tile registers.
bool suits_tiles(const Gemm& product);

/// The same on all threads (share_out_product).
void gemm_on_tiles(const Gemm& product);

}  // namespace tessera
