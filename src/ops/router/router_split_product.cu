// The router's products of BF16 x to the precision of F32 on the tensor cores. An F32 operand is
// split into BF16 terms, each the rounded rest of those before: three hold all 24 bits. Products of
// BF16 values are exact in F32, where they are added up. Terms whose product is below what the
// result keeps are left out.
#include <mma.h>

#include <type_traits>

#include "ops/router/router_kernels.h"
#include "ops/router/router_products.h"

namespace tessera::cuda {
namespace {

using Value = __nv_bfloat16;

constexpr int kTileRows = 64;
constexpr int kStages = 3;
constexpr int kSplitThreads = 256;

/// Terms of an operand, [rows, reduction] each or, where its rows are contiguous, [reduction,
/// rows]; contiguous dims are multiples of 8.
struct Terms {
  const Value* data;
  int64_t rows;
  int64_t stride;  // of the dim that is not contiguous
  int64_t plane;   // between terms
};

template <typename C>
struct Product {
  Terms a;
  Terms b;
  C* c;
  int64_t row_stride;  // of c; either it or column_stride is 1
  int64_t column_stride;
  int64_t reduction;
  int64_t split;         // of the reduction, for each blockIdx.z
  int64_t split_stride;  // between their results
};

__device__ __forceinline__ void copy_vector(void* to, const void* from, bool there) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

/// An operand's tile in shared memory, padded so that rows begin in different banks.
template <int kTerms, bool kReductionContiguous, int kRows, int kDepth, int kThreads>
struct Tile {
  static constexpr int kLength = kReductionContiguous ? kDepth : kRows;
  static constexpr int kLines = kReductionContiguous ? kRows : kDepth;
  static constexpr int kStride = kLength + 8;
  static constexpr int kPlane = kLines * kStride;
  static constexpr int kVectors = kLines * kLength / 8;

  Value values[kTerms * kPlane];

  __device__ __forceinline__ void load(const Terms& from, int64_t row, int64_t step, int64_t last) {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      for (int i = threadIdx.x; i < kVectors; i += kThreads) {
        const int line = i / (kLength / 8);
        const int at = i % (kLength / 8) * 8;
        const int64_t r = row + (kReductionContiguous ? line : at);
        const int64_t k = step + (kReductionContiguous ? at : line);
        const bool there = r < from.rows && k < last;
        const int64_t offset = kReductionContiguous ? r * from.stride + k : k * from.stride + r;
        copy_vector(values + term * kPlane + line * kStride + at,
                    from.data + (there ? term * from.plane + offset : 0), there);
      }
    }
  }
  __device__ __forceinline__ const Value* at(int term, int row, int k) const {
    return values + term * kPlane + (kReductionContiguous ? row * kStride + k : k * kStride + row);
  }
};

/// How the warps of a block share a tile of kTileRows by kColumns, and how deep its stages are: the
/// fewer the columns, the more of the rows must be under way.
template <int kColumns>
struct Plan;
template <>
struct Plan<128> {
  static constexpr int kWarpRows = 2, kWarpColumns = 4, kDepth = 32;
};
template <>
struct Plan<64> {
  static constexpr int kWarpRows = 4, kWarpColumns = 2, kDepth = 64;
};
template <>
struct Plan<16> {
  static constexpr int kWarpRows = 4, kWarpColumns = 1, kDepth = 128;
};

__device__ __forceinline__ void store_four(float* to, const float4& from) {
  *reinterpret_cast<float4*>(to) = from;
}
__device__ __forceinline__ void store_four(Value* to, const float4& from) {
  __nv_bfloat162 halves[2] = {__floats2bfloat162_rn(from.x, from.y),
                              __floats2bfloat162_rn(from.z, from.w)};
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(halves);
}

template <int kTermsA, bool kAReduction, int kTermsB, bool kBReduction, int kColumns, typename C>
struct Kernel {
  using P = Plan<kColumns>;
  static constexpr int kThreads = P::kWarpRows * P::kWarpColumns * 32;
  static constexpr int kDepth = P::kDepth;
  static constexpr int kFragmentRows = kTileRows / P::kWarpRows / 16;
  static constexpr int kFragmentColumns = kColumns / P::kWarpColumns / 16;
  static constexpr int kTerms = kTermsA > kTermsB ? kTermsA : kTermsB;
  static constexpr int kResultStride = kColumns + 4;
  using TileA = Tile<kTermsA, kAReduction, kTileRows, kDepth, kThreads>;
  using TileB = Tile<kTermsB, kBReduction, kColumns, kDepth, kThreads>;
  struct Stage {
    alignas(128) TileA a;
    alignas(128) TileB b;
  };
  union Shared {
    Stage stages[kStages];
    float result[kTileRows * kResultStride];
  };
  using LayoutA = std::conditional_t<kAReduction, nvcuda::wmma::row_major, nvcuda::wmma::col_major>;
  using LayoutB = std::conditional_t<kBReduction, nvcuda::wmma::col_major, nvcuda::wmma::row_major>;
  using FragmentA = nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, Value, LayoutA>;
  using FragmentB = nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, Value, LayoutB>;
  using Sums = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>;

