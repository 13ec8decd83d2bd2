#include "ops/cuda/column_sums.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/layer_norm/layer_norm_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 8;

struct RowStatistics {
  float mean;
  float rstd;
};

/// Calls run(column) for the vectors of a row that the lane has.
template <int kWidth, typename Run>
__device__ __forceinline__ void for_each_column(int64_t size, Run run) {
  for (int64_t column = (threadIdx.x % 32) * kWidth; column < size; column += 32 * kWidth)
    run(column);
}

/// Of a row that a warp has, the same bits in all lanes.
template <int kWidth, typename T>
__device__ __forceinline__ RowStatistics find_statistics(const T* x, int64_t size, float eps) {
  float sum = 0;
  for_each_column<kWidth>(size, [&](int64_t column) {
    const Floats<kWidth> v = load<kWidth>(x + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += v[i];
  });
  const float mean = sum_lanes(sum) / static_cast<float>(size);
  float squares = 0;
  for_each_column<kWidth>(size, [&](int64_t column) {
    const Floats<kWidth> v = load<kWidth>(x + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) squares = fmaf(v[i] - mean, v[i] - mean, squares);
  });
  return {mean, 1.0F / sqrtf(sum_lanes(squares) / static_cast<float>(size) + eps)};
}

__device__ __forceinline__ int64_t own_row() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
}

// A warp has a row, which it reads three times.
template <typename T, int kWidth>
__global__ void __launch_bounds__(32 * kWarps)
    norm_rows(const __grid_constant__ LayerNormRows call, const float* bias, T* y) {
  wait_for_earlier();
  const int64_t row = own_row();
  if (row >= call.rows.in_use()) return;
  const T* const x = static_cast<const T*>(call.x) + row * call.size;
  const RowStatistics of_row = find_statistics<kWidth>(x, call.size, call.eps);
  for_each_column<kWidth>(call.size, [&](int64_t column) {
    Floats<kWidth> v = load<kWidth>(x + column);
    const Floats<kWidth> weight = load<kWidth>(call.weight + column);
    const Floats<kWidth> shift = load<kWidth>(bias + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      v[i] = fmaf((v[i] - of_row.mean) * of_row.rstd, weight[i], shift[i]);
    store(y + row * call.size + column, v);
  });
}

/// With n = (x - mean) · rstd and g = grad · weight: grad of x = rstd · (g - mean(g) - n · mean(g ·
/// n)), plus the addend. Keeps the rows' statistics for the weight's gradient.
template <typename T, int kWidth>
__global__ void __launch_bounds__(32 * kWarps)
    norm_rows_backward(const __grid_constant__ LayerNormRows call, const T* grad_rows,
                       const T* addend_rows, T* grad_x, RowStatistics* statistics) {
  wait_for_earlier();
  const int64_t row = own_row();
  if (row >= call.rows.in_use()) return;
  const int64_t at = row * call.size;
  const T* const x = static_cast<const T*>(call.x) + at;
  const T* const grad = grad_rows + at;
  const RowStatistics of_row = find_statistics<kWidth>(x, call.size, call.eps);
  float of_grad = 0;
  float of_product = 0;
  for_each_column<kWidth>(call.size, [&](int64_t column) {
    const Floats<kWidth> v = load<kWidth>(x + column);
    const Floats<kWidth> own = load<kWidth>(grad + column);
    const Floats<kWidth> weight = load<kWidth>(call.weight + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float g = own[i] * weight[i];
      of_grad += g;
      of_product = fmaf(g, (v[i] - of_row.mean) * of_row.rstd, of_product);
    }
  });
  const float mean_grad = sum_lanes(of_grad) / static_cast<float>(call.size);
  const float mean_product = sum_lanes(of_product) / static_cast<float>(call.size);
  for_each_column<kWidth>(call.size, [&](int64_t column) {
    const Floats<kWidth> v = load<kWidth>(x + column);
    Floats<kWidth> g = load<kWidth>(grad + column);
    const Floats<kWidth> weight = load<kWidth>(call.weight + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float n = (v[i] - of_row.mean) * of_row.rstd;
      g[i] = of_row.rstd * (g[i] * weight[i] - mean_grad - n * mean_product);
    }
    if (addend_rows != nullptr) {
      const Floats<kWidth> other = load<kWidth>(addend_rows + at + column);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) g[i] += other[i];
    }
    store(grad_x + at + column, g);
  });
  if (threadIdx.x % 32 == 0) statistics[row] = of_row;
}

