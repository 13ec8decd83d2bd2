#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/choose_token/token_rule.h"

namespace tessera::cuda {

/// Logits [rows, vocab_size], a rule and results for each row.
struct RowsToChoose {
  DType dtype;
  int64_t rows;
  int vocab_size;
  const void* logits;
  const TokenRule* rules;
  int32_t* tokens;
  double* log_probabilities;
};
void launch_choose_token(const RowsToChoose& call, cudaStream_t stream);

}  // namespace tessera::cuda
