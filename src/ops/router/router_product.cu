// The router's three products in F32 on the ordinary cores, which keeps logits and their gradients
// exact to F32 whatever the GPU's tensor cores would round. BF16 x is widened as it is read.
//
// A block makes a tile of kTileRows by kColumns; tiles of both operands go through two buffers of
// shared memory, and a thread multiplies up to 8 by 8 of their values in registers.
#include <cuda_bf16.h>

#include "ops/router/router_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTileRows = 64;
constexpr int kDepth = 16;   // of the reduction, at a time
constexpr int kPadding = 4;  // keeps stores of transposed tiles off each other's banks
/// Blocks that a product is cut into at least, where its size allows it: some for every
/// multiprocessor of any Hopper GPU. The same on all, since it decides the order of sums.
constexpr int64_t kWantedBlocks = 288;
constexpr int64_t kLeastSplit = 512;  // tokens

template <typename T>
__device__ __forceinline__ float widen(T value) {
  return static_cast<float>(value);
}

__device__ __forceinline__ float4 load_four(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
__device__ __forceinline__ float4 load_four(const __nv_bfloat16* from) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  return {__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xFFFF0000U),
          __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xFFFF0000U)};
}

/// An operand, [rows, reduction] or, where its rows are contiguous, [reduction, rows].
template <typename T, bool kReductionContiguous>
struct Operand {
  const T* data;
  int64_t rows;
  int64_t stride;  // of the dim that is not contiguous
  bool vectors;    // four values can be read at once

  Operand(const T* from, int64_t num_rows, int64_t row_stride)
      : data(from),
        rows(num_rows),
        stride(row_stride),
        vectors(row_stride % 4 == 0 && reinterpret_cast<uintptr_t>(from) % (4 * sizeof(T)) == 0) {}

  /// Four neighbours, of which `count` are there.
  __device__ __forceinline__ float4 four(int64_t offset, int64_t count) const {
    if (count <= 0) return {0, 0, 0, 0};
    const T* from = data + offset;
    if (vectors && count >= 4) return load_four(from);
    return {widen(from[0]), count > 1 ? widen(from[1]) : 0.0F, count > 2 ? widen(from[2]) : 0.0F,
            count > 3 ? widen(from[3]) : 0.0F};
  }
};

/// A tile on its way from global to shared memory, where it lies [kDepth][kRows].
template <typename T, bool kReductionContiguous, int kRows>
struct Tile {
  static constexpr int kFours = kRows * kDepth / 4;
  static constexpr int kHeld = (kFours + kThreads - 1) / kThreads;
  using Shared = float[kDepth][kRows + kPadding];

  float4 held[kHeld];

  __device__ __forceinline__ void load(const Operand<T, kReductionContiguous>& from, int64_t row,
                                       int64_t step, int64_t last) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int four = i * kThreads + static_cast<int>(threadIdx.x);
      if (kFours % kThreads != 0 && four >= kFours) break;
      if (kReductionContiguous) {
        const int64_t r = row + four / (kDepth / 4);
        const int64_t k = step + four % (kDepth / 4) * 4;
        held[i] = from.four(r * from.stride + k, r < from.rows ? last - k : 0);
      } else {
        const int64_t k = step + four / (kRows / 4);
        const int64_t r = row + four % (kRows / 4) * 4;
        held[i] = from.four(k * from.stride + r, k < last ? from.rows - r : 0);
      }
    }
  }

  __device__ __forceinline__ void store(Shared& to) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int four = i * kThreads + static_cast<int>(threadIdx.x);
      if (kFours % kThreads != 0 && four >= kFours) break;
      if (kReductionContiguous) {
        const int r = four / (kDepth / 4);
        const int k = four % (kDepth / 4) * 4;
        to[k][r] = held[i].x;
        to[k + 1][r] = held[i].y;
        to[k + 2][r] = held[i].z;
        to[k + 3][r] = held[i].w;
      } else {
        *reinterpret_cast<float4*>(&to[four / (kRows / 4)][four % (kRows / 4) * 4]) = held[i];
      }
    }
  }
};

/// Which rows of a tile a thread multiplies: kEach, in fours that lie apart, so that neighbouring
/// threads read neighbouring fours.
template <int kRows, int kEach>
struct Share {
  static constexpr int kVector = kEach < 4 ? kEach : 4;
  static constexpr int kOwners = kRows / kEach;
  static_assert(kVector == 4 || kVector == 2);

