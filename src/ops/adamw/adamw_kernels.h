#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "ops/adamw/adamw_factors.h"
#include "ops/adamw/state_formats.h"

namespace tessera::cuda {

struct AdamWSlice {
  int64_t count;
  const float* grad;
  void* master;  ///< or the remainder, or the weight itself: AdamW::kMaster
  void* m;
  void* v;
  void* weight;  ///< BF16, where a master or remainder is beside it
};
/// How all slices of a call are kept.
struct AdamWKind {
  DType master;
  DType m;
  DType v;
  bool has_weight;
};
/// What all slices of a call share, in the device's memory.
struct AdamWStep {
  const AdamWFactors* factors;
  const AdamWGradScale* grad_scale;
};

/// One launch for up to 64 slices.
void launch_adamw(const AdamWKind& kind, const AdamWStep& step, std::span<const AdamWSlice> slices,
                  cudaStream_t stream);

}  // namespace tessera::cuda
