#pragma once

#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <span>

#include "core/memory.h"
#include "ops/attention/attention.h"
#include "ops/attention/tile.h"

/// How the attention kernels cut their work: a *block* is some neighbouring query positions of one
/// sequence with all query heads of one key-value head, a *key tile* some neighbouring keys of that
/// sequence. Row r of a block is position r / group, head r % group.
namespace tessera::attention {

inline constexpr int64_t kKeyTile = 128;    ///< keys; a multiple of the vector and of a word
inline constexpr int64_t kQueryRows = 192;  ///< aimed-at rows of a block

inline constexpr float kLog2E = std::numbers::log2e_v<float>;
inline constexpr float kLn2 = std::numbers::ln2_v<float>;

/// Extents of the tiles of one operator. `*_words` are widths of packed rows in words and
/// `*_columns` of F32 or row-interleaved ones, all padded to whole vectors.
template <typename Words>
struct TileSizes {
  explicit TileSizes(const AttentionOperator& op)
      : group(op.group_size()),
        positions(std::max<int64_t>(1, kQueryRows / group)),
        rows(tile::round_up(positions * group, 2)),
        head_size(op.spec().head_size),
        head_size_v(op.spec().head_size_v),
        head_words(tile::round_up(tile::words_for<Words>(head_size), tile::kLanes)),
        head_words_v(tile::round_up(tile::words_for<Words>(head_size_v), tile::kLanes)),
        head_columns(tile::round_up(head_size, tile::kLanes)),
        head_columns_v(tile::round_up(head_size_v, tile::kLanes)) {}

  int64_t group;
  int64_t positions;
  int64_t rows;
  int64_t head_size;
  int64_t head_size_v;
  int64_t head_words;
  int64_t head_words_v;
  int64_t head_columns;
  int64_t head_columns_v;
};

/// Hands out aligned pieces of a workspace; with a null base it only counts.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <typename T>
  T* take(int64_t count) {
    std::byte* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += align_up(count * static_cast<int64_t>(sizeof(T)));
    return reinterpret_cast<T*>(piece);
  }
  int64_t used() const { return used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

/// Query positions first_position to first_position + num_positions of a sequence whose first key
/// is row `first_key`; the first of them is row `first_query` of q.
struct QueryBlock {
  int64_t first_query = 0;
  int64_t first_position = 0;
  int64_t num_positions = 0;
  int64_t first_key = 0;

  int64_t end_position() const { return first_position + num_positions; }
};

/// Columns begin to end of a tile.
struct Columns {
  int64_t begin = 0;
  int64_t end = 0;
};

/// One block against the keys at positions key_begin to key_begin + key_count: who sees what.
struct TileMask {
  QueryBlock block;
  int64_t group = 1;
  int64_t window = 0;
  int64_t key_begin = 0;
  int64_t key_count = 0;

  int64_t num_rows() const { return block.num_positions * group; }
  int64_t position(int64_t row) const {
    return block.first_position + static_cast<uint32_t>(row) / static_cast<uint32_t>(group);
  }
  /// The keys that `row` sees, as columns of the tile; none for rows past the block's.
  Columns visible(int64_t row) const {
    if (row >= num_rows()) return {};
    const int64_t position = this->position(row);
    const int64_t end = std::clamp<int64_t>(position + 1 - key_begin, 0, key_count);
    const int64_t begin = window == 0 ? 0 : position - window + 1 - key_begin;
    return {std::clamp<int64_t>(begin, 0, end), end};
  }
  /// Columns after which no row before `end_row` sees anything.
  int64_t columns_before(int64_t end_row) const {
    const int64_t last = std::min(end_row, num_rows()) - 1;
    return std::clamp<int64_t>(position(last) + 1 - key_begin, 0, key_count);
  }
  /// The first row that sees column `key`, rounded down to a pair of rows.
  int64_t first_row(int64_t key) const {
    const int64_t ahead = std::max<int64_t>(0, key_begin + key - block.first_position);
    return std::min(ahead * group, num_rows()) / 2 * 2;
  }
  /// The row after the last that sees anything, rounded up to a pair of rows.
  int64_t end_row() const {
    if (window == 0) return tile::round_up(num_rows(), 2);
    const int64_t end = key_begin + key_count - 1 + window - block.first_position;
    return tile::round_up(std::clamp<int64_t>(end, 0, block.num_positions) * group, 2);
  }
};

/// Calls `visit(mask)` for each key tile that some row of the block sees, in ascending order. Tiles
/// begin at multiples of kKeyTile, so that a row's sums do not depend on its block.
template <typename Visit>
void for_each_key_tile(const QueryBlock& block, int64_t group, int64_t window, const Visit& visit) {
  int64_t begin = 0;
  if (window > 0) begin = std::max<int64_t>(0, block.first_position - window + 1);
  for (int64_t key = begin / kKeyTile * kKeyTile; key < block.end_position(); key += kKeyTile) {
    visit(TileMask{block, group, window, key, std::min(kKeyTile, block.end_position() - key)});
  }
}

/// Throws UserError unless `cu_seqlens` rises from 0 to `num_tokens`.
void check_cu_seqlens(const AttentionOperator& op, std::span<const int32_t> cu_seqlens,
                      int64_t num_tokens);

/// The most blocks that num_tokens tokens in num_seqs sequences can make.
int64_t max_blocks(int64_t num_tokens, int64_t num_seqs, int64_t positions);
/// Cuts `num_queries` positions from `first.first_position` on into blocks; returns how many.
int64_t cut_blocks(QueryBlock first, int64_t num_queries, int64_t positions, QueryBlock* blocks);

/// What is left of a workspace, in one part for each thread that runs.
struct ThreadScratch {
  std::byte* base = nullptr;
  int64_t bytes = 0;
  int num_threads = 1;

  ThreadScratch(std::span<std::byte> workspace, int64_t used, int64_t bytes_per_thread);
  std::byte* mine() const { return base + bytes * omp_get_thread_num(); }
};

}  // namespace tessera::attention
