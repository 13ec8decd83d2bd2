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

/// Where kernels run: beside others they keep to `num_sms` multiprocessors, which are enough for
/// most of the memory's bandwidth; 0: on all.
struct AdamWLaunch {
  int num_sms = 0;
  cudaStream_t stream = nullptr;
};

/// Slices that are small share launches.
void launch_adamw(const AdamWStep& step, std::span<const AdamWSlice> slices,
                  const AdamWLaunch& launch);

}  // namespace tessera::cuda
