#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/attention/attention_cuda_kernels.h"

namespace tessera::cuda {

/// Rows of all ranks' tokens, rank by rank, in the order of the tokens: to [tokens, row] =
/// from [ranks, tokens of each, row].
void launch_order_tokens(const attention::RingQueries& queries, const void* from, void* to,
                         int64_t row_bytes, cudaStream_t stream);

/// to = from rounded to BF16.
void launch_round(const float* from, void* to, int64_t count, cudaStream_t stream);

}  // namespace tessera::cuda
