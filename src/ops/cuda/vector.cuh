#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda/check.h"
#include "ops/cuda/rows.h"

/// What memory-bound kernels share: accesses of 16 bytes with arithmetic in F32, sums over warps,
/// and the loop over all vectors of all rows.
namespace tessera::cuda {

using BFloat16 = __nv_bfloat16;

/// Elements of T in 16 bytes.
template <typename T>
constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(T));

/// Calls run.operator()<T, kWidth>() for the element type: with whole vectors, or else one element
/// at a time, for tensors whose rows or addresses are no multiples of 16 bytes.
template <typename Run>
void with_vectors(DType dtype, bool vectors, Run run) {
  if (dtype == DType::kF32) {
    vectors ? run.template operator()<float, kVectorWidth<float>>()
            : run.template operator()<float, 1>();
  } else {
    vectors ? run.template operator()<BFloat16, kVectorWidth<BFloat16>>()
            : run.template operator()<BFloat16, 1>();
  }
}

/// Whether all addresses are multiples of 16 bytes (null is).
template <typename... Pointers>
bool are_aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) | ...) & 15) == 0;
}

/// Elements of T in a vector for rows of these sizes: whole ones need sizes that are multiples.
template <typename... Sizes>
bool are_whole_vectors(DType dtype, Sizes... sizes) {
  const int64_t width = 16 / (dtype == DType::kF32 ? 4 : 2);
  return ((static_cast<int64_t>(sizes) % width == 0) && ...);
}

__host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// Consecutive elements as they lie in memory.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Pack {
  T at[kWidth];
};

/// The same in F32.
template <int kWidth>
struct Floats {
  float at[kWidth];

  __device__ __forceinline__ float& operator[](int i) { return at[i]; }
  __device__ __forceinline__ float operator[](int i) const { return at[i]; }
};

template <int kWidth, typename T>
__device__ __forceinline__ Pack<T, kWidth> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, kWidth>*>(from);
}

template <typename T, int kWidth>
__device__ __forceinline__ Floats<kWidth> to_floats(const Pack<T, kWidth>& pack) {
  Floats<kWidth> x;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = static_cast<float>(pack.at[i]);
  return x;
}

template <int kWidth, typename T>
__device__ __forceinline__ Floats<kWidth> load(const T* from) {
  return to_floats(load_pack<kWidth>(from));
}

template <int kWidth>
__device__ __forceinline__ void store(float* to, const Floats<kWidth>& x) {
  Pack<float, kWidth> pack;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) pack.at[i] = x[i];
  *reinterpret_cast<Pack<float, kWidth>*>(to) = pack;
}

/// Rounds to nearest even.
template <int kWidth>
__device__ __forceinline__ void store(BFloat16* to, const Floats<kWidth>& x) {
  if constexpr (kWidth == 1) {
    *to = __float2bfloat16_rn(x[0]);
  } else {
    Pack<__nv_bfloat162, kWidth / 2> pack;
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) pack.at[i / 2] = __floats2bfloat162_rn(x[i], x[i + 1]);
    *reinterpret_cast<Pack<__nv_bfloat162, kWidth / 2>*>(to) = pack;
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ void store(T* to, const Pack<T, kWidth>& pack) {
  *reinterpret_cast<Pack<T, kWidth>*>(to) = pack;
}

/// The sum over groups of kLanes neighbouring lanes, the same bits in each; all lanes must call.
template <int kLanes = 32>
__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
  return x;
}

constexpr int kMapThreads = 256;

/// Loads Map::kUnroll vectors before the first is used, so that enough bytes are under way.
template <typename Map>
__global__ void __launch_bounds__(kMapThreads)
    map_vectors(const __grid_constant__ Map map, RowCount rows, uint32_t row_vectors) {
  constexpr uint32_t kPerBlock = kMapThreads * Map::kUnroll;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPerBlock;
  const int64_t left = rows.in_use() * row_vectors - first;
  if (left <= 0) return;
  const uint32_t count = left < kPerBlock ? static_cast<uint32_t>(left) : kPerBlock;
  const int64_t first_row = first / row_vectors;
  const auto first_column = static_cast<uint32_t>(first - first_row * row_vectors);
  typename Map::Loaded loaded[Map::kUnroll];
#pragma unroll
  for (uint32_t u = 0; u < Map::kUnroll; ++u) {
    const uint32_t i = u * kMapThreads + threadIdx.x;
    const uint32_t column = first_column + i;
    if (i < count) loaded[u] = map.load(first_row + column / row_vectors, column % row_vectors);
  }
#pragma unroll
  for (uint32_t u = 0; u < Map::kUnroll; ++u) {
    const uint32_t i = u * kMapThreads + threadIdx.x;
    const uint32_t column = first_column + i;
    if (i < count) map.store(first_row + column / row_vectors, column % row_vectors, loaded[u]);
  }
}

/// For all rows and all vectors of each: map.store(row, vector, map.load(row, vector)). A Map has
/// its pointers and sizes, says with kUnroll how many loads are made at once, and with Loaded what
/// they give. Rows must have fewer than 2^31 vectors.
template <typename Map>
void launch_map(const Map& map, const RowCount& rows, int64_t row_vectors, cudaStream_t stream) {
  if (rows.bound == 0 || row_vectors == 0) return;
  const int64_t blocks = divide_up(rows.bound * row_vectors, kMapThreads * Map::kUnroll);
  map_vectors<<<static_cast<unsigned>(blocks), kMapThreads, 0, stream>>>(
      map, rows, static_cast<uint32_t>(row_vectors));
  check(cudaGetLastError());
}

}  // namespace tessera::cuda
