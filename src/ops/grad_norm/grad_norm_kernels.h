#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

namespace tessera::cuda {

constexpr int kSquaresChunk = 16384;  ///< elements whose sum is one partial result

struct SquaresSlice {
  const float* x;
  int64_t count;
};

/// sums[i] = the sum of squares of slices[i], in double; `partials` has one for each chunk of all
/// slices, and `sums` may be the host's memory where the device reaches it. Slices that are small
/// share launches.
void launch_sums_of_squares(std::span<const SquaresSlice> slices, double* partials, double* sums,
                            cudaStream_t stream);

}  // namespace tessera::cuda
