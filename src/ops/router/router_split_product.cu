// The router's products of BF16 x to the precision of F32 on the tensor cores. An F32 operand is
// split into BF16 terms, each the rounded rest of those before: three hold all 24 bits. Products of
// BF16 values are exact in F32, where they are added up. Terms whose product is below what the
// result keeps are left out.
#include "ops/cuda/check.h"
#include "ops/cuda/fragment_tile.cuh"
#include "ops/router/router_kernels.h"
#include "ops/router/router_products.h"

namespace tessera::cuda {
namespace {

using Value = __nv_bfloat16;

constexpr int kSplitThreads = 256;

template <typename C>
struct Product {
  FragmentOperand a;
  FragmentOperand b;
  C* c;
  int64_t row_stride;  // of c; either it or column_stride is 1
  int64_t column_stride;
  int64_t reduction;
  int64_t split;         // of the reduction, for each blockIdx.z
  int64_t split_stride;  // between their results
};

template <typename Tile, int kColumns, typename C>
__device__ __forceinline__ void write(const Product<C>& p, const float* result, int64_t row,
                                      int64_t column) {
  C* c = p.c + blockIdx.z * p.split_stride;
  if (p.column_stride == 1) {
    for (int at = threadIdx.x; at < kFragmentTileRows * kColumns / 4; at += Tile::kThreads) {
      const int i = at / (kColumns / 4);
      const int j = at % (kColumns / 4) * 4;
      if (row + i < p.a.rows && column + j < p.b.rows)
        store_four(c + (row + i) * p.row_stride + column + j,
                   *reinterpret_cast<const float4*>(result + i * Tile::kResultStride + j));
    }
    return;
  }
  for (int at = threadIdx.x; at < kFragmentTileRows * kColumns; at += Tile::kThreads) {
    const int i = at % kFragmentTileRows;
    const int j = at / kFragmentTileRows;
    if (row + i < p.a.rows && column + j < p.b.rows)
      c[row + i + (column + j) * p.column_stride] = result[i * Tile::kResultStride + j];
  }
}

template <typename Tile, int kColumns, typename C>
__global__ void __launch_bounds__(Tile::kThreads) multiply(const Product<C> p) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(memory);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kFragmentTileRows;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kColumns;
  const int64_t first = blockIdx.z * p.split;
  Tile tile;
  tile.add(shared, p.a, row, p.b, column, first, min(first + p.split, p.reduction));
  write<Tile, kColumns>(p, tile.finish(shared), row, column);
}

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

template <int kTermsA, bool kAReduction, int kTermsB, bool kBReduction, int kColumns, typename C>
void launch(const Product<C>& p, cudaStream_t stream) {
  using Tile = FragmentTile<kTermsA, kAReduction, kTermsB, kBReduction, kColumns>;
  const dim3 grid(static_cast<unsigned>(divide_up(p.a.rows, kFragmentTileRows)),
                  static_cast<unsigned>(divide_up(p.b.rows, kColumns)),
                  static_cast<unsigned>(divide_up(p.reduction, p.split)));
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  constexpr int kBytes = sizeof(typename Tile::Shared);
  const auto kernel = multiply<Tile, kColumns, C>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  kernel<<<grid, Tile::kThreads, kBytes, stream>>>(p);
}

template <int kTermsA, bool kAReduction, int kTermsB, bool kBReduction, typename C>
void launch_by_columns(const Product<C>& p, cudaStream_t stream) {
  const int columns = router_tile_columns(p.b.rows);
  if (columns == 16) return launch<kTermsA, kAReduction, kTermsB, kBReduction, 16>(p, stream);
  if (columns == 64) return launch<kTermsA, kAReduction, kTermsB, kBReduction, 64>(p, stream);
  launch<kTermsA, kAReduction, kTermsB, kBReduction, 128>(p, stream);
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
  launch<2, true, 2, false, 128>(
      Product<Value>{.a = {static_cast<const Value*>(grad_terms), s.num_tokens, s.num_experts,
                           s.num_tokens * s.num_experts},
                     .b = {static_cast<const Value*>(terms), s.hidden_size, s.hidden_size, plane},
                     .c = static_cast<Value*>(grad_x),
                     .row_stride = s.hidden_size,
                     .column_stride = 1,
                     .reduction = s.num_experts,
                     .split = s.num_experts,
                     .split_stride = 0},
      stream);
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
