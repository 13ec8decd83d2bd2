#pragma once

#include "core/dtype.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// y [rows, hidden] = x · rstd · weight [hidden], rstd [rows] = 1 / sqrt(mean(x²) + eps).
struct RmsNormRows {
  DType dtype;
  RowCount rows;
  int64_t hidden;
  float eps;
  const void* x;
  const float* weight;
  void* y;
  float* rstd;
  int num_sms;
};
void launch_rmsnorm(const RmsNormRows& call, cudaStream_t stream);

/// The gradient of x, plus the addend unless it is null, and that of the weight added into
/// `grad_weight` unless it is null; `partials` has column_partials_bytes(hidden).
struct RmsNormBackwardRows {
  DType dtype;
  RowCount rows;
  int64_t hidden;
  const void* x;
  const float* weight;
  const float* rstd;
  const void* grad;
  const void* addend;
  void* grad_x;
  Accumulator grad_weight;
  float* partials;
  int num_sms;
};
void launch_rmsnorm_backward(const RmsNormBackwardRows& call, cudaStream_t stream);

}  // namespace tessera::cuda
