#pragma once

#include "ops/grouped_matmul/grouped_wgrad.cuh"
#include "ops/quantize_tokens/token_blocks.h"
#include "ops/scaled_grouped_wgrad/scaled_wgrad_kernels.h"

/// What the gradients of scaled FP8 values share, whatever their scales are of.
namespace tessera::cuda::wgrad {

/// E4M3 codes whose rows are features and lie along tokens, blocks of which begin with an expert's
/// and are filled up with zeros.
struct TokenOperands {
  static constexpr TileMajor kMajor = TileMajor::kReduction;
  static constexpr int kTokens = static_cast<int>(kTokenBlock);
  static constexpr int kStep = 32;
  static constexpr bool kFilledUp = true;
  template <int kColumns>
  using Product = WarpgroupProductE4m3<kColumns>;

  static __device__ __forceinline__ Box box(int feature, int token) { return {token, feature}; }
  static __device__ __forceinline__ int first_token(int64_t offset, int expert) {
    return static_cast<int>(first_token_block(offset, expert)) * kTokens;
  }
};

/// A stage has twice the tokens of a BF16 one in as many bytes.
template <int kTileColumns, bool kPingPong, bool kAdds>
struct ScaledSchedule : Schedule<kTileColumns, kPingPong, kAdds, false> {
  using Params = ScaledWgradParams;
  using Operands = TokenOperands;
};

}  // namespace tessera::cuda::wgrad
