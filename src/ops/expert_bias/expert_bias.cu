// A warp takes a row, a vector of 16 bytes a lane where sizes are multiples of that. For the
// gradient of the biases a block takes some columns of an expert, and its warps that expert's rows.
#include <algorithm>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/expert_bias/expert_bias_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;

/// Where an expert's row begins.
__device__ __forceinline__ int64_t start_of_row(const BiasRows& p, int64_t row, int size) {
  if (p.row_offsets == nullptr) return row * p.width;
  const int64_t block = p.block_size;
  return p.row_offsets[row / block] * block * block + row % block * size;
}

/// The expert that a row belongs to.
__device__ __forceinline__ int expert_of(const BiasExperts& experts, int64_t row) {
  int low = 0;
  int high = experts.count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (experts.offsets[middle + 1] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// The warp's row; -1: none.
__device__ __forceinline__ int64_t own_row(const BiasRows& p, const BiasExperts& experts) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  const int64_t in_use = experts.offsets[experts.count];
  return row < p.max_rows && row < in_use ? row : -1;
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    add_biases(const __grid_constant__ BiasRows p, const __grid_constant__ BiasExperts experts,
               const T* x, const float* bias, T* y) {
  wait_for_earlier();
  const int64_t row = own_row(p, experts);
  if (row < 0) return;
  const int expert = expert_of(experts, row);
  const int size = experts.size_of(expert);
  const int64_t at = start_of_row(p, row, size);
  const int end = p.row_offsets == nullptr ? static_cast<int>(p.width) : size;
  const float* own = bias + experts.start_of(expert);
  const float prob = p.probs == nullptr ? 1.0F : p.probs[row];
  for (int i = static_cast<int>(threadIdx.x) % kLanes * kWidth; i < end; i += kLanes * kWidth) {
    Floats<kWidth> values = load<kWidth>(x + at + i);
    const int column = i - p.first_column;
    if (column >= 0 && column < size) {
      const Floats<kWidth> biases = load<kWidth>(own + column);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = fmaf(prob, biases[j], values[j]);
    }
    store(y + at + i, values);
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    find_prob_gradients(const __grid_constant__ BiasRows p,
                        const __grid_constant__ BiasExperts experts, const T* grad,
                        const float* bias, float* grad_probs) {
  wait_for_earlier();
  const int64_t row = own_row(p, experts);
  if (row < 0) return;
  const int expert = expert_of(experts, row);
  const int size = experts.size_of(expert);
  const T* from = grad + start_of_row(p, row, size) + p.first_column;
  const float* own = bias + experts.start_of(expert);
  float dot = 0;
  for (int i = static_cast<int>(threadIdx.x) % kLanes * kWidth; i < size; i += kLanes * kWidth) {
    const Floats<kWidth> grads = load<kWidth>(from + i);
    const Floats<kWidth> biases = load<kWidth>(own + i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) dot = fmaf(grads[j], biases[j], dot);
  }
  dot = sum_lanes(dot);
  if (threadIdx.x % kLanes == 0) grad_probs[row] = dot;
}

constexpr int kRowsAtOnce = 4;  // that a warp loads

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    add_bias_gradients(const __grid_constant__ BiasRows p,
                       const __grid_constant__ BiasExperts experts, const T* grad,
                       float* grad_bias) {
  __shared__ float sums[kWarps][kLanes * kWidth];
  wait_for_earlier();
  const int expert = static_cast<int>(blockIdx.y);
  const int size = experts.size_of(expert);
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int first = static_cast<int>(blockIdx.x) * kLanes * kWidth;
  const int column = first + lane * kWidth;
  if (first >= size) return;
  const int64_t last_row = experts.offsets[expert + 1];
  const int64_t end = last_row < p.max_rows ? last_row : p.max_rows;
  Floats<kWidth> total = {};
  int64_t row = experts.offsets[expert] + warp;
  for (; row < end && column < size; row += kRowsAtOnce * kWarps) {
    Pack<T, kWidth> loaded[kRowsAtOnce];
    float probs[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const int64_t at = row + r * kWarps;
      if (at >= end) continue;
      loaded[r] = load_pack<kWidth>(grad + start_of_row(p, at, size) + p.first_column + column);
      probs[r] = p.probs == nullptr ? 1.0F : p.probs[at];
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (row + r * kWarps >= end) continue;
      const Floats<kWidth> values = to_floats(loaded[r]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) total[j] = fmaf(probs[r], values[j], total[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sums[warp][lane * kWidth + j] = total[j];
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kLanes * kWidth && first + i < size;
       i += kThreads) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w][i];
    grad_bias[experts.start_of(expert) + first + i] += sum;
  }
}

/// Calls run.operator()<T, kWidth>() with whole vectors where all rows and biases have them.
template <typename Run, typename... Pointers>
void with_bias_vectors(const BiasRows& rows, const BiasExperts& experts, Run run,
                       const Pointers*... pointers) {
  const bool equal = are_whole_vectors(rows.dtype, rows.width, rows.first_column, experts.size);
  const bool vectors =
      equal && are_aligned(pointers...) &&
      (!experts.differ ||
       std::all_of(experts.starts, experts.starts + experts.count + 1,
                   [&](int start) { return are_whole_vectors(rows.dtype, start); }));
  with_vectors(rows.dtype, vectors, run);
}

unsigned row_blocks(const BiasRows& rows) {
  return static_cast<unsigned>(divide_up(rows.max_rows, kWarps));
}

}  // namespace

void launch_expert_bias(const BiasRows& rows, const BiasExperts& experts, const void* x,
                        const float* bias, void* y, cudaStream_t stream) {
  if (rows.max_rows == 0) return;
  with_bias_vectors(
      rows, experts,
      [&]<typename T, int kWidth>() {
        launch_early(add_biases<T, kWidth>, {row_blocks(rows), kThreads}, stream, rows, experts,
                     static_cast<const T*>(x), bias, static_cast<T*>(y));
      },
      x, bias, y);
}

void launch_expert_bias_backward(const BiasRows& rows, const BiasExperts& experts,
                                 const ExpertBiasGrads& grads, cudaStream_t stream) {
  if (rows.max_rows == 0) return;
  with_bias_vectors(
      rows, experts,
      [&]<typename T, int kWidth>() {
        const T* grad = static_cast<const T*>(grads.grad);
        if (grads.grad_probs != nullptr)
          launch_early(find_prob_gradients<T, kWidth>, {row_blocks(rows), kThreads}, stream, rows,
                       experts, grad, grads.bias, grads.grad_probs);
        if (grads.grad_bias == nullptr) return;
        const dim3 blocks(static_cast<unsigned>(divide_up(experts.size, kLanes * kWidth)),
                          static_cast<unsigned>(experts.count));
        launch_early(add_bias_gradients<T, kWidth>, {blocks, kThreads}, stream, rows, experts, grad,
                     grads.grad_bias);
      },
      grads.grad, grads.bias);
}

}  // namespace tessera::cuda
