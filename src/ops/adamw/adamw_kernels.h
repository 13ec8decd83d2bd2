#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/adamw/adamw_factors.h"

namespace tessera::cuda {

struct AdamWSlice {
  int64_t count;
  const float* grad;
  float* master;
  float* m;
  float* v;
  void* weight;  ///< BF16, or null
};
void launch_adamw(const AdamWFactors& factors, const AdamWSlice& slice, cudaStream_t stream);

}  // namespace tessera::cuda
