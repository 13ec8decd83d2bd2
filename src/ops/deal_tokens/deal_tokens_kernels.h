#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

/// Rows of `row_length` tokens that a ring of several ranks shares, fewer than 2^31 in all, of an
/// even number of bytes each.
struct DealtRows {
  int64_t num_rows;
  int64_t row_length;
  int64_t ring;
  int64_t token_bytes;
  const void* from;
  void* to;
};

/// From the order of the sequences to that of the ring.
void launch_deal_tokens(const DealtRows& rows, cudaStream_t stream);
/// And back.
void launch_collect_tokens(const DealtRows& rows, cudaStream_t stream);

}  // namespace tessera::cuda
