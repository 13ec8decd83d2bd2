#pragma once

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// Tokens and the rows of the vocabulary that a table holds. A token outside the vocabulary stops
/// the program on the device (as assert does), which the host's next synchronisation reports.
struct TokenRows {
  RowCount rows;  ///< tokens
  const int32_t* tokens;
  int64_t vocab_size;
  int64_t first_row;
  int64_t num_rows;
};

/// out [tokens, hidden] = the tokens' rows of table [num_rows, hidden], zeros for other tables'.
struct EmbeddingCall {
  TokenRows tokens;
  DType dtype;
  int64_t hidden;
  const void* table;
  void* out;
};
void launch_embedding(const EmbeddingCall& call, cudaStream_t stream);

/// accumulator [num_rows, hidden] += the tokens' rows of grad [tokens, hidden].
struct EmbeddingBackwardCall {
  TokenRows tokens;
  int64_t padding_token;
  DType dtype;
  int64_t hidden;
  const void* grad;
  float* accumulator;
  void* workspace;
  int num_sms;
};
int64_t embedding_backward_workspace(int64_t num_tokens, int64_t hidden);
void launch_embedding_backward(const EmbeddingBackwardCall& call, cudaStream_t stream);

}  // namespace tessera::cuda
