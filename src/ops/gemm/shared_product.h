#pragma once

#include <cstdint>

#include "ops/gemm/gemm.h"

namespace tessera {

/// A product by the calling thread alone.
using ThreadProduct = void (*)(const Gemm& product);

/// Runs a product by blocks that `multiply` computes, on all threads of the caller's OpenMP team
/// setting, serially inside a parallel region. How sums are made depends on the product's shape
/// alone.
void share_out_product(const Gemm& product, ThreadProduct multiply);

/// The rows and columns of the blocks that `threads` threads share out.
struct ProductBlocks {
  int64_t rows = 0;
  int64_t cols = 0;
};
ProductBlocks cut_product(int64_t m, int64_t n, int threads);

/// Into how many sums of neighbouring elements of the summed dim a product is cut whose result is
/// too small to keep many threads busy: a weight's gradient over many tokens. 1 for others.
int64_t count_slices(const Gemm& product);

}  // namespace tessera
