#pragma once

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// y [rows, width] = x + bias [width].
struct AddBiasRows {
  DType dtype;
  RowCount rows;
  int64_t width;
  const void* x;
  const float* bias;
  void* y;
};
void launch_add_bias(const AddBiasRows& call, cudaStream_t stream);

}  // namespace tessera::cuda
