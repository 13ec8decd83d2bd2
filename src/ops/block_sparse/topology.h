#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// Where the blocks of a block-sparse matrix are: the hybrid blocked-CSR-COO encoding with
/// transpose indices of MegaBlocks (Gale et al., 2022, sections 5.1.3 and 5.1.4, figure 5). All
/// indices count blocks.
///
/// CSR (`row_offsets`, `col_indices`, ascending within a row) walks the matrix by rows; COO
/// (`row_indices`) says which row a block stands in; `transpose_indices` lists the blocks in column
/// order (by column, then by row), those of column c from col_offsets[c] up to col_offsets[c + 1].
/// With them the matrix is walked transposed, values unmoved.
///
/// **Values** are kept in CSR order, [nnz, B, B] elements in all, the n blocks of a block-row side
/// by side as one row-major panel of B rows and n·B columns, at element row_offsets[row]·B². So
/// neighbours in a row are one wider matrix, and consecutive rows with equally many blocks one
/// taller matrix: what the experts of a layer consist of.
struct TopologyView {
  int64_t block_size = 0;
  std::span<const int32_t> row_offsets;        ///< [block rows + 1]
  std::span<const int32_t> col_indices;        ///< [nnz]
  std::span<const int32_t> row_indices;        ///< [nnz]
  std::span<const int32_t> col_offsets;        ///< [block columns + 1]
  std::span<const int32_t> transpose_indices;  ///< [nnz]

  int64_t num_block_rows() const { return static_cast<int64_t>(row_offsets.size()) - 1; }
  int64_t num_block_cols() const { return static_cast<int64_t>(col_offsets.size()) - 1; }
  int64_t num_blocks() const { return row_offsets.back(); }
  int64_t row_width(int64_t row) const { return row_offsets[row + 1] - row_offsets[row]; }
};

/// The same arrays to be written. Those of nnz entries may be longer than needed, and so may
/// `row_offsets`: the rows past the last one are empty.
struct TopologyArrays {
  std::span<int32_t> row_offsets;
  std::span<int32_t> col_indices;
  std::span<int32_t> row_indices;
  std::span<int32_t> col_offsets;
  std::span<int32_t> transpose_indices;
};

/// A topology that owns its arrays.
struct BlockTopology {
  int64_t block_size = 0;
  std::vector<int32_t> row_offsets;
  std::vector<int32_t> col_indices;
  std::vector<int32_t> row_indices;
  std::vector<int32_t> col_offsets;
  std::vector<int32_t> transpose_indices;

  TopologyView view() const;
};

/// Block sizes that the products support: 8, 16, 32, 64, 128.
bool is_supported_block_size(int64_t block_size);
/// Throws UserError that names the supported sizes.
void require_block_size(int64_t block_size);
/// Throws UserError that names the nearest valid size unless every expert's inner size is a
/// positive multiple of the block size.
void require_expert_sizes(std::span<const int64_t> expert_sizes, int64_t block_size);

/// The block-diagonal topology of a layer's experts: expert e has the rows from offsets[e] up to
/// offsets[e + 1] (element rows, multiples of the block size, offsets[0] = 0) and expert_sizes[e]
/// columns after those of the experts before it. Writes into `arrays` without allocating; returns
/// nnz.
int64_t build_expert_topology(std::span<const int64_t> offsets,
                              std::span<const int64_t> expert_sizes, int64_t block_size,
                              const TopologyArrays& arrays);
BlockTopology make_expert_topology(std::span<const int64_t> offsets,
                                   std::span<const int64_t> expert_sizes, int64_t block_size);

/// Any topology: mask[row · num_block_cols + col] says whether that block is there.
BlockTopology make_mask_topology(std::span<const uint8_t> mask, int64_t num_block_rows,
                                 int64_t num_block_cols, int64_t block_size);

}  // namespace tessera
