// Values become halves one by one, to nearest even; what is beyond them becomes infinite.
#include <cuda_fp16.h>

#include "ops/cuda/vector.cuh"
#include "ops/quantize/quantize_kernels.h"

namespace tessera::cuda {
namespace {

template <typename T, int kWidth>
struct HalfMap {
  static constexpr int kUnroll = 4;
  static constexpr int kBlocks = 4;
  using Loaded = Pack<T, kWidth>;

  const T* x;
  __half* y;
  int64_t num_columns;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    return load_pack<kWidth>(x + row * num_columns + int64_t{vector} * kWidth);
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    Pack<__half, kWidth> halves;
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      halves.at[i] = __float2half_rn(static_cast<float>(loaded.at[i]));
    cuda::store(y + row * num_columns + int64_t{vector} * kWidth, halves);
  }
};

}  // namespace

void launch_round_to_half(const HalfRows& rows, cudaStream_t stream) {
  constexpr int kWide = 8;
  const bool whole = rows.num_columns % kWide == 0 && are_aligned(rows.x, rows.y);
  with_type(rows.dtype, [&]<typename T>() {
    const auto launch = [&]<int kWidth>() {
      launch_map(HalfMap<T, kWidth>{static_cast<const T*>(rows.x), static_cast<__half*>(rows.y),
                                    rows.num_columns},
                 rows.rows, rows.num_columns / kWidth, stream);
    };
    whole ? launch.template operator()<kWide>() : launch.template operator()<1>();
  });
}

}  // namespace tessera::cuda
