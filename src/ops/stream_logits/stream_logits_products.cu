// Few logits of long rows, and both gradients of them in one pass over the rows. Products are F32:
// there are too few logits for tensor cores to pay for the weight's three BF16 parts.
#include <algorithm>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/stream_logits/stream_logits_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 8;  // of a warp
constexpr int kLogits = 6;  // of a warp
constexpr int kParts = 4;   // warps that share the logits of the same tokens
constexpr int kGroups = kThreads / 32 / kParts;
constexpr int kBlockTokens = kGroups * kTokens;
static_assert(kParts * kLogits == kFusedStreamLogits);

/// The products of a warp's tokens and logits, elements being shared by its lanes.
template <typename T, int kWidth>
struct Products {
  float sums[kTokens][kLogits] = {};
  float squares[kTokens] = {};

  __device__ __forceinline__ void add(const StreamRows& rows, const float* weight, int64_t token,
                                      int64_t logit, bool with_squares) {
    const RouterShape& s = rows.shape;
    const auto* x = static_cast<const T*>(rows.x_TW);
    const T* of_token[kTokens];
    const float* of_logit[kLogits];
    // What is not there is read from the last that is, and left out at the end.
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
      of_token[t] = x + min(token + t, s.num_tokens - 1) * s.hidden_size;
#pragma unroll
    for (int m = 0; m < kLogits; ++m)
      of_logit[m] = weight + min(logit + m, s.num_experts - 1) * s.hidden_size;
#pragma unroll 1
    for (int64_t column = static_cast<int64_t>(threadIdx.x) % 32 * kWidth; column < s.hidden_size;
         column += 32 * kWidth) {
      Floats<kWidth> values[kLogits];
#pragma unroll
      for (int m = 0; m < kLogits; ++m) values[m] = load<kWidth>(of_logit[m] + column);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const Floats<kWidth> own = load<kWidth>(of_token[t] + column);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
#pragma unroll
          for (int m = 0; m < kLogits; ++m) sums[t][m] = fmaf(own[i], values[m][i], sums[t][m]);
          if (with_squares) squares[t] = fmaf(own[i], own[i], squares[t]);
        }
      }
    }
  }
};

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, 2)
    make_logits(StreamRows rows, const float* weight, float eps, float* logits, float* rstd) {
  wait_for_earlier();
  __shared__ float factors[kBlockTokens];
  const RouterShape& s = rows.shape;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int part = warp % kParts;
  const int group = warp / kParts;
  const int64_t token = int64_t{blockIdx.x} * kBlockTokens + group * kTokens;
  const int64_t logit = int64_t{blockIdx.y} * kFusedStreamLogits + part * kLogits;
  Products<T, kWidth> products;
  products.add(rows, weight, token, logit, part == 0);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (part != 0) break;
    const float squares = sum_lanes(products.squares[t]);
    const float factor = rsqrtf(squares / static_cast<float>(s.hidden_size) + eps);
    if (lane != 0) continue;
    factors[group * kTokens + t] = factor;
    if (blockIdx.y == 0 && token + t < s.num_tokens) rstd[token + t] = factor;
  }
  __syncthreads();
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
#pragma unroll
    for (int m = 0; m < kLogits; ++m) {
      const float sum = sum_lanes(products.sums[t][m]);
      if (lane == 0 && token + t < s.num_tokens && logit + m < s.num_experts)
        logits[(token + t) * s.num_experts + logit + m] = sum * factors[group * kTokens + t];
    }
  }
}

constexpr int kBatch = 16;  // tokens whose factors are in shared memory at a time

/// What threads need of some tokens.
struct Factors {
  float scaled[kBatch][kFusedStreamLogits];
  float pulls[kBatch];

  __device__ __forceinline__ void load_from(const StreamInputGrads& p, int64_t first, int count) {
    const auto num_logits = static_cast<int>(p.rows.shape.num_experts);
    for (int i = static_cast<int>(threadIdx.x); i < kBatch * kFusedStreamLogits; i += kThreads) {
      const int t = i / kFusedStreamLogits;
      const int m = i % kFusedStreamLogits;
      scaled[t][m] = t < count && m < num_logits ? p.scaled_TM[(first + t) * num_logits + m] : 0;
    }
    if (threadIdx.x < kBatch)
      pulls[threadIdx.x] =
          static_cast<int>(threadIdx.x) < count ? p.pulls_T[first + threadIdx.x] : 0;
  }
};

/// A thread's columns of the weight and of its gradient.
template <typename T, int kWidth>
struct WeightColumns {
  Floats<kWidth> weight[kFusedStreamLogits];
  Floats<kWidth> grad[kFusedStreamLogits];

