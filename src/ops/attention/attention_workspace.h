#pragma once

#include "ops/attention/attention.h"

/// Scratch memory of attention's CPU kernels in bytes, for Operator::cpu_workspace_bytes: it
/// depends on the vectors of the CPU level in use.
namespace tessera {

int64_t attention_workspace(const Attention& op, std::span<const ValueType> inputs);
int64_t attention_cached_workspace(const AttentionCached& op, std::span<const ValueType> inputs);
int64_t attention_backward_workspace(const AttentionBackward& op,
                                     std::span<const ValueType> inputs);

}  // namespace tessera
