// A thread has one element of entries and goes over the windows of a part of the tokens; a token of
// whose window another part has the end is read, and given its gradients, there.
#include "ops/compress_windows/compress_windows_kernels.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;

// The tokens of a block.
struct TokenRange {
  int64_t begin;
  int64_t end;
};

__device__ TokenRange own_tokens(const CompressRows& call) {
  const int64_t each = divide_up(call.num_tokens, gridDim.x);
  const int64_t begin = blockIdx.x * each;
  return {begin, min(begin + each, call.num_tokens)};
}

// Calls visit(last token, its position) for each window that ends in the block's part.
template <typename Visit>
__device__ __forceinline__ void for_each_window(const CompressRows& call, const Visit& visit) {
  const TokenRange range = own_tokens(call);
  for (int64_t token = range.begin; token < range.end; ++token) {
    const int32_t position = call.positions[token];
    if (position < 0 || position > token) fail("a position of compress_windows", position);
    if (position % call.rate == call.rate - 1) visit(token, position);
  }
}

__device__ int64_t entry_row(const CompressRows& call, int64_t last, int32_t position) {
  return (last - position) / call.rate + position / call.rate;
}

// Calls visit(element of kv and gate, element of the bias) for each term of a window's sums.
template <typename Visit>
__device__ __forceinline__ void for_each_term(const CompressRows& call, int64_t last,
                                              int32_t position, int64_t c, const Visit& visit) {
  const int64_t first = last - call.rate + 1;
  if (call.overlaps && position >= call.rate) {
    for (int j = 0; j < call.rate; ++j)
      visit((first - call.rate + j) * call.width + c, j * call.width + c);
  }
  const int64_t own = call.width - call.size + c;
  for (int j = 0; j < call.rate; ++j) visit((first + j) * call.width + own, j * call.width + own);
}

struct WindowSums {
  float max;
  float weights;
  float values;
};

template <typename T>
__device__ __forceinline__ float logit_at(const CompressRows& call, int64_t at, int64_t bias_at) {
  return load<1>(static_cast<const T*>(call.gate) + at)[0] + call.bias[bias_at];
}

template <typename T>
__device__ __forceinline__ WindowSums sum_window(const CompressRows& call, int64_t last,
                                                 int32_t position, int64_t c) {
  WindowSums sums = {-INFINITY, 0, 0};
  for_each_term(call, last, position, c, [&](int64_t at, int64_t bias_at) {
    sums.max = fmaxf(sums.max, logit_at<T>(call, at, bias_at));
  });
  for_each_term(call, last, position, c, [&](int64_t at, int64_t bias_at) {
    const float weight = expf(logit_at<T>(call, at, bias_at) - sums.max);
    sums.weights += weight;
    sums.values = fmaf(weight, load<1>(static_cast<const T*>(call.kv) + at)[0], sums.values);
  });
  return sums;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    compress(const __grid_constant__ CompressRows call, T* entries, int32_t* entry_positions) {
  wait_for_earlier();
  const int64_t c = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (c >= call.size) return;
  for_each_window(call, [&](int64_t last, int32_t position) {
    const WindowSums sums = sum_window<T>(call, last, position, c);
    const int64_t row = entry_row(call, last, position);
    store(entries + row * call.size + c, Floats<1>{{sums.values / sums.weights}});
    if (c == 0) entry_positions[row] = position + 1 - call.rate;
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    differentiate_windows(const __grid_constant__ CompressRows call,
                          const __grid_constant__ CompressGrads grads) {
  wait_for_earlier();
  const int64_t c = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (c >= call.size) return;
  const bool has_bias = grads.bias.sums != nullptr;
  float* const sums_of_bias = grads.partials + blockIdx.x * call.rate * call.width;
  for (int64_t at = c; has_bias && at < call.rate * call.width; at += call.size)
    sums_of_bias[at] = 0;
  for_each_window(call, [&](int64_t last, int32_t position) {
    const WindowSums sums = sum_window<T>(call, last, position, c);
    const int64_t row = entry_row(call, last, position);
    const float own =
        load<1>(static_cast<const T*>(grads.entries) + row * call.size + c)[0] / sums.weights;
    const float mean = sums.values / sums.weights;
    for_each_term(call, last, position, c, [&](int64_t at, int64_t bias_at) {
      const float of_kv = expf(logit_at<T>(call, at, bias_at) - sums.max) * own;
      const float of_gate = of_kv * (load<1>(static_cast<const T*>(call.kv) + at)[0] - mean);
      store(static_cast<T*>(grads.kv) + at, Floats<1>{{of_kv}});
      store(static_cast<T*>(grads.gate) + at, Floats<1>{{of_gate}});
      if (has_bias) sums_of_bias[bias_at] += of_gate;
    });
  });
}

dim3 blocks_of(const CompressRows& call, int64_t parts) {
  return {static_cast<unsigned>(parts), static_cast<unsigned>(divide_up(call.size, kThreads))};
}

}  // namespace

void launch_compress_windows(const CompressRows& call, void* entries, int32_t* entry_positions,
                             cudaStream_t stream) {
  constexpr int64_t kTokensOfBlock = 32;
  const int64_t bytes = call.num_rows * call.size * dtype_size(call.dtype);
  check(cudaMemsetAsync(entries, 0, bytes, stream));
  check(cudaMemsetAsync(entry_positions, 0, call.num_rows * sizeof(int32_t), stream));
  if (call.num_tokens == 0) return;
  const int64_t parts = divide_up(call.num_tokens, kTokensOfBlock);
  with_type(call.dtype, [&]<typename T>() {
    launch_early(compress<T>, {blocks_of(call, parts), kThreads}, stream, call,
                 static_cast<T*>(entries), entry_positions);
  });
}

void launch_compress_windows_backward(const CompressRows& call, const CompressGrads& grads,
                                      cudaStream_t stream) {
  const int64_t bytes = call.num_tokens * call.width * dtype_size(call.dtype);
  if (bytes == 0) return;
  check(cudaMemsetAsync(grads.kv, 0, bytes, stream));
  check(cudaMemsetAsync(grads.gate, 0, bytes, stream));
  const int64_t bias_elements = call.rate * call.width;
  const int64_t parts = compress_parts(call.num_tokens, bias_elements);
  with_type(call.dtype, [&]<typename T>() {
    launch_early(differentiate_windows<T>, {blocks_of(call, parts), kThreads}, stream, call, grads);
  });
  if (grads.bias.sums != nullptr)
    launch_add_partials(grads.bias, grads.partials, static_cast<int>(parts), bias_elements, stream);
}

}  // namespace tessera::cuda
