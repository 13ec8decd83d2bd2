#include "ops/block_sparse/topology.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace tessera {
namespace {

constexpr std::array<int64_t, 5> kBlockSizes = {8, 16, 32, 64, 128};

/// Fills column offsets and transpose indices from the CSR and COO parts: a counting sort by
/// column, stable in rows.
void index_transpose(int64_t num_blocks, const TopologyArrays& arrays) {
  const auto offsets = arrays.col_offsets;
  std::ranges::fill(offsets, 0);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const size_t col = arrays.col_indices[block];
    ++offsets[col + 1];
  }
  for (size_t col = 1; col < offsets.size(); ++col) offsets[col] += offsets[col - 1];
  for (int64_t block = 0; block < num_blocks; ++block) {
    const size_t col = arrays.col_indices[block];
    arrays.transpose_indices[offsets[col]++] = static_cast<int32_t>(block);
  }
  // Each offset has moved to its column's end, which is the start of the next.
  std::shift_right(offsets.begin(), offsets.end(), 1);
  offsets[0] = 0;
}

TopologyArrays arrays_of(BlockTopology& topology) {
  return {topology.row_offsets, topology.col_indices, topology.row_indices, topology.col_offsets,
          topology.transpose_indices};
}

BlockTopology allocate_topology(int64_t num_block_rows, int64_t num_block_cols, int64_t num_blocks,
                                int64_t block_size) {
  BlockTopology topology;
  topology.block_size = block_size;
  topology.row_offsets.resize(num_block_rows + 1);
  topology.col_offsets.resize(num_block_cols + 1);
  topology.col_indices.resize(num_blocks);
  topology.row_indices.resize(num_blocks);
  topology.transpose_indices.resize(num_blocks);
  return topology;
}

void check_offsets(std::span<const int64_t> offsets, size_t num_experts, int64_t block_size) {
  ensure(offsets.size() == num_experts + 1 && offsets[0] == 0,
         "expert offsets must be E + 1 = {} numbers from 0", num_experts + 1);
  for (size_t expert = 0; expert < num_experts; ++expert) {
    const int64_t num_rows = offsets[expert + 1] - offsets[expert];
    ensure(num_rows >= 0 && num_rows % block_size == 0,
           "expert {} has {} rows: the block-sparse path needs multiples of the block size {}",
           expert, num_rows, block_size);
  }
}

/// Appends one block-row with `num_cols` neighbouring blocks from `first_col`.
void append_row(int64_t row, int64_t first_col, int64_t num_cols, const TopologyArrays& arrays) {
  const int32_t start = arrays.row_offsets[row];
  for (int64_t i = 0; i < num_cols; ++i) {
    arrays.col_indices[start + i] = static_cast<int32_t>(first_col + i);
    arrays.row_indices[start + i] = static_cast<int32_t>(row);
  }
  arrays.row_offsets[row + 1] = static_cast<int32_t>(start + num_cols);
}

}  // namespace

TopologyView BlockTopology::view() const {
  return {block_size, row_offsets, col_indices, row_indices, col_offsets, transpose_indices};
}

bool is_supported_block_size(int64_t block_size) {
  return std::ranges::find(kBlockSizes, block_size) != kBlockSizes.end();
}

void require_block_size(int64_t block_size) {
  require(is_supported_block_size(block_size),
          "block size {} is not supported; use 8, 16, 32, 64 or 128", block_size);
}

void require_expert_sizes(std::span<const int64_t> expert_sizes, int64_t block_size) {
  for (size_t expert = 0; expert < expert_sizes.size(); ++expert) {
    const int64_t size = expert_sizes[expert];
    const int64_t nearest = std::max((size + block_size / 2) / block_size, int64_t{1}) * block_size;
    require(size > 0 && size % block_size == 0,
            "expert {} has inner size {}: the block-sparse path needs multiples of the block size "
            "{}; the nearest is {}",
            expert, size, block_size, nearest);
  }
}

int64_t build_expert_topology(std::span<const int64_t> offsets,
                              std::span<const int64_t> expert_sizes, int64_t block_size,
                              const TopologyArrays& arrays) {
  check_offsets(offsets, expert_sizes.size(), block_size);
  ensure(offsets.back() / block_size < static_cast<int64_t>(arrays.row_offsets.size()),
         "{} routed rows exceed the topology's bound of {}", offsets.back(),
         (static_cast<int64_t>(arrays.row_offsets.size()) - 1) * block_size);
  int64_t row = 0;
  int64_t first_col = 0;
  arrays.row_offsets[0] = 0;
  for (size_t expert = 0; expert < expert_sizes.size(); ++expert) {
    const int64_t num_cols = expert_sizes[expert] / block_size;
    for (; row < offsets[expert + 1] / block_size; ++row)
      append_row(row, first_col, num_cols, arrays);
    first_col += num_cols;
  }
  const int32_t num_blocks = arrays.row_offsets[row];
  std::fill(arrays.row_offsets.begin() + row, arrays.row_offsets.end(), num_blocks);
  index_transpose(num_blocks, arrays);
  return num_blocks;
}

BlockTopology make_expert_topology(std::span<const int64_t> offsets,
                                   std::span<const int64_t> expert_sizes, int64_t block_size) {
  int64_t num_cols = 0;
  int64_t num_blocks = 0;
  for (size_t expert = 0; expert < expert_sizes.size(); ++expert) {
    const int64_t cols = expert_sizes[expert] / block_size;
    num_cols += cols;
    num_blocks += cols * ((offsets[expert + 1] - offsets[expert]) / block_size);
  }
  BlockTopology topology =
      allocate_topology(offsets.back() / block_size, num_cols, num_blocks, block_size);
  build_expert_topology(offsets, expert_sizes, block_size, arrays_of(topology));
  return topology;
}

BlockTopology make_mask_topology(std::span<const uint8_t> mask, int64_t num_block_rows,
                                 int64_t num_block_cols, int64_t block_size) {
  ensure(static_cast<int64_t>(mask.size()) == num_block_rows * num_block_cols,
         "a mask of {} blocks for {} x {}", mask.size(), num_block_rows, num_block_cols);
  const int64_t num_blocks = std::ranges::count_if(mask, [](uint8_t there) { return there != 0; });
  BlockTopology topology =
      allocate_topology(num_block_rows, num_block_cols, num_blocks, block_size);
  size_t block = 0;
  for (int64_t row = 0; row < num_block_rows; ++row) {
    for (int64_t col = 0; col < num_block_cols; ++col) {
      if (mask[row * num_block_cols + col] == 0) continue;
      topology.col_indices[block] = static_cast<int32_t>(col);
      topology.row_indices[block++] = static_cast<int32_t>(row);
    }
    topology.row_offsets[row + 1] = static_cast<int32_t>(block);
  }
  index_transpose(num_blocks, arrays_of(topology));
  return topology;
}

}  // namespace tessera
