#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

namespace tessera::cuda {

/// to = from / (‖from‖ + eps), matrix by matrix of `elements` each; `to` may be `from`. `sums` is
/// scratch memory, F64 [batch, NewtonSchulzFactors::kSums].
void launch_normalize(DType dtype, const void* from, void* to, double* sums, int64_t batch,
                      int64_t elements, cudaStream_t stream);

/// to = a·I + b·gram + c·square, matrix by matrix [n, n]; `to` may be `gram`.
void launch_polynomial(DType dtype, const void* gram, const float* square, void* to, int64_t batch,
                       int64_t n, cudaStream_t stream);

}  // namespace tessera::cuda
