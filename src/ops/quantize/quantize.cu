// A block of threads finds the largest magnitude of one scale's elements and then reads them, which
// lie in a cache by then, once more. Rows of many elements have a block of threads, blocks of a few
// a warp each.
#include <cuda_fp8.h>

#include "ops/cuda/vector.cuh"
#include "ops/quantize/quantize_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kMaxThreads = 256;

/// The elements of one scale.
struct ScaledBox {
  int64_t first = 0;  // of the matrix
  int num_rows = 0;
  int num_columns = 0;
};

template <bool kE4m3>
constexpr float kLargest = kE4m3 ? 448.0F : 57344.0F;

template <bool kE4m3>
__device__ __forceinline__ uint8_t to_fp8(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, kE4m3 ? __NV_E4M3 : __NV_E5M2);
}

/// Calls visit(offset, pack) for this thread's part of a box, kWidth elements at a time, of which
/// the box's columns are a multiple.
template <int kWidth, typename T, typename Visit>
__device__ __forceinline__ void for_each_pack(const ScaledBox& box, const T* x, int64_t stride,
                                              int thread, int num_threads, const Visit& visit) {
  const int across = box.num_columns / kWidth;
  for (int at = thread; at < across * box.num_rows; at += num_threads) {
    const int64_t offset = box.first + at / across * stride + at % across * kWidth;
    visit(offset, load_pack<kWidth>(x + offset));
  }
}

/// The largest of all threads' values that share a scale: one warp, or all of a block of threads.
__device__ __forceinline__ float find_largest(float value, int num_threads) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0U, value, step));
  if (num_threads == 32) return value;
  __shared__ float largest[kMaxThreads / 32];
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = value;
  __syncthreads();
  value = largest[0];
  for (int warp = 1; warp < num_threads / 32; ++warp) value = fmaxf(value, largest[warp]);
  return value;
}

template <typename T, int kWidth, bool kE4m3>
__global__ void __launch_bounds__(kMaxThreads)
    quantize_kernel(const QuantizedRows rows, int threads_of_scale) {
  wait_for_earlier();
  const int64_t across = divide_up(rows.num_columns, rows.block_columns);
  const int64_t scale_idx =
      (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / threads_of_scale;
  const int64_t first_row = scale_idx / across * rows.block_rows;
  const int64_t first_column = scale_idx % across * rows.block_columns;
  const int64_t end = rows.extent == nullptr ? rows.num_rows : min(*rows.extent, rows.num_rows);
  if (first_row >= end) return;
  const ScaledBox box{
      .first = first_row * rows.num_columns + first_column,
      .num_rows = static_cast<int>(min(rows.block_rows, end - first_row)),
      .num_columns = static_cast<int>(min(rows.block_columns, rows.num_columns - first_column))};
  const int thread = static_cast<int>(threadIdx.x) % threads_of_scale;
  const T* const x = static_cast<const T*>(rows.x);
  float own = rows.smallest_amax;
  for_each_pack<kWidth>(box, x, rows.num_columns, thread, threads_of_scale,
                        [&](int64_t /*offset*/, const Pack<T, kWidth>& pack) {
#pragma unroll
                          for (int i = 0; i < kWidth; ++i)
                            own = fmaxf(own, fabsf(static_cast<float>(pack.at[i])));
                        });
  const float amax = find_largest(own, threads_of_scale);
  const float factor = __fdiv_rn(kLargest<kE4m3>, amax);
  for_each_pack<kWidth>(box, x, rows.num_columns, thread, threads_of_scale,
                        [&](int64_t offset, const Pack<T, kWidth>& pack) {
                          Pack<uint8_t, kWidth> codes;
#pragma unroll
                          for (int i = 0; i < kWidth; ++i)
                            codes.at[i] =
                                to_fp8<kE4m3>(__fmul_rn(static_cast<float>(pack.at[i]), factor));
                          store(static_cast<uint8_t*>(rows.y) + offset, codes);
                        });
  if (thread == 0) rows.scales[scale_idx] = __fdiv_rn(amax, kLargest<kE4m3>);
}

/// Elements that a thread takes at once: 8 where that leaves work for a warp, else 4 or 1.
int pack_width(const QuantizedRows& rows) {
  const int64_t columns = std::min(rows.block_columns, rows.num_columns);
  const bool aligned = are_aligned(rows.x, rows.y);
  const auto whole = [&](int64_t width) {
    return aligned && rows.num_columns % width == 0 && rows.block_columns % width == 0;
  };
  if (whole(8) && columns * rows.block_rows >= 8 * 32) return 8;
  return whole(4) ? 4 : 1;
}

template <typename T, int kWidth>
void launch_as(const QuantizedRows& rows, cudaStream_t stream) {
  const int64_t columns = std::min(rows.block_columns, rows.num_columns);
  const int64_t packs = divide_up(columns * rows.block_rows, kWidth);
  const int threads_of_scale = packs > 4 * 32 ? kMaxThreads : 32;
  const int64_t scales =
      divide_up(rows.num_rows, rows.block_rows) * divide_up(rows.num_columns, rows.block_columns);
  const int64_t blocks = divide_up(scales * threads_of_scale, kMaxThreads);
  const auto kernel = rows.element == DType::kE4M3 ? quantize_kernel<T, kWidth, true>
                                                   : quantize_kernel<T, kWidth, false>;
  launch_early(kernel, {static_cast<unsigned>(blocks), kMaxThreads}, stream, rows,
               threads_of_scale);
}

}  // namespace

void launch_quantize(const QuantizedRows& rows, cudaStream_t stream) {
  with_type(rows.dtype, [&]<typename T>() {
    switch (pack_width(rows)) {
      case 8:
        return launch_as<T, 8>(rows, stream);
      case 4:
        return launch_as<T, 4>(rows, stream);
      default:
        return launch_as<T, 1>(rows, stream);
    }
  });
}

}  // namespace tessera::cuda
