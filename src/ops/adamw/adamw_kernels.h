#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "ops/adamw/adamw_factors.h"

namespace tessera::cuda {

struct AdamWSlice {
  int64_t count;
  const float* grad;
  float* master;
  float* m;
  float* v;
  void* weight;  ///< BF16, or null, as in all slices of a launch
};
/// What all slices of a call share, in the device's memory.
struct AdamWStep {
  const AdamWFactors* factors;
  const AdamWGradScale* grad_scale;
};

/// One launch for up to 64 slices.
void launch_adamw(const AdamWStep& step, std::span<const AdamWSlice> slices, cudaStream_t stream);

}  // namespace tessera::cuda
