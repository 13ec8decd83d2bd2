#pragma once

#include <cstdint>

#include "ops/operator.h"

namespace tessera {

class AttentionOperator;

/// Scratch bytes of the CPU kernels for at most `num_tokens` queries of `num_seqs` sequences.
int64_t attention_forward_workspace(const AttentionOperator& op, DType dtype, int64_t num_tokens,
                                    int64_t num_seqs);
int64_t attention_backward_workspace(const AttentionOperator& op, DType dtype, int64_t num_tokens);

void attention_backward_kernel(const Operator& op, const KernelArgs& args);

}  // namespace tessera
