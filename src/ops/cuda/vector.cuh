#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/divider.h"
#include "ops/cuda/rows.h"
#include "ops/cuda/short_kernel.cuh"

/// What memory-bound kernels share: accesses of 16 bytes with arithmetic in F32, sums over warps,
/// and the loop over all vectors of all rows.
namespace tessera::cuda {

using BFloat16 = __nv_bfloat16;

/// Elements of T in 16 bytes.
template <typename T>
constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(T));

/// Calls run.operator()<T>() for a storage type (core/dtype.h).
template <typename Run>
void with_type(DType dtype, Run run) {
  dtype == DType::kF32 ? run.template operator()<float>() : run.template operator()<BFloat16>();
}

/// Calls run.operator()<T, kWidth>() for the element type: with whole vectors, or else one element
/// at a time, for tensors whose rows or addresses are no multiples of 16 bytes.
template <typename Run>
void with_vectors(DType dtype, bool vectors, Run run) {
  with_type(dtype, [&]<typename T>() {
    vectors ? run.template operator()<T, kVectorWidth<T>>() : run.template operator()<T, 1>();
  });
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

/// The word that moves kBytes at once: left to itself the compiler splits some packs into pieces.
template <int kBytes>
struct WordOf {
  using Type = uint4;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<4> {
  using Type = uint32_t;
};
template <>
struct WordOf<2> {
  using Type = uint16_t;
};
template <>
struct WordOf<1> {
  using Type = uint8_t;
};

template <int kWidth, typename T>
__device__ __forceinline__ Pack<T, kWidth> load_pack(const T* from) {
  using Word = typename WordOf<sizeof(Pack<T, kWidth>)>::Type;
  Pack<T, kWidth> pack;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(Word)); ++i)
    reinterpret_cast<Word*>(&pack)[i] = reinterpret_cast<const Word*>(from)[i];
  return pack;
}

// load_pack_once and store_once: of what is not used again soon and may leave the cache first.
template <int kWidth, typename T>
__device__ __forceinline__ Pack<T, kWidth> load_pack_once(const T* from) {
  using Word = typename WordOf<sizeof(Pack<T, kWidth>)>::Type;
  Pack<T, kWidth> pack;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(Word)); ++i)
    reinterpret_cast<Word*>(&pack)[i] = __ldcs(reinterpret_cast<const Word*>(from) + i);
  return pack;
}

template <typename T, int kWidth>
__device__ __forceinline__ void store(T* to, const Pack<T, kWidth>& pack) {
  using Word = typename WordOf<sizeof(pack)>::Type;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(Word)); ++i)
    reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(&pack)[i];
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_once(T* to, const Pack<T, kWidth>& pack) {
  using Word = typename WordOf<sizeof(pack)>::Type;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack) / sizeof(Word)); ++i)
    __stcs(reinterpret_cast<Word*>(to) + i, reinterpret_cast<const Word*>(&pack)[i]);
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
  store(to, pack);
}
template <int kWidth>
__device__ __forceinline__ void store_once(float* to, const Floats<kWidth>& x) {
  Pack<float, kWidth> pack;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) pack.at[i] = x[i];
  store_once(to, pack);
}

/// Rounded to nearest even.
template <int kWidth>
__device__ __forceinline__ Pack<BFloat16, kWidth> to_bf16(const Floats<kWidth>& x) {
  Pack<BFloat16, kWidth> pack;
  if constexpr (kWidth == 1) {
    pack.at[0] = __float2bfloat16_rn(x[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2)
      reinterpret_cast<__nv_bfloat162*>(&pack)[i / 2] = __floats2bfloat162_rn(x[i], x[i + 1]);
  }
  return pack;
}
template <int kWidth>
__device__ __forceinline__ void store(BFloat16* to, const Floats<kWidth>& x) {
  store(to, to_bf16(x));
}
template <int kWidth>
__device__ __forceinline__ void store_once(BFloat16* to, const Floats<kWidth>& x) {
  store_once(to, to_bf16(x));
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
__global__ void __launch_bounds__(kMapThreads, Map::kBlocks)
    map_vectors(const __grid_constant__ Map map, RowCount rows, int64_t first_row,
                Divider row_vectors) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int64_t end = (rows.in_use() - first_row) * row_vectors.divisor();
  const uint32_t first = blockIdx.x * (kMapThreads * Map::kUnroll) + threadIdx.x;
  typename Map::Loaded loaded[Map::kUnroll];
#pragma unroll
  for (uint32_t u = 0; u < Map::kUnroll; ++u) {
    const uint32_t i = first + u * kMapThreads;
    const uint32_t row = row_vectors.quotient(i);
    if (i < end) loaded[u] = map.load(first_row + row, i - row * row_vectors.divisor());
  }
#pragma unroll
  for (uint32_t u = 0; u < Map::kUnroll; ++u) {
    const uint32_t i = first + u * kMapThreads;
    const uint32_t row = row_vectors.quotient(i);
    if (i < end) map.store(first_row + row, i - row * row_vectors.divisor(), loaded[u]);
  }
}

/// For all rows and all vectors of each: map.store(row, vector, map.load(row, vector)). A Map has
/// its pointers and sizes, says with kUnroll how many loads are made at once and with kBlocks how
/// many blocks of an SM its registers must leave room for, and with Loaded what loads
/// give. Rows must have fewer than 2^30 vectors.
template <typename Map>
void launch_map(const Map& map, const RowCount& rows, int64_t row_vectors, cudaStream_t stream) {
  if (rows.bound == 0 || row_vectors == 0) return;
  if (row_vectors > int64_t{1} << 30) check(cudaErrorInvalidValue);
  const int64_t slice = (int64_t{1} << 30) / row_vectors;  // rows whose vectors 32 bits count
  for (int64_t first = 0; first < rows.bound; first += slice) {
    const int64_t count = std::min(slice, rows.bound - first);
    const int64_t blocks = divide_up(count * row_vectors, kMapThreads * Map::kUnroll);
    launch_early(map_vectors<Map>, {static_cast<unsigned>(blocks), kMapThreads}, stream, map,
                 RowCount{first + count, rows.extent, rows.scale}, first,
                 Divider(static_cast<uint32_t>(row_vectors)));
  }
}

}  // namespace tessera::cuda
