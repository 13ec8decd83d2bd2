#include <cuda_bf16.h>

#include "ops/block_sparse/block_sparse_kernels.h"
#include "ops/cuda/activation_math.cuh"
#include "ops/cuda/dependent_launch.cuh"

namespace tessera::cuda {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr int kLanes = 32;
constexpr int kWarps = 8;
/// Values that a lane takes at once: block sizes are multiples of it, and so are rows and places.
constexpr int kValues = 8;

template <typename T>
struct alignas(16) Values {
  T at[kValues];
};

__device__ __forceinline__ void store_value(float& to, float value) {
  to = value;
}
__device__ __forceinline__ void store_value(__nv_bfloat16& to, float value) {
  to = __float2bfloat16_rn(value);
}

/// A row of sparse values: the blocks of its block-row side by side.
struct SparseRow {
  int64_t width;
  int64_t start;

  __device__ __forceinline__ SparseRow(const SparseActivation& p, int64_t row) {
    const int64_t block_row = row / p.block_size;
    const int64_t first = p.row_offsets[block_row];
    width = (p.row_offsets[block_row + 1] - first) * p.block_size;
    start = first * p.block_size * p.block_size + row % p.block_size * width;
  }
};

/// A warp takes a row.
__device__ __forceinline__ int64_t own_row(const SparseActivation& p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  return row < (p.extent == nullptr ? p.num_rows : *p.extent) ? row : -1;
}

template <typename T, typename Function, bool kGated>
__global__ void __launch_bounds__(kWarps* kLanes)
    activate(const Function function, const SparseActivation p) {
  wait_for_earlier();
  const int64_t row = own_row(p);
  if (row < 0) return;
  const SparseRow place(p, row);
  const T* pre = static_cast<const T*>(p.pre) + (kGated ? 2 : 1) * place.start;
  T* out = static_cast<T*>(p.out) + place.start;
  const float prob = p.probs_R[row];
  for (int64_t i = threadIdx.x % kLanes * kValues; i < place.width; i += kLanes * kValues) {
    const auto gate = *reinterpret_cast<const Values<T>*>(pre + i);
    Values<T> up = gate;
    if (kGated) up = *reinterpret_cast<const Values<T>*>(pre + place.width + i);
    Values<T> result;
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      float value = prob * function.value(static_cast<float>(gate.at[j]));
      if (kGated) value *= function.other(static_cast<float>(up.at[j]));
      store_value(result.at[j], value);
    }
    *reinterpret_cast<Values<T>*>(out + i) = result;
  }
}

template <typename T, typename Function, bool kGated>
__global__ void __launch_bounds__(kWarps* kLanes)
    activate_backward(const Function function, const SparseActivation p) {
  wait_for_earlier();
  const int64_t row = own_row(p);
  if (row < 0) return;
  const SparseRow place(p, row);
  const T* grad = static_cast<const T*>(p.grad) + place.start;
  const T* pre = static_cast<const T*>(p.pre) + (kGated ? 2 : 1) * place.start;
  T* grad_pre = static_cast<T*>(p.grad_pre) + (kGated ? 2 : 1) * place.start;
  const float prob = p.probs_R[row];
  float total = 0;
  for (int64_t i = threadIdx.x % kLanes * kValues; i < place.width; i += kLanes * kValues) {
    const auto grads = *reinterpret_cast<const Values<T>*>(grad + i);
    const auto gate = *reinterpret_cast<const Values<T>*>(pre + i);
    Values<T> up = gate;
    if (kGated) up = *reinterpret_cast<const Values<T>*>(pre + place.width + i);
    Values<T> grad_gate, grad_up;
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const auto g = static_cast<float>(grads.at[j]);
      const Slope slope = function.slope(static_cast<float>(gate.at[j]));
      float slope_grad = g * prob;
      float value_grad = g * slope.value;
      if (kGated) {
        const auto u = static_cast<float>(up.at[j]);
        const float other = function.other(u);
        store_value(grad_up.at[j], function.other_grad(u, value_grad * prob));
        slope_grad *= other;
        value_grad *= other;
      }
      store_value(grad_gate.at[j], slope_grad * slope.derivative);
      total += value_grad;
    }
    *reinterpret_cast<Values<T>*>(grad_pre + i) = grad_gate;
    if (kGated) *reinterpret_cast<Values<T>*>(grad_pre + place.width + i) = grad_up;
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) total += __shfl_xor_sync(kAllLanes, total, step);
  if (threadIdx.x % kLanes == 0) p.grad_probs_R[row] = total;
}

/// Calls run.operator()<T, kGated>(function).
template <typename Run>
void with_kinds(const SparseActivation& p, Run run) {
  with_activation(p.activation, [&]<bool kGated>(auto function) {
    p.type == SparseType::kF32 ? run.template operator()<float, kGated>(function)
                               : run.template operator()<__nv_bfloat16, kGated>(function);
  });
}

unsigned blocks_of(const SparseActivation& p) {
  return static_cast<unsigned>((p.num_rows + kWarps - 1) / kWarps);
}

}  // namespace

void launch_sparse_activation(const SparseActivation& p, cudaStream_t stream) {
  if (p.num_rows == 0) return;
  with_kinds(p, [&]<typename T, bool kGated>(auto function) {
    launch_early(activate<T, decltype(function), kGated>, {blocks_of(p), kWarps * kLanes}, stream,
                 function, p);
  });
}

void launch_sparse_activation_backward(const SparseActivation& p, cudaStream_t stream) {
  if (p.num_rows == 0) return;
  with_kinds(p, [&]<typename T, bool kGated>(auto function) {
    launch_early(activate_backward<T, decltype(function), kGated>, {blocks_of(p), kWarps * kLanes},
                 stream, function, p);
  });
}

}  // namespace tessera::cuda
