// The router's products in F32 on the ordinary cores, for any shape.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/short_kernel.cuh"
#include "ops/cuda/tile/exact_product.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/router/router_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = kExactThreads;
constexpr int kTileRows = kExactRows;
/// Blocks that a product is cut into at least, where its size allows it: some for every
/// SM of any Hopper GPU. The same on all, since it decides the order of sums.
constexpr int64_t kWantedBlocks = 288;
constexpr int64_t kLeastSplit = 512;  // tokens
constexpr int64_t kSplitStep = 128;   // tokens, a multiple of what any tile takes at once

template <typename A, bool kAReduction, bool kBReduction, typename C>
struct Product {
  ExactOperand<A, kAReduction> a;
  ExactOperand<float, kBReduction> b;
  C* c;
  int64_t row_stride;
  int64_t column_stride;
  int64_t reduction;
  int64_t split;         // of the reduction, for each blockIdx.z
  int64_t split_stride;  // between their results
  const C* addend;       // null: zero
};

template <int kColumns, typename A, bool kAReduction, bool kBReduction, typename C>
__global__ void __launch_bounds__(kThreads)
    multiply(const Product<A, kAReduction, kBReduction, C> p) {
  wait_for_earlier();
  let_next_begin_if_short();
  using Tile = ExactTile<ExactOperand<A, kAReduction>, ExactOperand<float, kBReduction>, kColumns>;
  __shared__ typename Tile::Shared shared;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTileRows;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kColumns;
  const int64_t first = blockIdx.z * p.split;
  Tile tile;
  tile.add(shared, p.a, row, p.b, column, first, min(first + p.split, p.reduction));
  C* c = p.c + blockIdx.z * p.split_stride;
  tile.for_each([&](int i, int j, float sum) {
    if (row + i >= p.a.rows || column + j >= p.b.rows) return;
    const int64_t at = (row + i) * p.row_stride + (column + j) * p.column_stride;
    if (p.addend != nullptr) sum += static_cast<float>(p.addend[at]);
    store_value(c + at, sum);
  });
}

constexpr int router_tile_columns(int64_t num_columns) {
  return num_columns <= 16 ? 16 : num_columns <= 64 ? 64 : 128;
}

template <int kColumns, typename A, bool kAReduction, bool kBReduction, typename C>
void launch_tiles(const Product<A, kAReduction, kBReduction, C>& product, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(divide_up(product.a.rows, kTileRows)),
                  static_cast<unsigned>(divide_up(product.b.rows, kColumns)),
                  static_cast<unsigned>(divide_up(product.reduction, product.split)));
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  launch_early(multiply<kColumns, A, kAReduction, kBReduction, C>, {grid, kThreads}, stream,
               product);
}

template <typename P>
void launch_by_columns(const P& product, cudaStream_t stream) {
  const int columns = router_tile_columns(product.b.rows);
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
                                              .split_stride = 0,
                                              .addend = nullptr};
  launch_by_columns(product, stream);
}

template <typename T>
void multiply_grad_x(const RouterProductGrads& p, cudaStream_t stream) {
  const RouterShape& s = p.shape;
  const Product<float, true, false, T> product{.a = {p.grad_logits_TE, s.num_tokens, s.num_experts},
                                               .b = {p.weight, s.hidden_size, s.hidden_size},
                                               .c = static_cast<T*>(p.grad_x),
                                               .row_stride = s.hidden_size,
                                               .column_stride = 1,
                                               .reduction = s.num_experts,
                                               .split = s.num_experts,
                                               .split_stride = 0,
                                               .addend = static_cast<const T*>(p.addend)};
  launch_tiles<128>(product, stream);
}

int64_t split_tokens(const RouterShape& s) {
  const int64_t split = divide_up(s.num_tokens, router_weight_splits(s));
  return divide_up(split, kSplitStep) * kSplitStep;
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
                                                .split_stride = s.num_experts * s.hidden_size,
                                                .addend = nullptr};
  launch_by_columns(product, stream);
}

__global__ void __launch_bounds__(256)
    add_splits(const float* partials, int num_splits, int64_t count, Accumulator to) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float sum = 0;
#pragma unroll 4
  for (int split = 0; split < num_splits; ++split) sum += partials[split * count + i];
  to.sums[i] = to.sets ? sum : to.sums[i] + sum;
}

}  // namespace

int router_weight_splits(const RouterShape& shape) {
  const int64_t tiles = divide_up(shape.hidden_size, kTileRows) *
                        divide_up(shape.num_experts, router_tile_columns(shape.num_experts));
  const int64_t wanted = kWantedBlocks / (tiles > 0 ? tiles : 1);
  const int64_t most = divide_up(shape.num_tokens, kLeastSplit);
  const int64_t splits = wanted < most ? wanted : most;
  return static_cast<int>(splits < 1 ? 1 : splits);
}

void launch_add_splits(const RouterShape& s, const float* partials, int num_splits,
                       Accumulator grad_weight_EH, cudaStream_t stream) {
  const int64_t count = s.num_experts * s.hidden_size;
  if (count == 0) return;
  launch_early(add_splits, {static_cast<unsigned>(divide_up(count, 256)), 256}, stream, partials,
               num_splits, count, grad_weight_EH);
}

void launch_router_logits(const RouterLogits& p, cudaStream_t stream) {
  with_type(p.shape.dtype, [&]<typename T>() {
    multiply_logits(p.shape, static_cast<const T*>(p.x), p.weight, p.logits_TE, stream);
  });
}

void launch_router_product_grads(const RouterProductGrads& p, cudaStream_t stream) {
  const RouterShape& s = p.shape;
  if (s.num_tokens == 0 || s.num_experts * s.hidden_size == 0) return;
  if (p.grad_weight_EH.sums != nullptr) {
    with_type(s.dtype, [&]<typename T>() {
      multiply_grad_weight(s, p.grad_logits_TE, static_cast<const T*>(p.x), p.partials, stream);
    });
    // Rounding the splits up to whole steps may leave fewer of them.
    launch_add_splits(s, p.partials, static_cast<int>(divide_up(s.num_tokens, split_tokens(s))),
                      p.grad_weight_EH, stream);
  }
  if (p.grad_x == nullptr) return;
  with_type(s.dtype, [&]<typename T>() { multiply_grad_x<T>(p, stream); });
}

}  // namespace tessera::cuda
