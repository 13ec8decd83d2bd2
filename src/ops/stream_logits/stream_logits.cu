#include <algorithm>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/stream_logits/stream_logits_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
/// Tokens for which a thread has what it reads of the weight.
constexpr int kTokensAtOnce = 8;

/// A warp to a token.
__global__ void __launch_bounds__(kThreads)
    make_factors(const __grid_constant__ StreamLogitFactors p) {
  wait_for_earlier();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (token >= p.shape.num_tokens) return;
  const int64_t count = p.shape.num_experts;
  const float rstd = p.rstd_T[token];
  float dot = 0;
  for (int64_t m = threadIdx.x % 32; m < count; m += 32) {
    const int64_t at = token * count + m;
    dot += p.grad_TM[at] * p.logits_TM[at];
    p.scaled_TM[at] = rstd * p.grad_TM[at];
  }
  dot = sum_lanes(dot);
  if (threadIdx.x % 32 == 0)
    p.pulls_T[token] = rstd * rstd / static_cast<float>(p.shape.hidden_size) * dot;
}

/// A thread to a column (x) of a few tokens (y).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    make_input_grads(const __grid_constant__ StreamInputGrads p) {
  wait_for_earlier();
  const RouterShape& s = p.rows.shape;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= s.hidden_size) return;
  const auto* x = static_cast<const T*>(p.rows.x_TW);
  const auto* addend = static_cast<const T*>(p.addend_TW);
  auto* grad = static_cast<T*>(p.grad_TW);
  for (int64_t first = blockIdx.y * int64_t{kTokensAtOnce}; first < s.num_tokens;
       first += gridDim.y * int64_t{kTokensAtOnce}) {
    const auto count = static_cast<int>(min(int64_t{kTokensAtOnce}, s.num_tokens - first));
    float sums[kTokensAtOnce] = {};
#pragma unroll
    for (int t = 0; t < kTokensAtOnce; ++t) {
      if (t < count)
        sums[t] =
            -p.pulls_T[first + t] * static_cast<float>(x[(first + t) * s.hidden_size + column]);
    }
    for (int64_t m = 0; m < s.num_experts; ++m) {
      const float weight = p.weight_MW[m * s.hidden_size + column];
#pragma unroll
      for (int t = 0; t < kTokensAtOnce; ++t) {
        if (t < count) sums[t] += p.scaled_TM[(first + t) * s.num_experts + m] * weight;
      }
    }
#pragma unroll
    for (int t = 0; t < kTokensAtOnce; ++t) {
      if (t >= count) break;
      const int64_t at = (first + t) * s.hidden_size + column;
      if (addend != nullptr) sums[t] += static_cast<float>(addend[at]);
      store(grad + at, Floats<1>{{sums[t]}});
    }
  }
}

}  // namespace

void launch_stream_logit_factors(const StreamLogitFactors& factors, cudaStream_t stream) {
  const int64_t blocks = divide_up(factors.shape.num_tokens, kWarps);
  if (blocks == 0) return;
  launch_early(make_factors, {static_cast<unsigned>(blocks), kThreads}, stream, factors);
}

void launch_stream_input_grads(const StreamInputGrads& grads, cudaStream_t stream) {
  constexpr int64_t kMostRows = 65535;  // of a grid's second dim
  const RouterShape& s = grads.rows.shape;
  if (s.num_tokens == 0) return;
  const dim3 grid(
      static_cast<unsigned>(divide_up(s.hidden_size, kThreads)),
      static_cast<unsigned>(std::min(divide_up(s.num_tokens, kTokensAtOnce), kMostRows)));
  with_type(s.dtype, [&]<typename T>() {
    launch_early(make_input_grads<T>, {grid, kThreads}, stream, grads);
  });
}

}  // namespace tessera::cuda