  static __device__ __forceinline__ int row(int owner, int i) {
    return i / kVector * (kOwners * kVector) + owner * kVector + i % kVector;
  }
  static __device__ __forceinline__ void read(const float* tile, int owner, float (&to)[kEach]) {
#pragma unroll
    for (int i = 0; i < kEach; i += kVector) {
      const float* from = tile + row(owner, i);
      if constexpr (kVector == 4) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        to[i] = four.x;
        to[i + 1] = four.y;
        to[i + 2] = four.z;
        to[i + 3] = four.w;
      } else {
        const float2 two = *reinterpret_cast<const float2*>(from);
        to[i] = two.x;
        to[i + 1] = two.y;
      }
    }
  }
};

template <typename A, bool kAReduction, bool kBReduction, typename C>
struct Product {
  Operand<A, kAReduction> a;
  Operand<float, kBReduction> b;
  C* c;
  int64_t row_stride;
  int64_t column_stride;
  int64_t reduction;
  int64_t split;         // of the reduction, for each blockIdx.z
  int64_t split_stride;  // between their results
};

__device__ __forceinline__ void store_value(float* to, float value) {
  *to = value;
}
__device__ __forceinline__ void store_value(__nv_bfloat16* to, float value) {
  *to = __float2bfloat16_rn(value);
}

template <int kColumns, typename A, bool kAReduction, bool kBReduction, typename C>
__global__ void __launch_bounds__(kThreads)
    multiply(const Product<A, kAReduction, kBReduction, C> p) {
  constexpr int kEachRow = kColumns >= 64 ? 8 : 4;
  constexpr int kEachColumn = kTileRows * kColumns / kThreads / kEachRow;
  using Rows = Share<kTileRows, kEachRow>;
  using Columns = Share<kColumns, kEachColumn>;
  using TileA = Tile<A, kAReduction, kTileRows>;
  using TileB = Tile<float, kBReduction, kColumns>;
  __shared__ __align__(16) typename TileA::Shared shared_a[2];
  __shared__ __align__(16) typename TileB::Shared shared_b[2];

  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTileRows;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kColumns;
  const int64_t first = blockIdx.z * p.split;
  const int64_t last = min(first + p.split, p.reduction);
  const int column_owner = threadIdx.x % Columns::kOwners;
  const int row_owner = threadIdx.x / Columns::kOwners;

  TileA tile_a;
  TileB tile_b;
  tile_a.load(p.a, row, first, last);
  tile_b.load(p.b, column, first, last);
  tile_a.store(shared_a[0]);
  tile_b.store(shared_b[0]);
  __syncthreads();
  float sums[kEachRow][kEachColumn] = {};
  int buffer = 0;
  for (int64_t step = first; step < last; step += kDepth) {
    const bool more = step + kDepth < last;
    if (more) {
      tile_a.load(p.a, row, step + kDepth, last);
      tile_b.load(p.b, column, step + kDepth, last);
    }
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      float of_a[kEachRow], of_b[kEachColumn];
      Rows::read(shared_a[buffer][k], row_owner, of_a);
      Columns::read(shared_b[buffer][k], column_owner, of_b);
#pragma unroll
      for (int i = 0; i < kEachRow; ++i) {
#pragma unroll
        for (int j = 0; j < kEachColumn; ++j) sums[i][j] = fmaf(of_a[i], of_b[j], sums[i][j]);
      }
    }
    if (more) {
      tile_a.store(shared_a[buffer ^ 1]);
      tile_b.store(shared_b[buffer ^ 1]);
    }
    __syncthreads();
    buffer ^= 1;
  }

  C* c = p.c + blockIdx.z * p.split_stride;
#pragma unroll
  for (int i = 0; i < kEachRow; ++i) {
    const int64_t r = row + Rows::row(row_owner, i);
    if (r >= p.a.rows) continue;
#pragma unroll
    for (int j = 0; j < kEachColumn; ++j) {
      const int64_t n = column + Columns::row(column_owner, j);
      if (n < p.b.rows) store_value(c + r * p.row_stride + n * p.column_stride, sums[i][j]);
    }
  }
}

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

int columns_for(int64_t num_columns) {
  return num_columns <= 16 ? 16 : num_columns <= 64 ? 64 : 128;
}

template <int kColumns, typename P>
void launch_tiles(const P& product, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(divide_up(product.a.rows, kTileRows)),
                  static_cast<unsigned>(divide_up(product.b.rows, kColumns)),
                  static_cast<unsigned>(divide_up(product.reduction, product.split)));
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  multiply<kColumns><<<grid, kThreads, 0, stream>>>(product);
}

template <typename P>
void launch_by_columns(const P& product, cudaStream_t stream) {
  const int columns = columns_for(product.b.rows);
  if (columns == 16) return launch_tiles<16>(product, stream);
  if (columns == 64) return launch_tiles<64>(product, stream);
  launch_tiles<128>(product, stream);
}

