#pragma once

#include <cstddef>

#include "ops/gemm/gemm.h"

namespace tessera {

inline const void* element_at(const void* base, DType dtype, int64_t idx) {
  return static_cast<const std::byte*>(base) + idx * dtype_size(dtype);
}

/// A block of a product's index space.
struct GemmBlock {
  int64_t row = 0, col = 0, inner = 0;
  int64_t rows = 0, cols = 0, inners = 0;
};

/// The product of a block's part of A with its part of B, into its part of C.
inline Gemm part_of(const Gemm& p, const GemmBlock& block) {
  Gemm part = p;
  part.m = block.rows;
  part.n = block.cols;
  part.k = block.inners;
  const int64_t a_idx =
      p.transpose_a ? block.inner * p.lda + block.row : block.row * p.lda + block.inner;
  const int64_t b_idx =
      p.transpose_b ? block.col * p.ldb + block.inner : block.inner * p.ldb + block.col;
  part.a = element_at(p.a, p.input_type, a_idx);
  part.b = element_at(p.b, p.input_type, b_idx);
  part.c = const_cast<void*>(element_at(p.c, p.output_type, block.row * p.ldc + block.col));
  return part;
}

}  // namespace tessera
