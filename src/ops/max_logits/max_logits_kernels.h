#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/max_logits/token_rows.h"

namespace tessera::cuda {

/// MaxLogits on the GPU's memory; `partial` is scratch memory, F32 [heads, num_logit_parts].
struct MaxLogitsCall {
  DType dtype;
  const void* q;
  const void* k;
  const float* lse;
  const int32_t* cu_seqlens;
  int num_sequences;
  float* partial;
  float* result;
  int64_t num_queries;
  int heads;
  int kv_heads;
  int head_size;
  int64_t window;
  float scale;
  float limit;
  TokenRows rows;
};
/// Blocks of queries.
int64_t num_logit_parts(int64_t num_queries);
void launch_max_logits(const MaxLogitsCall& call, cudaStream_t stream);

}  // namespace tessera::cuda
