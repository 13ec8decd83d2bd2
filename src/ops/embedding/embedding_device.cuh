#pragma once

#include "ops/cuda/fail.cuh"
#include "ops/embedding/embedding_kernels.h"

namespace tessera::cuda {

/// The table's row for a token, -1 where another table has it.
__device__ __forceinline__ int64_t row_of(const TokenRows& rows, int32_t token) {
  if (token < 0 || token >= rows.vocab_size)
    fail(
        "embedding: a token id is outside the vocabulary; was the text tokenized with another "
        "tokenizer?",
        token);
  const int64_t row = token - rows.first_row;
  return row >= 0 && row < rows.num_rows ? row : -1;
}

}  // namespace tessera::cuda
