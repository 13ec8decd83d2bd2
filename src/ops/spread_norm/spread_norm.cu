// A warp takes a row, a vector of 16 bytes a lane where rows are multiples of that.
#include <cuda_bf16.h>

#include "ops/spread_norm/spread_norm_kernels.h"

namespace tessera::cuda {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;

template <typename T, int kValues>
struct alignas(sizeof(T) * kValues) Pack {
  T at[kValues];
};

__device__ __forceinline__ void store_value(float& to, float value) {
  to = value;
}
__device__ __forceinline__ void store_value(__nv_bfloat16& to, float value) {
  to = __float2bfloat16_rn(value);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

__device__ __forceinline__ float rstd_of(const SpreadNormRows& p, int64_t row) {
  return 1.0F / sqrtf(p.square_sums[row] / p.num_elements + p.eps);
}

__device__ __forceinline__ int64_t own_row() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
}

/// Calls take(index, values of from) for each of the lane's vectors of a row.
template <int kValues, typename T, typename Take>
__device__ __forceinline__ void for_each_vector(const T* from, int64_t width, Take take) {
  for (int64_t i = threadIdx.x % kLanes * kValues; i < width; i += kLanes * kValues)
    take(i, *reinterpret_cast<const Pack<T, kValues>*>(from + i));
}

template <typename T, int kValues>
__global__ void __launch_bounds__(kThreads)
    add_squares(const SpreadRows p, const T* x, float* sums) {
  const int64_t row = own_row();
  if (row >= p.num_rows) return;
  float sum = 0;
  for_each_vector<kValues>(x + row * p.width, p.width, [&](int64_t, const auto& values) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const auto value = static_cast<float>(values.at[j]);
      sum = fmaf(value, value, sum);
    }
  });
  sum = warp_sum(sum);
  if (threadIdx.x % kLanes == 0) sums[row] = sum;
}

template <typename T, int kValues>
__global__ void __launch_bounds__(kThreads)
    scale_rows(const SpreadRows p, const T* x, const float* grad, T* grad_x) {
  const int64_t row = own_row();
  if (row >= p.num_rows) return;
  const float factor = 2.0F * grad[row];
  T* to = grad_x + row * p.width;
  for_each_vector<kValues>(x + row * p.width, p.width, [&](int64_t i, const auto& values) {
    Pack<T, kValues> result;
#pragma unroll
    for (int j = 0; j < kValues; ++j)
      store_value(result.at[j], static_cast<float>(values.at[j]) * factor);
    *reinterpret_cast<Pack<T, kValues>*>(to + i) = result;
  });
}

template <typename T, int kValues>
__global__ void __launch_bounds__(kThreads) normalize(const SpreadNormRows p, T* y) {
  const int64_t row = own_row();
  if (row >= p.rows.num_rows) return;
  const int64_t width = p.rows.width;
  const float rstd = rstd_of(p, row);
  for_each_vector<kValues>(
      static_cast<const T*>(p.x) + row * width, width, [&](int64_t i, const auto& values) {
        Pack<T, kValues> result;
#pragma unroll
        for (int j = 0; j < kValues; ++j)
          store_value(result.at[j], static_cast<float>(values.at[j]) * rstd * p.weight[i + j]);
        *reinterpret_cast<Pack<T, kValues>*>(y + row * width + i) = result;
      });
}

template <typename T, int kValues>
__global__ void __launch_bounds__(kThreads)
    differentiate_rows(const SpreadNormRows p, const SpreadNormGrads g) {
  const int64_t row = own_row();
  if (row >= p.rows.num_rows) return;
  const int64_t width = p.rows.width;
  const T* grad = static_cast<const T*>(g.grad) + row * width;
  T* grad_x = static_cast<T*>(g.grad_x) + row * width;
  const float rstd = rstd_of(p, row);
  float dot = 0;
  for_each_vector<kValues>(
      static_cast<const T*>(p.x) + row * width, width, [&](int64_t i, const auto& values) {
        const auto grads = *reinterpret_cast<const Pack<T, kValues>*>(grad + i);
        Pack<T, kValues> result;
#pragma unroll
        for (int j = 0; j < kValues; ++j) {
          const float scaled = static_cast<float>(grads.at[j]) * rstd * p.weight[i + j];
          dot = fmaf(scaled, static_cast<float>(values.at[j]), dot);
          store_value(result.at[j], scaled);
        }
        *reinterpret_cast<Pack<T, kValues>*>(grad_x + i) = result;
      });
  dot = warp_sum(dot);
  if (threadIdx.x % kLanes == 0) g.grad_sums[row] = -0.5F / p.num_elements * rstd * rstd * dot;
}

