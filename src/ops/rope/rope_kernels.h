#pragma once

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

constexpr int kMaxRopePairs = 512;

/// y [rows, num_heads · head_size] = x, of every head of which 2 · num_pairs elements from `offset`
/// on are turned; see Rope.
struct RopeRows {
  DType dtype;
  RowCount rows;
  int num_heads;
  int head_size;
  int offset;
  int num_pairs;
  bool interleaved;
  float cosine_amplitude;
  float sine_amplitude;  ///< negative: turns back
  const void* x;
  const int32_t* positions;
  void* y;
  float frequencies[kMaxRopePairs];
};
void launch_rope(const RopeRows& call, cudaStream_t stream);

}  // namespace tessera::cuda
