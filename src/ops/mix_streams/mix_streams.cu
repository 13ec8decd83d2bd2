// A block has a token, and a thread elements of all its streams.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/mix_streams/mix_rule.h"
#include "ops/mix_streams/mix_streams_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

/// Elements of a stream that a thread takes at once: fewer of many streams, for all of which it
/// needs registers.
template <typename T, int kStreams>
constexpr int kMixWidth = kStreams <= 4 ? kVectorWidth<T> : kVectorWidth<T> / 2;

/// The token's weights, in the block's shared memory.
template <int kStreams>
struct TokenWeights {
  float post[kStreams];
  float comb[kStreams][kStreams];

  __device__ __forceinline__ void load(const MixCall& p, int64_t token) {
    const int i = threadIdx.x;
    if (i < kStreams) post[i] = p.post[token * kStreams + i];
    if (i < kStreams * kStreams)
      comb[i / kStreams][i % kStreams] = p.comb[token * kStreams * kStreams + i];
    __syncthreads();
  }
};

template <typename T, int kWidth, int kStreams>
__global__ void __launch_bounds__(kThreads) mix(const __grid_constant__ MixCall p, T* y) {
  wait_for_earlier();
  __shared__ TokenWeights<kStreams> weights;
  const int64_t token = blockIdx.x;
  weights.load(p, token);
  const T* x = static_cast<const T*>(p.x) + token * kStreams * p.hidden;
  const T* given = static_cast<const T*>(p.given) + token * p.hidden;
  T* to = y + token * kStreams * p.hidden;
  for (int64_t i = threadIdx.x * kWidth; i < p.hidden; i += kThreads * kWidth) {
    const Floats<kWidth> own = load<kWidth>(given + i);
    Floats<kWidth> sums[kStreams];
#pragma unroll
    for (int k = 0; k < kStreams; ++k) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[k][e] = weights.post[k] * own[e];
    }
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const Floats<kWidth> values = load<kWidth>(x + j * p.hidden + i);
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sums[k][e] += weights.comb[j][k] * values[e];
      }
    }
#pragma unroll
    for (int k = 0; k < kStreams; ++k) store(to + k * p.hidden + i, sums[k]);
  }
}

/// A thread's sums over its elements, for the gradients of post and comb.
template <int kStreams>
struct MixDots {
  float post[kStreams] = {};
  float comb[kStreams][kStreams] = {};
};

/// Sums over the block, in one order, which its first threads write.
template <int kStreams>
__device__ __forceinline__ void write_dots(const MixDots<kStreams>& dots, float* post,
                                           float* comb) {
  constexpr int kSums = kStreams + kStreams * kStreams;
  __shared__ float of_warps[kWarps][kSums];
  const int warp = threadIdx.x / 32;
  const bool is_first = threadIdx.x % 32 == 0;
#pragma unroll
  for (int k = 0; k < kStreams; ++k) {
    const float sum = sum_lanes(dots.post[k]);
    if (is_first) of_warps[warp][k] = sum;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const float pair = sum_lanes(dots.comb[j][k]);
      if (is_first) of_warps[warp][kStreams + j * kStreams + k] = pair;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kSums; i += kThreads) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += of_warps[w][i];
    (i < kStreams ? post[i] : comb[i - kStreams]) = sum;
  }
}

template <typename T, int kWidth, int kStreams>
__global__ void __launch_bounds__(kThreads)
    mix_backward(const __grid_constant__ MixCall p, const __grid_constant__ MixGrads g) {
  wait_for_earlier();
  __shared__ TokenWeights<kStreams> weights;
  const int64_t token = blockIdx.x;
  weights.load(p, token);
  const int64_t first = token * kStreams * p.hidden;
  const T* x = static_cast<const T*>(p.x) + first;
  const T* given = static_cast<const T*>(p.given) + token * p.hidden;
  const T* grad = static_cast<const T*>(g.grad) + first;
  T* grad_x = static_cast<T*>(g.x) + first;
  T* grad_given = static_cast<T*>(g.given) + token * p.hidden;
  MixDots<kStreams> dots;
  for (int64_t i = threadIdx.x * kWidth; i < p.hidden; i += kThreads * kWidth) {
    Floats<kWidth> grads[kStreams];
    const Floats<kWidth> own = load<kWidth>(given + i);
    Floats<kWidth> of_given = {};
#pragma unroll
    for (int k = 0; k < kStreams; ++k) {
      grads[k] = load<kWidth>(grad + k * p.hidden + i);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        of_given[e] += weights.post[k] * grads[k][e];
        dots.post[k] += own[e] * grads[k][e];
      }
    }
    store(grad_given + i, of_given);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const Floats<kWidth> values = load<kWidth>(x + j * p.hidden + i);
      Floats<kWidth> of_stream = {};
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          of_stream[e] += weights.comb[j][k] * grads[k][e];
          dots.comb[j][k] += values[e] * grads[k][e];
        }
      }
      store(grad_x + j * p.hidden + i, of_stream);
    }
  }
  write_dots(dots, g.post + token * kStreams, g.comb + token * kStreams * kStreams);
}

/// Calls run.operator()<T, kWidth, kStreams>().
template <typename Run>
void with_mix(const MixCall& call, bool vectors, Run run) {
  with_type(call.dtype, [&]<typename T>() {
    with_mixed_streams(call.streams, [&]<int kStreams>() {
      vectors ? run.template operator()<T, kMixWidth<T, kStreams>, kStreams>()
              : run.template operator()<T, 1, kStreams>();
    });
  });
}

}  // namespace

void launch_mix_streams(const MixCall& call, void* y, cudaStream_t stream) {
  if (call.tokens == 0) return;
  const bool vectors =
      are_whole_vectors(call.dtype, call.hidden) && are_aligned(call.x, call.given, y);
  with_mix(call, vectors, [&]<typename T, int kWidth, int kStreams>() {
    launch_early(mix<T, kWidth, kStreams>, {static_cast<unsigned>(call.tokens), kThreads}, stream,
                 call, static_cast<T*>(y));
  });
}

void launch_mix_streams_backward(const MixCall& call, const MixGrads& grads, cudaStream_t stream) {
  if (call.tokens == 0) return;
  const bool vectors = are_whole_vectors(call.dtype, call.hidden) &&
                       are_aligned(call.x, call.given, grads.grad, grads.x, grads.given);
  with_mix(call, vectors, [&]<typename T, int kWidth, int kStreams>() {
    launch_early(mix_backward<T, kWidth, kStreams>, {static_cast<unsigned>(call.tokens), kThreads},
                 stream, call, grads);
  });
}

}  // namespace tessera::cuda