  __device__ __forceinline__ void load_from(const StreamInputGrads& p, int64_t column) {
    const RouterShape& s = p.rows.shape;
#pragma unroll
    for (int m = 0; m < kFusedStreamLogits; ++m) {
      grad[m] = {};
      weight[m] = {};
      if (m < s.num_experts) weight[m] = load<kWidth>(p.weight_MW + m * s.hidden_size + column);
    }
  }

  /// Adds a token's share, and gives its own gradient.
  __device__ __forceinline__ Floats<kWidth> add(const Floats<kWidth>& x, const float* scaled,
                                                float pull) {
    Floats<kWidth> result;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) result[i] = -pull * x[i];
#pragma unroll
    for (int m = 0; m < kFusedStreamLogits; ++m) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        result[i] = fmaf(scaled[m], weight[m][i], result[i]);
        grad[m][i] = fmaf(scaled[m], x[i], grad[m][i]);
      }
    }
    return result;
  }
};

/// A thread has kWidth columns (x) of a split of the tokens (y).
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, 2)
    make_grads(const __grid_constant__ StreamInputGrads p, float* partials) {
  wait_for_earlier();
  __shared__ Factors factors;
  const RouterShape& s = p.rows.shape;
  const int64_t column = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  const bool has_column = column < s.hidden_size;
  const auto* x = static_cast<const T*>(p.rows.x_TW);
  const auto* addend = static_cast<const T*>(p.addend_TW);
  auto* grad_x = static_cast<T*>(p.grad_TW);
  const int64_t of_split = divide_up(s.num_tokens, gridDim.y);
  const int64_t end = min(s.num_tokens, (blockIdx.y + 1) * of_split);
  WeightColumns<T, kWidth> columns;
  if (has_column) columns.load_from(p, column);
  for (int64_t first = blockIdx.y * of_split; first < end; first += kBatch) {
    const int count = static_cast<int>(min(int64_t{kBatch}, end - first));
    __syncthreads();
    factors.load_from(p, first, count);
    __syncthreads();
    if (!has_column) continue;
#pragma unroll 2
    for (int t = 0; t < count; ++t) {
      const int64_t at = (first + t) * s.hidden_size + column;
      const Floats<kWidth> own = load<kWidth>(x + at);
      Floats<kWidth> more{};
      if (addend != nullptr) more = load<kWidth>(addend + at);
      Floats<kWidth> grad = columns.add(own, factors.scaled[t], factors.pulls[t]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) grad[i] += more[i];
      store(grad_x + at, grad);
    }
  }
  if (!has_column) return;
#pragma unroll
  for (int m = 0; m < kFusedStreamLogits; ++m) {
    if (m < s.num_experts)
      store(partials + (int64_t{blockIdx.y} * s.num_experts + m) * s.hidden_size + column,
            columns.grad[m]);
  }
}

/// Calls run.operator()<T, kWidth>() with so many elements at a time where rows have whole ones.
template <int kMost, typename Run>
void with_width(const RouterShape& s, bool aligned, const Run& run) {
  with_type(s.dtype, [&]<typename T>() {
    aligned&& s.hidden_size % kMost == 0 ? run.template operator()<T, kMost>()
                                         : run.template operator()<T, 1>();
  });
}

}  // namespace

int stream_grad_splits(const RouterShape& shape) {
  constexpr int64_t kMostSplits = 16;
  constexpr int64_t kLeastTokens = 128;
  return static_cast<int>(
      std::clamp<int64_t>(divide_up(shape.num_tokens, kLeastTokens), 1, kMostSplits));
}

void launch_stream_logits(const StreamRows& rows, const float* weight_MW, float eps,
                          float* logits_TM, float* rstd_T, cudaStream_t stream) {
  const RouterShape& s = rows.shape;
  if (s.num_tokens == 0) return;
  const dim3 grid(static_cast<unsigned>(divide_up(s.num_tokens, kBlockTokens)),
                  static_cast<unsigned>(divide_up(s.num_experts, kFusedStreamLogits)));
  with_width<4>(s, are_aligned(rows.x_TW, weight_MW), [&]<typename T, int kWidth>() {
    launch_early(make_logits<T, kWidth>, {grid, kThreads}, stream, rows, weight_MW, eps, logits_TM,
                 rstd_T);
  });
}

void launch_fused_stream_grads(const StreamInputGrads& grads, float* partials,
                               cudaStream_t stream) {
  const RouterShape& s = grads.rows.shape;
  const bool aligned =
      are_aligned(grads.rows.x_TW, grads.weight_MW, grads.addend_TW, grads.grad_TW, partials);
  with_width<2>(s, aligned, [&]<typename T, int kWidth>() {
    const dim3 grid(static_cast<unsigned>(divide_up(s.hidden_size, kThreads * kWidth)),
                    static_cast<unsigned>(stream_grad_splits(s)));
    launch_early(make_grads<T, kWidth>, {grid, kThreads}, stream, grads, partials);
  });
}

}  // namespace tessera::cuda
