#include <omp.h>

#include <algorithm>

#include "ops/gemm/row_products.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

using simd::kLanes;
using simd::Vec;

/// A block's columns of B stay in the second cache while all rows of the block meet them.
constexpr int64_t kBlockRows = 64;
constexpr int64_t kBlockCols = 64;
constexpr int kTileRows = 4;
/// Columns, or vectors of columns, of a tile: its sums stay in registers.
constexpr int kTileCols = kLanes == 16 ? 4 : 2;

/// What tiles of one product share. `b` is [n, k] for dot products, else [k, n].
template <typename T>
struct RowProduct {
  const Gemm& p;
  const T* a;
  const T* b;

  void store(int64_t row, int64_t col, float sum) const {
    const int64_t idx = row * p.ldc + col;
    if (p.output_type == DType::kBF16) {
      static_cast<Bf16*>(p.c)[idx] = Bf16(sum);
    } else if (float& to = static_cast<float*>(p.c)[idx]; p.accumulate) {
      to += sum;
    } else {
      to = sum;
    }
  }
};

/// C of kRows rows and kCols columns by dot products: lanes share out k, whatever the tile.
template <int kRows, int kCols, typename T>
void dot_tile(const RowProduct<T>& x, int64_t row, int64_t col) {
  Vec sums[kRows][kCols] = {};
  const T* a = x.a + row * x.p.lda;
  const T* b = x.b + col * x.p.ldb;
  simd::for_each_vector(x.p.k, [&](int64_t k, auto lanes) {
    Vec columns[kCols];
#pragma GCC unroll 8
    for (int j = 0; j < kCols; ++j) columns[j] = simd::load(b + j * x.p.ldb + k, lanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec own = simd::load(a + i * x.p.lda + k, lanes);
#pragma GCC unroll 8
      for (int j = 0; j < kCols; ++j) sums[i][j] += own * columns[j];
    }
  });
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kCols; ++j) x.store(row + i, col + j, simd::sum(sums[i][j]));
  }
}

/// C of kRows rows and kVectors vectors of columns, the last of which may be a part: each lane adds
/// up k in order.
template <int kRows, int kVectors, typename T, typename Lanes>
void column_tile(const RowProduct<T>& x, int64_t row, int64_t col, Lanes lanes, int64_t count) {
  Vec sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < x.p.k; ++k) {
    const T* b = x.b + k * x.p.ldb + col;
    Vec columns[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) columns[j] = simd::load(b + j * kLanes, lanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec own = simd::broadcast(static_cast<float>(x.a[(row + i) * x.p.lda + k]));
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sums[i][j] += own * columns[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    for (int64_t j = 0; j < count; ++j) x.store(row + i, col + j, sums[i][j / kLanes][j % kLanes]);
  }
}

template <int kRows, typename T>
void run_rows(const RowProduct<T>& x, int64_t row, int64_t col, int64_t end) {
  if (x.p.transpose_b) {
    for (; col + kTileCols <= end; col += kTileCols) dot_tile<kRows, kTileCols>(x, row, col);
    for (; col < end; ++col) dot_tile<kRows, 1>(x, row, col);
    return;
  }
  constexpr int64_t kWide = kTileCols * kLanes;
  for (; col + kWide <= end; col += kWide)
    column_tile<kRows, kTileCols>(x, row, col, simd::Whole{}, kWide);
  for (; col + kLanes <= end; col += kLanes)
    column_tile<kRows, 1>(x, row, col, simd::Whole{}, kLanes);
  if (col < end) column_tile<kRows, 1>(x, row, col, simd::Part{end - col}, end - col);
}

template <typename T>
void run_block(const RowProduct<T>& x, int64_t row, int64_t col) {
  const int64_t end_row = std::min(row + kBlockRows, x.p.m);
  const int64_t end_col = std::min(col + kBlockCols, x.p.n);
  for (; row + kTileRows <= end_row; row += kTileRows) run_rows<kTileRows>(x, row, col, end_col);
  for (; row < end_row; ++row) run_rows<1>(x, row, col, end_col);
}

template <typename T>
void run_product_of_rows(const Gemm& p) {
  const RowProduct<T> product{p, static_cast<const T*>(p.a), static_cast<const T*>(p.b)};
  const bool alone = omp_in_parallel() == 0 && (p.m > kBlockRows || p.n > kBlockCols);
#pragma omp parallel for collapse(2) schedule(static) if (alone)
  for (int64_t row = 0; row < p.m; row += kBlockRows) {
    for (int64_t col = 0; col < p.n; col += kBlockCols) run_block(product, row, col);
  }
}

}  // namespace

TESSERA_LEVELED(void, gemm_of_rows, (const Gemm& product), (product)) {
  ensure(!product.transpose_a, "gemm_of_rows: a transposed A");
  if (product.input_type == DType::kF32) return run_product_of_rows<float>(product);
  run_product_of_rows<Bf16>(product);
}

}  // namespace tessera
