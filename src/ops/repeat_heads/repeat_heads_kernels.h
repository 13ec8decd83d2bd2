#pragma once

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// Rows of `num_heads` heads of `head_size` on one side and `times` copies of each on the other.
struct HeadCopies {
  DType dtype;
  RowCount rows;
  int num_heads;
  int head_size;
  int times;
  const void* in;
  void* out;
};
void launch_repeat_heads(const HeadCopies& call, cudaStream_t stream);
void launch_sum_heads(const HeadCopies& call, cudaStream_t stream);

}  // namespace tessera::cuda
