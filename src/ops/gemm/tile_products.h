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

/// The same on all threads of the caller's OpenMP team setting, serially inside a parallel region.
/// How sums are made depends on the product's shape alone.
void gemm_on_tiles(const Gemm& product);

/// The rows and columns of the blocks that `threads` threads share out.
struct TileBlocks {
  int64_t rows = 0;
  int64_t cols = 0;
};
TileBlocks cut_for_tiles(int64_t m, int64_t n, int threads);

/// Into how many sums of neighbouring elements of the summed dim a product is cut whose result is
/// too small to keep many threads busy: a weight's gradient over many tokens. 1 for others.
int64_t count_tile_slices(const Gemm& product);

/// gemm_on_tiles with `multiply` in place of multiply_on_tiles; tests give others.
using TileMultiply = void (*)(const Gemm& product, uint32_t* scratch);
void share_out_tiles(const Gemm& product, TileMultiply multiply);

}  // namespace tessera
