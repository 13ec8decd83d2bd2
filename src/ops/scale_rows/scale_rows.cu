#include "ops/adamw/adamw_update.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/scale_rows/scale_rows_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

/// A block has a row.
template <typename Master, bool kWeight>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const float* factors, Master* masters, BFloat16* weights, int64_t columns) {
  wait_for_earlier();
  const float factor = factors[blockIdx.x];
  if (factor == 1.0F) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * columns;
  for (int64_t i = first + threadIdx.x; i < first + columns; i += kThreads) {
    BFloat16 weight{};
    if constexpr (kIsRemainder<Master>) weight = weights[i];
    const float old = master_of(masters[i], weight);
    float value = __fmul_rn(old, factor);
    const uint32_t random = rounding_bits(0, __float_as_uint(factor), 0, 0, __float_as_uint(old));
    masters[i] = keep_master<Master>(value, random);
    if constexpr (kWeight) weights[i] = __float2bfloat16_rn(value);
  }
}

template <typename Master, bool kWeight>
void launch(const RowsToScale& call, cudaStream_t stream) {
  launch_early(scale_kernel<Master, kWeight>, {static_cast<unsigned>(call.rows), kThreads}, stream,
               call.factors, static_cast<Master*>(call.master), static_cast<BFloat16*>(call.weight),
               call.columns);
}

}  // namespace

void launch_scale_rows(const RowsToScale& call, cudaStream_t stream) {
  if (call.rows * call.columns == 0) return;
  if (call.master_type == DType::kU16) return launch<uint16_t, true>(call, stream);
  if (call.master_type == DType::kU8) return launch<uint8_t, true>(call, stream);
  if (call.master_type == DType::kBF16) return launch<BFloat16, false>(call, stream);
  call.weight != nullptr ? launch<float, true>(call, stream) : launch<float, false>(call, stream);
}

}  // namespace tessera::cuda
