#pragma once

#include <cuda_runtime.h>

#include "core/zigzag.h"

namespace tessera::cuda {

/// Rows of fewer than 2^31 tokens, of an even number of bytes each.
struct DealtRows {
  Zigzag deal;
  int64_t token_bytes;
  const void* from;
  void* to;
};

/// From the order of the sequences to that of the ring.
void launch_deal_tokens(const DealtRows& rows, cudaStream_t stream);
/// And back.
void launch_collect_tokens(const DealtRows& rows, cudaStream_t stream);

}  // namespace tessera::cuda