/// A block adds up 32 columns (x) of a run of rows (y): warp by warp, then the warps'.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_weight_terms(const SpreadNormRows p, const SpreadNormGrads g) {
  __shared__ float sums[kWarps][kLanes];
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kLanes + lane;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kSpreadNormRun;
  const int64_t last = min(first + kSpreadNormRun, p.rows.num_rows);
  float sum = 0;
  if (column < p.rows.width) {
#pragma unroll 4
    for (int64_t row = first + warp; row < last; row += kWarps) {
      const int64_t at = row * p.rows.width + column;
      const float scaled = static_cast<float>(static_cast<const T*>(g.grad)[at]) * rstd_of(p, row);
      sum = fmaf(scaled, static_cast<float>(static_cast<const T*>(p.x)[at]), sum);
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= p.rows.width) return;
  for (int w = 1; w < kWarps; ++w) sum += sums[w][lane];
  g.partials[blockIdx.y * p.rows.width + column] = sum;
}

__global__ void __launch_bounds__(kThreads)
    add_runs(const float* partials, int64_t num_runs, int64_t width, float* grad_weight) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= width) return;
  float sum = 0;
#pragma unroll 8
  for (int64_t run = 0; run < num_runs; ++run) sum += partials[run * width + column];
  grad_weight[column] += sum;
}

unsigned divide_up(int64_t a, int64_t b) {
  return static_cast<unsigned>((a + b - 1) / b);
}

/// Calls run.operator()<T, kValues>().
template <typename Run, typename... Pointers>
void with_vectors(const SpreadRows& rows, Run run, const Pointers*... pointers) {
  const bool aligned = ((reinterpret_cast<uintptr_t>(pointers) | ...) & 15) == 0;
  if (rows.num_rows == 0) return;
  if (rows.bf16) {
    aligned&& rows.width % 8 == 0 ? run.template operator()<__nv_bfloat16, 8>()
                                  : run.template operator()<__nv_bfloat16, 1>();
  } else {
    aligned&& rows.width % 4 == 0 ? run.template operator()<float, 4>()
                                  : run.template operator()<float, 1>();
  }
}

}  // namespace

void launch_square_sums(const SpreadRows& rows, const void* x, float* sums, cudaStream_t stream) {
  with_vectors(
      rows,
      [&]<typename T, int kValues>() {
        add_squares<T, kValues><<<divide_up(rows.num_rows, kWarps), kThreads, 0, stream>>>(
            rows, static_cast<const T*>(x), sums);
      },
      x);
}

void launch_square_sums_backward(const SpreadRows& rows, const void* x, const float* grad,
                                 void* grad_x, cudaStream_t stream) {
  with_vectors(
      rows,
      [&]<typename T, int kValues>() {
        scale_rows<T, kValues><<<divide_up(rows.num_rows, kWarps), kThreads, 0, stream>>>(
            rows, static_cast<const T*>(x), grad, static_cast<T*>(grad_x));
      },
      x, grad_x);
}

void launch_spread_norm(const SpreadNormRows& norm, void* y, cudaStream_t stream) {
  with_vectors(
      norm.rows,
      [&]<typename T, int kValues>() {
        normalize<T, kValues><<<divide_up(norm.rows.num_rows, kWarps), kThreads, 0, stream>>>(
            norm, static_cast<T*>(y));
      },
      norm.x, y);
}

void launch_spread_norm_backward(const SpreadNormRows& norm, const SpreadNormGrads& grads,
                                 cudaStream_t stream) {
  const SpreadRows& rows = norm.rows;
  const int64_t num_runs = spread_norm_runs(rows.num_rows);
  with_vectors(
      rows,
      [&]<typename T, int kValues>() {
        differentiate_rows<T, kValues>
            <<<divide_up(rows.num_rows, kWarps), kThreads, 0, stream>>>(norm, grads);
        if (grads.grad_weight == nullptr || rows.width == 0) return;
        const dim3 grid(divide_up(rows.width, kLanes), static_cast<unsigned>(num_runs));
        add_weight_terms<T><<<grid, kThreads, 0, stream>>>(norm, grads);
        add_runs<<<divide_up(rows.width, kThreads), kThreads, 0, stream>>>(
            grads.partials, num_runs, rows.width, grads.grad_weight);
      },
      norm.x, grads.grad, grads.grad_x);
}

}  // namespace tessera::cuda