template <typename T>
void multiply_logits(const RouterShape& s, const T* x, const float* weight, float* logits_TE,
                     cudaStream_t stream) {
  const Product<T, true, true, float> product{.a = {x, s.num_tokens, s.hidden_size},
                                              .b = {weight, s.num_experts, s.hidden_size},
                                              .c = logits_TE,
                                              .row_stride = s.num_experts,
                                              .column_stride = 1,
                                              .reduction = s.hidden_size,
                                              .split = s.hidden_size,
                                              .split_stride = 0};
  launch_by_columns(product, stream);
}

template <typename T>
void multiply_grad_x(const RouterShape& s, const float* grad_logits_TE, const float* weight,
                     T* grad_x, cudaStream_t stream) {
  const Product<float, true, false, T> product{.a = {grad_logits_TE, s.num_tokens, s.num_experts},
                                               .b = {weight, s.hidden_size, s.hidden_size},
                                               .c = grad_x,
                                               .row_stride = s.hidden_size,
                                               .column_stride = 1,
                                               .reduction = s.num_experts,
                                               .split = s.num_experts,
                                               .split_stride = 0};
  launch_tiles<128>(product, stream);
}

int64_t split_tokens(const RouterShape& s) {
  const int64_t split = divide_up(s.num_tokens, router_weight_splits(s));
  return divide_up(split, kDepth) * kDepth;
}

template <typename T>
void multiply_grad_weight(const RouterShape& s, const float* grad_logits_TE, const T* x,
                          float* partials, cudaStream_t stream) {
  const Product<T, false, false, float> product{.a = {x, s.hidden_size, s.hidden_size},
                                                .b = {grad_logits_TE, s.num_experts, s.num_experts},
                                                .c = partials,
                                                .row_stride = 1,
                                                .column_stride = s.hidden_size,
                                                .reduction = s.num_tokens,
                                                .split = split_tokens(s),
                                                .split_stride = s.num_experts * s.hidden_size};
  launch_by_columns(product, stream);
}

__global__ void __launch_bounds__(256)
    add_splits(const float* partials, int num_splits, int64_t count, float* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float sum = 0;
#pragma unroll 4
  for (int split = 0; split < num_splits; ++split) sum += partials[split * count + i];
  to[i] += sum;
}

}  // namespace

void launch_router_logits(const RouterShape& shape, const void* x, const float* weight,
                          float* logits_TE, cudaStream_t stream) {
  if (shape.bf16) {
    multiply_logits(shape, static_cast<const __nv_bfloat16*>(x), weight, logits_TE, stream);
  } else {
    multiply_logits(shape, static_cast<const float*>(x), weight, logits_TE, stream);
  }
}

void launch_router_grad_x(const RouterShape& shape, const float* grad_logits_TE,
                          const float* weight, void* grad_x, cudaStream_t stream) {
  if (shape.bf16) {
    multiply_grad_x(shape, grad_logits_TE, weight, static_cast<__nv_bfloat16*>(grad_x), stream);
  } else {
    multiply_grad_x(shape, grad_logits_TE, weight, static_cast<float*>(grad_x), stream);
  }
}

int router_weight_splits(const RouterShape& shape) {
  const int64_t tiles = divide_up(shape.hidden_size, kTileRows) *
                        divide_up(shape.num_experts, columns_for(shape.num_experts));
  const int64_t wanted = kWantedBlocks / (tiles > 0 ? tiles : 1);
  const int64_t most = divide_up(shape.num_tokens, kLeastSplit);
  const int64_t splits = wanted < most ? wanted : most;
  return static_cast<int>(splits < 1 ? 1 : splits);
}

void launch_router_grad_weight(const RouterShape& shape, const float* grad_logits_TE, const void* x,
                               float* partials, float* grad_weight_EH, cudaStream_t stream) {
  const int64_t count = shape.num_experts * shape.hidden_size;
  if (shape.num_tokens == 0 || count == 0) return;
  if (shape.bf16) {
    multiply_grad_weight(shape, grad_logits_TE, static_cast<const __nv_bfloat16*>(x), partials,
                         stream);
  } else {
    multiply_grad_weight(shape, grad_logits_TE, static_cast<const float*>(x), partials, stream);
  }
  // Rounding the splits up to whole steps may leave fewer of them.
  const auto num_splits = static_cast<int>(divide_up(shape.num_tokens, split_tokens(shape)));
  add_splits<<<static_cast<unsigned>(divide_up(count, 256)), 256, 0, stream>>>(
      partials, num_splits, count, grad_weight_EH);
}

}  // namespace tessera::cuda