  Sums sums[kFragmentRows][kFragmentColumns];

  static __device__ __forceinline__ int warp_row() {
    return static_cast<int>(threadIdx.x / 32) / P::kWarpColumns * kFragmentRows * 16;
  }
  static __device__ __forceinline__ int warp_column() {
    return static_cast<int>(threadIdx.x / 32) % P::kWarpColumns * kFragmentColumns * 16;
  }

  __device__ __forceinline__ void multiply(const Stage& stage) {
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      FragmentA a[kTermsA][kFragmentRows];
#pragma unroll
      for (int term = 0; term < kTermsA; ++term) {
#pragma unroll
        for (int i = 0; i < kFragmentRows; ++i)
          nvcuda::wmma::load_matrix_sync(a[term][i], stage.a.at(term, warp_row() + i * 16, k),
                                         TileA::kStride);
      }
#pragma unroll
      for (int j = 0; j < kFragmentColumns; ++j) {
#pragma unroll
        for (int term = 0; term < kTermsB; ++term) {
          FragmentB b;
          nvcuda::wmma::load_matrix_sync(b, stage.b.at(term, warp_column() + j * 16, k),
                                         TileB::kStride);
#pragma unroll
          for (int of_a = 0; of_a < kTermsA && of_a + term < kTerms; ++of_a) {
#pragma unroll
            for (int i = 0; i < kFragmentRows; ++i)
              nvcuda::wmma::mma_sync(sums[i][j], a[of_a][i], b, sums[i][j]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void write(const Product<C>& p, float* result, int64_t row,
                                        int64_t column) const {
    C* c = p.c + blockIdx.z * p.split_stride;
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentColumns; ++j)
        nvcuda::wmma::store_matrix_sync(
            result + (warp_row() + i * 16) * kResultStride + warp_column() + j * 16, sums[i][j],
            kResultStride, nvcuda::wmma::mem_row_major);
    }
    __syncthreads();
    if (p.column_stride == 1) {
      for (int at = threadIdx.x; at < kTileRows * kColumns / 4; at += kThreads) {
        const int i = at / (kColumns / 4);
        const int j = at % (kColumns / 4) * 4;
        if (row + i < p.a.rows && column + j < p.b.rows)
          store_four(c + (row + i) * p.row_stride + column + j,
                     *reinterpret_cast<const float4*>(result + i * kResultStride + j));
      }
      return;
    }
    for (int at = threadIdx.x; at < kTileRows * kColumns; at += kThreads) {
      const int i = at % kTileRows;
      const int j = at / kTileRows;
      if (row + i < p.a.rows && column + j < p.b.rows)
        c[row + i + (column + j) * p.column_stride] = result[i * kResultStride + j];
    }
  }

  __device__ __forceinline__ void run(const Product<C>& p, Shared& shared) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kTileRows;
    const int64_t column = static_cast<int64_t>(blockIdx.y) * kColumns;
    const int64_t first = blockIdx.z * p.split;
    const int64_t last = min(first + p.split, p.reduction);
    const auto load = [&](int64_t step, int stage) {
      if (step < last) {
        shared.stages[stage].a.load(p.a, row, step, last);
        shared.stages[stage].b.load(p.b, column, step, last);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentColumns; ++j) nvcuda::wmma::fill_fragment(sums[i][j], 0.0F);
    }
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) load(first + stage * kDepth, stage);
    int stage = 0;
    for (int64_t step = first; step < last; step += kDepth) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
      __syncthreads();
      load(step + (kStages - 1) * kDepth, (stage + kStages - 1) % kStages);
      multiply(shared.stages[stage]);
      stage = (stage + 1) % kStages;
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    write(p, shared.result, row, column);
  }
};

template <typename K, typename C>
__global__ void __launch_bounds__(K::kThreads) multiply(const Product<C> p) {
  extern __shared__ __align__(128) unsigned char memory[];
  K kernel;
  kernel.run(p, *reinterpret_cast<typename K::Shared*>(memory));
}

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

template <typename K, typename C>
void launch(const Product<C>& p, int columns, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(divide_up(p.a.rows, kTileRows)),
                  static_cast<unsigned>(divide_up(p.b.rows, columns)),
                  static_cast<unsigned>(divide_up(p.reduction, p.split)));
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  constexpr int kBytes = sizeof(typename K::Shared);
  cudaFuncSetAttribute(multiply<K, C>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  multiply<K><<<grid, K::kThreads, kBytes, stream>>>(p);
}

template <int kTermsA, bool kAReduction, int kTermsB, bool kBReduction, typename C>
void launch_by_columns(const Product<C>& p, cudaStream_t stream) {
  const int columns = router_tile_columns(p.b.rows);
  if (columns == 16)
    return launch<Kernel<kTermsA, kAReduction, kTermsB, kBReduction, 16, C>>(p, 16, stream);
  if (columns == 64)
    return launch<Kernel<kTermsA, kAReduction, kTermsB, kBReduction, 64, C>>(p, 64, stream);
  launch<Kernel<kTermsA, kAReduction, kTermsB, kBReduction, 128, C>>(p, 128, stream);
}

/// Each value's terms; the rest of one that is not finite is none.
template <int kTerms>
__global__ void __launch_bounds__(kSplitThreads)
    split(const float* from, int64_t count, Value* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kSplitThreads + threadIdx.x;
  if (i >= count) return;
  float rest = from[i];
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    const Value rounded = __float2bfloat16_rn(rest);
    to[term * count + i] = rounded;
    const auto value = static_cast<float>(rounded);
    rest = isfinite(value) ? rest - value : 0.0F;
  }
}

template <int kTerms>
void launch_split(const float* from, int64_t count, void* to, cudaStream_t stream) {
  if (count == 0) return;
  split<kTerms>
      <<<static_cast<unsigned>(divide_up(count, kSplitThreads)), kSplitThreads, 0, stream>>>(
          from, count, static_cast<Value*>(to));
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace

bool can_split_router(const RouterShape& s, const void* x) {
  return s.bf16 && s.hidden_size % 8 == 0 && s.num_experts % 8 == 0 && is_aligned(x);
}

void split_router_logits(const RouterShape& s, const void* x, const float* weight, void* terms,
                         float* logits_TE, cudaStream_t stream) {
  const int64_t plane = s.num_experts * s.hidden_size;
  launch_split<3>(weight, plane, terms, stream);
  launch_by_columns<1, true, 3, true>(
      Product<float>{.a = {static_cast<const Value*>(x), s.num_tokens, s.hidden_size, 0},
                     .b = {static_cast<const Value*>(terms), s.num_experts, s.hidden_size, plane},
                     .c = logits_TE,
                     .row_stride = s.num_experts,
                     .column_stride = 1,
                     .reduction = s.hidden_size,
                     .split = s.hidden_size,
                     .split_stride = 0},
      stream);
}

void split_grad_logits(const RouterShape& s, const float* grad_logits_TE, void* grad_terms,
                       cudaStream_t stream) {
  launch_split<3>(grad_logits_TE, s.num_tokens * s.num_experts, grad_terms, stream);
}

void split_router_grad_x(const RouterShape& s, const void* grad_terms, const float* weight,
                         void* terms, void* grad_x, cudaStream_t stream) {
  const int64_t plane = s.num_experts * s.hidden_size;
  launch_split<2>(weight, plane, terms, stream);
  launch<Kernel<2, true, 2, false, 128, Value>>(
      Product<Value>{.a = {static_cast<const Value*>(grad_terms), s.num_tokens, s.num_experts,
                           s.num_tokens * s.num_experts},
                     .b = {static_cast<const Value*>(terms), s.hidden_size, s.hidden_size, plane},
                     .c = static_cast<Value*>(grad_x),
                     .row_stride = s.hidden_size,
                     .column_stride = 1,
                     .reduction = s.num_experts,
                     .split = s.num_experts,
                     .split_stride = 0},
      128, stream);
}

void split_router_grad_weight(const RouterShape& s, const void* grad_terms, const void* x,
                              float* partials, int64_t split_tokens, cudaStream_t stream) {
  launch_by_columns<1, false, 3, false>(
      Product<float>{.a = {static_cast<const Value*>(x), s.hidden_size, s.hidden_size, 0},
                     .b = {static_cast<const Value*>(grad_terms), s.num_experts, s.num_experts,
                           s.num_tokens * s.num_experts},
                     .c = partials,
                     .row_stride = 1,
                     .column_stride = s.hidden_size,
                     .reduction = s.num_tokens,
                     .split = split_tokens,
                     .split_stride = s.num_experts * s.hidden_size},
      stream);
}

}  // namespace tessera::cuda