/// The terms of the weight's gradient: grad · n.
template <typename T, int kWidth>
struct WeightTerms {
  struct Loaded {
    Pack<T, kWidth> x;
    Pack<T, kWidth> grad;
    RowStatistics of_row;
  };

  const T* x;
  const T* grad;
  const RowStatistics* statistics;
  int64_t size;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    const int64_t at = row * size + column;
    return {load_pack<kWidth>(x + at), load_pack<kWidth>(grad + at), statistics[row]};
  }
  __device__ __forceinline__ void add(const Loaded& loaded, Floats<kWidth>& sums) const {
    const Floats<kWidth> v = to_floats(loaded.x);
    const Floats<kWidth> g = to_floats(loaded.grad);
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      sums[i] = fmaf(g[i], (v[i] - loaded.of_row.mean) * loaded.of_row.rstd, sums[i]);
  }
};

LaunchShape shape_of(const LayerNormRows& call) {
  return {static_cast<unsigned>(divide_up(call.rows.bound, kWarps)), 32 * kWarps};
}

}  // namespace

void launch_layer_norm(const LayerNormRows& call, const float* bias, void* y, cudaStream_t stream) {
  if (call.rows.bound == 0) return;
  const bool vectors = are_whole_vectors(call.dtype, call.size) &&
                       are_aligned(call.x, call.weight, bias, static_cast<const void*>(y));
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_early(norm_rows<T, kWidth>, shape_of(call), stream, call, bias, static_cast<T*>(y));
  });
}

int64_t layer_norm_statistics_bytes(int64_t rows) {
  return divide_up(rows * static_cast<int64_t>(sizeof(RowStatistics)), 16) * 16;
}

void launch_layer_norm_backward(const LayerNormRows& call, const LayerNormGradients& gradients,
                                cudaStream_t stream) {
  if (call.rows.bound == 0) return;
  const bool vectors = are_whole_vectors(call.dtype, call.size) &&
                       are_aligned(call.x, call.weight, gradients.grad, gradients.addend,
                                   static_cast<const void*>(gradients.grad_x));
  auto* const statistics = reinterpret_cast<RowStatistics*>(gradients.scratch);
  auto* const partials =
      reinterpret_cast<float*>(gradients.scratch + layer_norm_statistics_bytes(call.rows.bound));
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    const auto* const grad = static_cast<const T*>(gradients.grad);
    launch_early(norm_rows_backward<T, kWidth>, shape_of(call), stream, call, grad,
                 static_cast<const T*>(gradients.addend), static_cast<T*>(gradients.grad_x),
                 statistics);
    if (gradients.grad_weight.sums == nullptr) return;
    launch_sum_columns<kWidth>(
        WeightTerms<T, kWidth>{static_cast<const T*>(call.x), grad, statistics, call.size},
        call.rows, call.size, gradients.grad_weight, partials, gradients.num_sms, stream);
  });
  if (gradients.grad_bias.sums == nullptr) return;
  launch_column_sums({.dtype = call.dtype,
                      .rows = call.rows,
                      .cols = call.size,
                      .x = gradients.grad,
                      .accumulator = gradients.grad_bias,
                      .partials = partials,
                      .num_sms = gradients.num_sms},
                     stream);
}

}  // namespace tessera::cuda
