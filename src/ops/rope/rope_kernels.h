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

/// Another tensor whose rows turn by the same angles, of heads of the same size; without heads:
/// none.
struct RopeHeads {
  int num_heads = 0;
  const void* x = nullptr;
  void* y = nullptr;
};
void launch_rope(const RopeRows& call, const RopeHeads& second, cudaStream_t stream);

}  // namespace tessera::cuda
