#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/layer_norm/layer_norm_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 8;

// A warp has a row, whose elements each lane reads three times.
template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    norm_rows(const __grid_constant__ LayerNormRows call, T* y) {
  wait_for_earlier();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= call.rows.in_use()) return;
  const T* const x = static_cast<const T*>(call.x) + row * call.size;
  const auto size = static_cast<float>(call.size);
  float sum = 0;
  for (int64_t i = threadIdx.x % 32; i < call.size; i += 32) sum += static_cast<float>(x[i]);
  const float mean = sum_lanes(sum) / size;
  float squares = 0;
  for (int64_t i = threadIdx.x % 32; i < call.size; i += 32) {
    const float d = static_cast<float>(x[i]) - mean;
    squares = fmaf(d, d, squares);
  }
  const float rstd = 1.0F / sqrtf(sum_lanes(squares) / size + call.eps);
  for (int64_t i = threadIdx.x % 32; i < call.size; i += 32) {
    const float normed = (static_cast<float>(x[i]) - mean) * rstd;
    store(y + row * call.size + i, Floats<1>{{fmaf(normed, call.weight[i], call.bias[i])}});
  }
}

}  // namespace

void launch_layer_norm(const LayerNormRows& call, void* y, cudaStream_t stream) {
  if (call.rows.bound == 0) return;
  with_type(call.dtype, [&]<typename T>() {
    const auto blocks = static_cast<unsigned>(divide_up(call.rows.bound, kWarps));
    launch_early(norm_rows<T>, {blocks, 32 * kWarps}, stream, call, static_cast<T*>(y));
  });
}

}  // namespace tessera::cuda
