#pragma once

#include <algorithm>

#include "ops/router/router_balance.h"
#include "ops/router/router_workspace.h"
#include "ops/simd.h"

/// What the forward and the backward kernel of the router share.
namespace tessera {

inline namespace TESSERA_CPU_LEVEL {
void router_backward(const RouterBackward& op, const Args<RouterBackward>& args);
}

inline int64_t block_end(const RouterSizes& sizes, int64_t block) {
  return std::min((block + 1) * kRouterBlock, sizes.num_tokens);
}

/// One segment where there is no cu_seqlens.
template <typename Op>
BalanceSegments balance_segments(const Args<Op>& args, int64_t num_tokens) {
  const Tensor* cu_seqlens = args.find_in(Op::kCuSeqlens);
  return cu_seqlens == nullptr ? BalanceSegments(num_tokens)
                               : BalanceSegments(cu_seqlens->span<int32_t>(), num_tokens);
}

/// The F32 elements of an operand that may be absent: then none.
inline std::span<const float> floats_of(const Tensor* tensor) {
  return tensor == nullptr ? std::span<const float>() : tensor->span<float>();
}

/// The sizes of a call with inputs of these types.
template <typename Op>
RouterSizes router_sizes(const Op& op, std::span<const ValueType> inputs) {
  const Shape& x = inputs[Op::kX].shape;
  const auto operands = op.input_set();
  const bool by_sequence = operands.has(Op::kCuSeqlens);
  return {.num_tokens = x[0],
          .hidden_size = x[1],
          .num_experts = op.spec().num_experts,
          .num_segments = by_sequence ? inputs[operands.position(Op::kCuSeqlens)].shape[0] - 1 : 1};
}

}  // namespace tessera
