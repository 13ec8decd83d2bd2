#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "ops/adamw/adamw_factors.h"
#include "ops/adamw/state_formats.h"

namespace tessera::cuda {

struct AdamWSlice {
  int64_t count;
  const void* grad;
  void* master;  ///< or the remainder, or the weight itself: AdamW::kMaster
  void* m;
  void* v;
  void* weight;  ///< BF16, where a master or remainder is beside it
};
/// How all slices of a call are kept.
struct AdamWKind {
  DType grad;
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

/// A slice [rows, columns] of which a moment has scales.
struct AdamWRows {
  int64_t rows;
  int64_t columns;
  AdamWSlice elements;
  uint8_t* m_scale;  ///< of each moment that has some
  uint8_t* v_scale;
};
struct AdamWRowsKind {
  DType grad;
  DType master;
  MomentKind m;
  MomentKind v;
  bool has_weight;
};

/// One launch for up to 40 slices.
void launch_adamw_rows(const AdamWRowsKind& kind, const AdamWStep& step,
                       std::span<const AdamWRows> slices, cudaStream_t stream);

/// One launch for up to 64 slices.
void launch_adamw(const AdamWKind& kind, const AdamWStep& step, std::span<const AdamWSlice> slices,
                  cudaStream_t stream);

}  // namespace tessera::cuda
