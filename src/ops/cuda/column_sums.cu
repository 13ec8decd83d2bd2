#include "ops/cuda/column_sums.cuh"

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/short_kernel.cuh"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 32;  // that share the partial sums of 32 columns

// Each warp adds every 32nd partial, and the first warp adds the warps' sums.
__global__ void __launch_bounds__(32 * kWarps)
    add_partials(Accumulator accumulator, const float* partials, int num_partials, int64_t cols) {
  __shared__ float sums[kWarps][33];
  wait_for_earlier();
  let_next_begin_if_short();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  float total = 0;
  if (column < cols) {
#pragma unroll 8
    for (int i = warp; i < num_partials; i += kWarps) total += partials[i * cols + column];
  }
  sums[warp][lane] = total;
  __syncthreads();
  // Transposed: warp w reduces column w.
  const float all = sum_lanes(sums[lane][warp]);
  const int64_t own = static_cast<int64_t>(blockIdx.x) * 32 + warp;
  if (lane == 0 && own < cols)
    accumulator.sums[own] = accumulator.sets ? all : accumulator.sums[own] + all;
}

template <typename T, int kWidth>
struct PlainTerms {
  using Loaded = Pack<T, kWidth>;

  const T* x;
  int64_t cols;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    return load_pack_once<kWidth>(x + row * cols + column);
  }
  __device__ __forceinline__ void add(const Loaded& loaded, Floats<kWidth>& sums) const {
    const Floats<kWidth> terms = to_floats(loaded);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[i] += terms[i];
  }
};

}  // namespace

void launch_add_partials(Accumulator accumulator, const float* partials, int num_partials,
                         int64_t cols, cudaStream_t stream) {
  if (cols == 0) return;
  const LaunchShape shape = {static_cast<unsigned>(divide_up(cols, 32)), 32 * kWarps};
  launch_early(add_partials, shape, stream, accumulator, partials, num_partials, cols);
}

void launch_column_sums(const ColumnSums& call, cudaStream_t stream) {
  const bool vectors = are_whole_vectors(call.dtype, call.cols) && are_aligned(call.x);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_sum_columns<kWidth>(PlainTerms<T, kWidth>{static_cast<const T*>(call.x), call.cols},
                               call.rows, call.cols, call.accumulator, call.partials, call.num_sms,
                               stream);
  });
}

}  // namespace tessera::cuda
