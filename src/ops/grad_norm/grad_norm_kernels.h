#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "core/dtype.h"

namespace tessera::cuda {

constexpr int kSquaresChunk = 16384;  ///< elements whose sum is one partial result

struct SquaresSlice {
  const void* x;
  int64_t count;
  DType dtype;  ///< F32 or BF16
};

/// sums[i] = the sum of squares of slices[i], in double; `partials` has one for each chunk of all
/// slices, and `sums` may be the host's memory where the device reaches it. Slices that are small
/// share launches.
void launch_sums_of_squares(std::span<const SquaresSlice> slices, double* partials, double* sums,
                            cudaStream_t stream);

/// The operands of GradClip beside the losses; `limits` and `norm` may be the host's memory where
/// the device reaches it.
struct GradClipArgs {
  const double* sums;
  int64_t num_sums;
  const double* limits;
  double* norm;
  float* grad_scale;
};
void launch_grad_clip(const GradClipArgs& args, std::span<const float* const> losses,
                      cudaStream_t stream);

}  // namespace tessera::cuda
