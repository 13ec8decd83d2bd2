#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

constexpr int kSquaresChunk = 16384;  ///< elements whose sum is one partial result

/// *sum = the sum of squares of x [count], in double; `partials` has one for each chunk, and `sum`
/// may be the host's memory where the device reaches it.
void launch_sum_of_squares(const float* x, int64_t count, double* partials, double* sum,
                           cudaStream_t stream);

}  // namespace tessera::cuda
