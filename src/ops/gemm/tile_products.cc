#include "ops/gemm/tile_products.h"

#include <omp.h>

#include <algorithm>

#include "ops/gemm/gemm_block.h"
#include "ops/gemm/tile_permission.h"
#include "ops/gemm/tile_scratch.h"

namespace tessera {
namespace {

constexpr int64_t kFewestRows = 16;
constexpr int64_t kFewestColumns = 16;
constexpr int64_t kFewestInner = 32;
/// Blocks are multiples of this, which is what registers hold at once.
constexpr int64_t kStep = 32;
/// Blocks smaller than this take longer to pack than to multiply.
constexpr int64_t kLargeBlock = 128;
constexpr int64_t kMostColumns = 512;

int64_t count_blocks(int64_t m, int64_t n, const TileBlocks& blocks) {
  return ((m + blocks.rows - 1) / blocks.rows) * ((n + blocks.cols - 1) / blocks.cols);
}

int64_t halve(int64_t extent) {
  return (extent / 2 + kStep - 1) / kStep * kStep;
}

/// The summed dim of a slice, and the most that the sums of all slices may take: 16 MiB.
constexpr int64_t kSliceDepth = 1024;
constexpr int64_t kMostSums = int64_t{4} << 20;

void share_out_blocks(const Gemm& p, TileMultiply multiply) {
  const TileBlocks blocks = cut_for_tiles(p.m, p.n, omp_get_max_threads());
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
  for (int64_t row = 0; row < p.m; row += blocks.rows) {
    for (int64_t col = 0; col < p.n; col += blocks.cols) {
      multiply(part_of(p, {.row = row,
                           .col = col,
                           .rows = std::min(blocks.rows, p.m - row),
                           .cols = std::min(blocks.cols, p.n - col),
                           .inners = p.k}),
               tile_scratch());
    }
  }
}

/// C = or += the slices' sums, in their order.
void add_slices(const Gemm& p, const float* sums, int64_t num_slices) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < p.m; ++row) {
    float* c = static_cast<float*>(p.c) + row * p.ldc;
    for (int64_t slice = 0; slice < num_slices; ++slice) {
      const float* from = sums + (slice * p.m + row) * p.n;
      if (slice == 0 && !p.accumulate) {
        std::copy_n(from, p.n, c);
        continue;
      }
      for (int64_t col = 0; col < p.n; ++col) c[col] += from[col];
    }
  }
}

void share_out_slices(const Gemm& p, int64_t num_slices, TileMultiply multiply) {
  constexpr int64_t kSliceRows = 256;
  thread_local TileMemory memory;
  auto* sums = reinterpret_cast<float*>(memory.at_least(num_slices * p.m * p.n));
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
  for (int64_t slice = 0; slice < num_slices; ++slice) {
    for (int64_t row = 0; row < p.m; row += kSliceRows) {
      const int64_t first = p.k * slice / num_slices;
      Gemm part = part_of(p, {.row = row,
                              .inner = first,
                              .rows = std::min(kSliceRows, p.m - row),
                              .cols = p.n,
                              .inners = p.k * (slice + 1) / num_slices - first});
      part.c = sums + (slice * p.m + row) * p.n;
      part.ldc = p.n;
      part.accumulate = false;
      multiply(part, tile_scratch());
    }
  }
  add_slices(p, sums, num_slices);
}

}  // namespace

bool suits_tiles(const Gemm& p) {
  return p.input_type == DType::kBF16 && p.m >= kFewestRows && p.n >= kFewestColumns &&
         p.k >= kFewestInner && may_use_tiles();
}

int64_t count_tile_slices(const Gemm& p) {
  if (p.output_type != DType::kF32) return 1;
  const int64_t slices = p.k / kSliceDepth;
  // Where a result has this many elements, its blocks suffice.
  constexpr int64_t kLarge = int64_t{1} << 20;
  const int64_t elements = p.m * p.n;
  return elements >= kLarge
             ? 1
             : std::clamp<int64_t>(kMostSums / elements, 1, std::max<int64_t>(slices, 1));
}

void share_out_tiles(const Gemm& p, TileMultiply multiply) {
  if (omp_in_parallel() != 0 || omp_get_max_threads() == 1) return multiply(p, tile_scratch());
  const int64_t num_slices = count_tile_slices(p);
  if (num_slices > 1) return share_out_slices(p, num_slices, multiply);
  share_out_blocks(p, multiply);
}

void gemm_on_tiles(const Gemm& p) {
  share_out_tiles(p, multiply_on_tiles);
}

TileBlocks cut_for_tiles(int64_t m, int64_t n, int threads) {
  TileBlocks blocks{std::max<int64_t>(m, 1), std::clamp<int64_t>(n, 1, kMostColumns)};
  const auto cut_to = [&](int64_t count, int64_t smallest) {
    while (count_blocks(m, n, blocks) < count && std::max(blocks.rows, blocks.cols) > smallest) {
      int64_t& larger = blocks.rows >= blocks.cols ? blocks.rows : blocks.cols;
      larger = halve(larger);
    }
  };
  cut_to(2 * int64_t{threads}, kLargeBlock);
  cut_to(threads, kStep);
  return blocks;
}

}  // namespace tessera
