// A warp takes a row, a vector of 16 bytes a lane where rows are multiples of that.
#include "ops/cuda/column_sums.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/spread_norm/spread_norm_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;

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
    take(i, load<kValues>(from + i));
}

template <typename T, int kValues>
__global__ void __launch_bounds__(kThreads)
    add_squares(const SpreadRows p, const T* x, float* sums) {
  wait_for_earlier();
  const int64_t row = own_row();
  if (row >= p.num_rows) return;
  float sum = 0;
  for_each_vector<kValues>(x + row * p.width, p.width, [&](int64_t, const auto& values) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) sum = fmaf(values[j], values[j], sum);
  });
  sum = sum_lanes(sum);
  if (threadIdx.x % kLanes == 0) sums[row] = sum;
}

template <typename T, int kValues>
__global__ void __launch_bounds__(kThreads)
    scale_rows(const SpreadRows p, const T* x, const float* grad, T* grad_x) {
  wait_for_earlier();
  const int64_t row = own_row();
  if (row >= p.num_rows) return;
  const float factor = 2.0F * grad[row];
  T* to = grad_x + row * p.width;
  for_each_vector<kValues>(x + row * p.width, p.width, [&](int64_t i, const auto& values) {
    Floats<kValues> result;
#pragma unroll
    for (int j = 0; j < kValues; ++j) result[j] = values[j] * factor;
    store(to + i, result);
  });
}

template <typename T, int kValues>
__global__ void __launch_bounds__(kThreads) normalize(const SpreadNormRows p, T* y) {
  wait_for_earlier();
  const int64_t row = own_row();
  if (row >= p.rows.num_rows) return;
  const int64_t width = p.rows.width;
  const float rstd = rstd_of(p, row);
  for_each_vector<kValues>(static_cast<const T*>(p.x) + row * width, width,
                           [&](int64_t i, const auto& values) {
                             Floats<kValues> result;
#pragma unroll
                             for (int j = 0; j < kValues; ++j)
                               result[j] = values[j] * rstd * p.weight[i + j];
                             store(y + row * width + i, result);
                           });
}

template <typename T, int kValues>
__global__ void __launch_bounds__(kThreads)
    differentiate_rows(const SpreadNormRows p, const SpreadNormGrads g) {
  wait_for_earlier();
  const int64_t row = own_row();
  if (row >= p.rows.num_rows) return;
  const int64_t width = p.rows.width;
  const T* grad = static_cast<const T*>(g.grad) + row * width;
  T* grad_x = static_cast<T*>(g.grad_x) + row * width;
  const float rstd = rstd_of(p, row);
  float dot = 0;
  for_each_vector<kValues>(static_cast<const T*>(p.x) + row * width, width,
                           [&](int64_t i, const auto& values) {
                             Floats<kValues> result = load<kValues>(grad + i);
#pragma unroll
                             for (int j = 0; j < kValues; ++j) {
                               result[j] = result[j] * rstd * p.weight[i + j];
                               dot = fmaf(result[j], values[j], dot);
                             }
                             store(grad_x + i, result);
                           });
  dot = sum_lanes(dot);
  if (threadIdx.x % kLanes == 0) g.grad_sums[row] = -0.5F / p.num_elements * rstd * rstd * dot;
}

/// What a row adds to the gradient of the weight.
template <typename T, int kValues>
struct WeightTerms {
  struct Loaded {
    Pack<T, kValues> x;
    Pack<T, kValues> grad;
    float rstd;
  };

  SpreadNormRows norm;
  const T* grad;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    const int64_t at = row * norm.rows.width + column;
    return {load_pack<kValues>(static_cast<const T*>(norm.x) + at), load_pack<kValues>(grad + at),
            rstd_of(norm, row)};
  }
  __device__ __forceinline__ void add(const Loaded& loaded, Floats<kValues>& sums) const {
    const Floats<kValues> x = to_floats(loaded.x);
    const Floats<kValues> grads = to_floats(loaded.grad);
#pragma unroll
    for (int i = 0; i < kValues; ++i) sums[i] = fmaf(grads[i] * loaded.rstd, x[i], sums[i]);
  }
};

unsigned row_blocks(const SpreadRows& rows) {
  return static_cast<unsigned>(divide_up(rows.num_rows, kWarps));
}

/// Calls run.operator()<T, kValues>() unless there are no rows.
template <typename Run, typename... Pointers>
void with_row_vectors(const SpreadRows& rows, Run run, const Pointers*... pointers) {
  if (rows.num_rows == 0) return;
  with_vectors(rows.dtype, are_whole_vectors(rows.dtype, rows.width) && are_aligned(pointers...),
               run);
}

}  // namespace

void launch_square_sums(const SpreadRows& rows, const void* x, float* sums, cudaStream_t stream) {
  with_row_vectors(
      rows,
      [&]<typename T, int kValues>() {
        launch_early(add_squares<T, kValues>, {row_blocks(rows), kThreads}, stream, rows,
                     static_cast<const T*>(x), sums);
      },
      x);
}

void launch_square_sums_backward(const SpreadRows& rows, const void* x, const float* grad,
                                 void* grad_x, cudaStream_t stream) {
  with_row_vectors(
      rows,
      [&]<typename T, int kValues>() {
        launch_early(scale_rows<T, kValues>, {row_blocks(rows), kThreads}, stream, rows,
                     static_cast<const T*>(x), grad, static_cast<T*>(grad_x));
      },
      x, grad_x);
}

void launch_spread_norm(const SpreadNormRows& norm, void* y, cudaStream_t stream) {
  with_row_vectors(
      norm.rows,
      [&]<typename T, int kValues>() {
        launch_early(normalize<T, kValues>, {row_blocks(norm.rows), kThreads}, stream, norm,
                     static_cast<T*>(y));
      },
      norm.x, y);
}

void launch_spread_norm_backward(const SpreadNormRows& norm, const SpreadNormGrads& grads,
                                 cudaStream_t stream) {
  const SpreadRows& rows = norm.rows;
  with_row_vectors(
      rows,
      [&]<typename T, int kValues>() {
        launch_early(differentiate_rows<T, kValues>, {row_blocks(rows), kThreads}, stream, norm,
                     grads);
        if (grads.grad_weight.sums == nullptr) return;
        launch_sum_columns<kValues>(
            WeightTerms<T, kValues>{norm, static_cast<const T*>(grads.grad)},
            {.bound = rows.num_rows}, rows.width, grads.grad_weight, grads.partials, grads.num_sms,
            stream);
      },
      norm.x, grads.grad, grads.grad_x);
}

}  // namespace tessera::cuda
