#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

/// See HashExperts.
struct HashLookup {
  int64_t num_tokens;
  int64_t vocab_size;
  int64_t top_k;
  int64_t num_experts;
  const int32_t* tokens;
  const float* table;
  int32_t* expert_idx;
};
void launch_hash_experts(const HashLookup& lookup, cudaStream_t stream);

}  // namespace tessera::cuda
