#pragma once

#include "ops/ring_attention/ring_attention.h"

/// Scratch memory of ring attention's CPU kernels in bytes, as in attention_workspace.h.
namespace tessera {

int64_t ring_attention_workspace(const RingAttention& op, std::span<const ValueType> inputs);
int64_t ring_attention_backward_workspace(const RingAttentionBackward& op,
                                          std::span<const ValueType> inputs);

}  // namespace tessera
