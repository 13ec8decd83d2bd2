#pragma once

#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <span>

#include "core/memory.h"
#include "core/slice.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_kernels.h"
#include "ops/attention/tile.h"

/// How the attention kernels cut their work: a *block* is some neighbouring query positions of one
/// sequence with all query heads of one key-value head, a *key tile* some neighbouring keys of that
/// sequence. Row r of a block is position r / group, head r % group. Positions count from the
/// sequence's first token, wherever its tokens lie: a rank of a ring has pieces of it in hand.
namespace tessera::attention {
inline namespace TESSERA_CPU_LEVEL {

inline constexpr int64_t kKeyTile = 128;    ///< keys; a multiple of the vector and of a word
inline constexpr int64_t kQueryRows = 192;  ///< aimed-at rows of a block

/// Query positions of a whole block.
inline int64_t block_positions(const AttentionOperator& op) {
  return std::max<int64_t>(1, kQueryRows / op.group_size());
}

inline constexpr float kLog2E = std::numbers::log2e_v<float>;
inline constexpr float kLn2 = std::numbers::ln2_v<float>;

/// Extents of the tiles of one operator. `*_words` are widths of packed rows in words and
/// `*_columns` of F32 or row-interleaved ones, all padded to whole vectors.
template <typename Words>
struct TileSizes {
  explicit TileSizes(const AttentionOperator& op)
      : group(op.group_size()),
        positions(block_positions(op)),
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

/// Neighbouring tokens of one sequence: position p of it, begin <= p < end, is row `row_of_zero` +
/// p of the tensor in hand. Position 0 need not be there, so row_of_zero may be negative.
struct TokenSpan {
  int64_t sequence = 0;
  int64_t row_of_zero = 0;
  int64_t begin = 0;
  int64_t end = 0;

  int64_t first_row() const { return row_of_zero + begin; }
  int64_t count() const { return end - begin; }
};

/// Query positions first_position to first_position + num_positions of a sequence; the first of
/// them is row `first_query` of q.
struct QueryBlock {
  int64_t sequence = 0;
  int64_t first_query = 0;
  int64_t first_position = 0;
  int64_t num_positions = 0;

  int64_t end_position() const { return first_position + num_positions; }
  /// Whether any of its positions sees a key at `begin` to `end`.
  bool sees(int64_t window, int64_t begin, int64_t end) const {
    return begin < std::min(end, end_position()) &&
           (window == 0 || end > first_position - window + 1);
  }
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
  int64_t key_row = 0;  ///< of k and v, that of the key at key_begin
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
    if (begin >= end) return {};
    return {std::max<int64_t>(begin, 0), end};
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

/// Whether any position of the block sees a key of `keys`, spans of its sequence.
inline bool sees_any(const QueryBlock& block, std::span<const TokenSpan> keys, int64_t window) {
  return std::ranges::any_of(
      keys, [&](const TokenSpan& span) { return block.sees(window, span.begin, span.end); });
}

/// Calls `visit(mask)` for each key tile of `keys`, spans of the block's sequence in ascending
/// order, that some row of the block may see, in ascending order. Tiles begin at multiples of
/// kKeyTile from their span's begin, so that a row's sums do not depend on its block.
template <typename Visit>
void for_each_key_tile(const QueryBlock& block, std::span<const TokenSpan> keys, int64_t group,
                       int64_t window, const Visit& visit) {
  for (const TokenSpan& span : keys) {
    if (!block.sees(window, span.begin, span.end)) continue;
    const int64_t end = std::min(span.end, block.end_position());
    const int64_t unseen = window == 0 ? 0 : block.first_position - window + 1 - span.begin;
    int64_t key = span.begin + std::max<int64_t>(0, unseen) / kKeyTile * kKeyTile;
    for (; key < end; key += kKeyTile) {
      visit(TileMask{block, group, window, span.row_of_zero + key, key,
                     std::min(kKeyTile, end - key)});
    }
  }
}

/// Queries and keys of one sequence, as ranges of a WorkList's blocks and spans.
struct SequenceWork {
  IndexRange blocks;
  IndexRange keys;
};

/// The queries of a call, cut into blocks, and the keys in hand for them: both in the order of
/// sequences and, within one, of positions. In memory of the caller's.
class WorkList {
 public:
  /// For at most `max_tokens` queries in max_spans spans of queries, and max_spans spans of keys.
  WorkList(int64_t num_sequences, int64_t max_spans, int64_t max_tokens, int64_t positions,
           Carver& carver);

  /// Adds the queries of a span, in blocks of at most `positions`.
  void add_queries(const TokenSpan& span);
  void add_keys(const TokenSpan& span);
  /// Forgets the keys, not the queries.
  void clear_keys();

  std::span<const QueryBlock> blocks() const { return {blocks_, as_size(num_blocks_)}; }
  std::span<const SequenceWork> sequences() const { return {sequences_, as_size(num_sequences_)}; }
  std::span<const QueryBlock> blocks_of(const SequenceWork& work) const {
    return blocks().subspan(as_size(work.blocks.begin), as_size(work.blocks.count));
  }
  std::span<const TokenSpan> keys_of(const SequenceWork& work) const {
    return {keys_ + work.keys.begin, as_size(work.keys.count)};
  }
  std::span<const TokenSpan> keys_for(const QueryBlock& block) const {
    return keys_of(sequences_[block.sequence]);
  }

 private:
  static size_t as_size(int64_t count) { return static_cast<size_t>(count); }

  SequenceWork* sequences_;
  TokenSpan* keys_;
  QueryBlock* blocks_;
  int64_t num_sequences_;
  int64_t positions_;
  int64_t num_keys_ = 0;
  int64_t num_blocks_ = 0;
};

/// Calls visit(TokenSpan) for the part of each sequence in `run`, tokens whose first is row
/// `first_row` of the tensor in hand.
template <typename Visit>
void for_each_span(std::span<const int32_t> cu_seqlens, const IndexRange& run, int64_t first_row,
                   const Visit& visit) {
  const auto after = std::upper_bound(cu_seqlens.begin(), cu_seqlens.end(), run.begin);
  for (auto end = after; end != cu_seqlens.end() && end[-1] < run.end(); ++end) {
    const int64_t start = end[-1];
    const TokenSpan span{.sequence = end - cu_seqlens.begin() - 1,
                         .row_of_zero = first_row + start - run.begin,
                         .begin = std::max<int64_t>(0, run.begin - start),
                         .end = std::min<int64_t>(*end, run.end()) - start};
    if (span.count() > 0) visit(span);
  }
}

/// Calls visit(part) for the parts of a span in chunks of `chunk` positions, of which the first in
/// hand is sequence `sequence`; 0: for the span.
template <typename Visit>
void for_each_chunk(const TokenSpan& span, int64_t chunk, int64_t sequence, const Visit& visit) {
  TokenSpan part = span;
  part.sequence = sequence;
  for (; part.begin < span.end; part.begin = part.end, ++part.sequence) {
    if (chunk > 0) part.end = std::min(span.end, (part.begin / chunk + 1) * chunk);
    visit(part);
  }
}

/// Most chunks that hold some of `num_tokens` new tokens of `num_sequences` sequences; 0 tokens a
/// chunk: the sequences.
inline int64_t most_chunks(int64_t num_sequences, int64_t num_tokens, int64_t chunk) {
  return chunk > 0 ? 2 * num_sequences + num_tokens / chunk : num_sequences;
}

/// The first position that sequences' new tokens, from `begin` on, see.
inline int64_t first_seen(int64_t begin, int64_t chunk) {
  return chunk > 0 ? begin / chunk * chunk : 0;
}

/// Scratch memory in one part for each thread that runs.
struct ThreadScratch {
  std::byte* base = nullptr;
  int64_t bytes = 0;
  int num_threads = 1;

  ThreadScratch(std::span<std::byte> memory, int64_t bytes_per_thread);
  std::byte* mine() const { return base + bytes * omp_get_thread_num(); }
};

/// Polls, on the thread that called the kernel.
inline void poll_once(const Poll& poll) {
  if (poll && omp_get_thread_num() == 0) poll();
}

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera::attention
