#pragma once

#include "ops/embedding/embedding_kernels.h"

// What assert calls, whether or not assertions are compiled in.
extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line,
                                        const char* function, size_t char_size);

namespace tessera::cuda {

/// The table's row for a token, -1 where another table has it.
__device__ __forceinline__ int64_t row_of(const TokenRows& rows, int32_t token) {
  if (token < 0 || token >= rows.vocab_size)
    __assertfail(
        "a token id is outside the vocabulary; was the text tokenized with another tokenizer?",
        "embedding", 0, "row_of", 1);
  const int64_t row = token - rows.first_row;
  return row >= 0 && row < rows.num_rows ? row : -1;
}

}  // namespace tessera::cuda
