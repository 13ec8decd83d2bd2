#pragma once

#include <algorithm>

#include "ops/router/router_balance.h"
#include "ops/router/router_workspace.h"
#include "ops/simd.h"

/// What the forward and the backward kernel of the router share.
namespace tessera {

inline namespace TESSERA_CPU_LEVEL {
void router_backward(const Operator& op, const KernelArgs& args);
}

inline int64_t block_end(const RouterSizes& sizes, int64_t block) {
  return std::min((block + 1) * kRouterBlock, sizes.num_tokens);
}

/// `scope` is the input that goes with the balance scope, null where there is none.
inline BalanceSegments balance_segments(const RouterSpec& spec, const Tensor* scope,
                                        int64_t num_tokens) {
  if (spec.balance_scope != BalanceScope::kSequence || scope == nullptr) {
    return BalanceSegments(num_tokens);
  }
  return BalanceSegments(scope->span<int32_t>(), num_tokens);
}

inline std::span<const float> prior_counts(const RouterSpec& spec, const Tensor* scope) {
  if (spec.balance_scope != BalanceScope::kGlobalBatch || scope == nullptr) return {};
  return scope->span<float>();
}

/// Calls run(first row, number of rows, rows as F32) for runs of the rows of x; BF16 rows are
/// widened into `widened` [kRouterWidenedRows, H] first.
template <typename F>
void for_each_row_chunk(const Tensor& x, float* widened, F run) {
  const int64_t num_rows = x.shape[0];
  const int64_t width = x.shape[1];
  if (x.dtype == DType::kF32) return run(int64_t{0}, num_rows, x.as<float>());
  for (int64_t first = 0; first < num_rows; first += kRouterWidenedRows) {
    const int64_t count = std::min(kRouterWidenedRows, num_rows - first);
    const Bf16* rows = x.as<Bf16>() + first * width;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < count; ++row) {
      simd::convert(widened + row * width, rows + row * width, width);
    }
    run(first, count, static_cast<const float*>(widened));
  }
}

}  // namespace tessera
