#pragma once

#include <oneapi/dnnl/dnnl.hpp>

#include "core/dtype.h"

namespace tessera {

/// What a oneDNN matrix product needs to know before it runs; its sizes come with each run.
struct MatmulKind {
  bool transpose_a = false;
  bool transpose_b = false;
  DType input_type = DType::kF32;
  bool accumulate = false;  ///< C is F32 either way
};

/// The memory of a row-major matrix [rows, cols], or of its transpose stored [cols, rows]. Extents
/// may be DNNL_RUNTIME_DIM_VAL.
struct MatrixLayout {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t leading_dim = 0;
  bool transposed = false;

  dnnl::memory::desc desc(DType dtype) const;
};

/// The product for any sizes, or an empty primitive where the CPU has none for this type. Sizes are
/// left to run time because expert sizes differ in every batch, and making a primitive costs
/// 100-250 us; oneDNN then uses its packed GEMM, as fast as the primitives made for one shape.
dnnl::matmul make_matmul(const MatmulKind& kind, const dnnl::engine& engine);

}  // namespace tessera
