#include <cmath>
#include <limits>

#include "ops/attention/attention_blocks.h"
#include "ops/attention/attention_kernels.h"

namespace tessera::attention {
inline namespace TESSERA_CPU_LEVEL {
namespace {

using tile::kLanes;
using tile::Rows;
using tile::StripLimit;
using tile::Vec;
using tile::Word;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
/// Below every score, and finite so that the difference of two of them is a number.
constexpr float kLowest = std::numeric_limits<float>::lowest();

/// One thread's tiles.
template <typename Words>
struct Scratch {
  Scratch(const TileSizes<Words>& sizes, Carver& carver)
      : q(carver.take<Word>(sizes.rows * sizes.head_words)),
        keys(carver.take<Word>(sizes.head_words * kKeyTile)),
        values(carver.take<Word>(kKeyTile / Words::kPerWord * sizes.head_columns_v)),
        transposing(carver.take<Word>(kLanes * sizes.head_words)),
        scores(carver.take<float>(sizes.rows * kKeyTile)),
        probs(Words::kPerWord == 1 ? reinterpret_cast<Word*>(scores)
                                   : carver.take<Word>(sizes.rows * kKeyTile / Words::kPerWord)),
        o(carver.take<float>(sizes.rows * sizes.head_columns_v)),
        max(carver.take<float>(sizes.rows + kLanes)),
        tile_max(carver.take<float>(sizes.rows + kLanes)),
        rescale(carver.take<float>(sizes.rows + kLanes)),
        sum(carver.take<float>(sizes.rows * kLanes)) {}

  Word* q;            ///< [rows, head_words]
  Word* keys;         ///< transposed: [head_words, kKeyTile]
  Word* values;       ///< [kKeyTile / kPerWord, head_columns_v]
  Word* transposing;  ///< [kLanes, head_words]
  float* scores;      ///< [rows, kKeyTile]
  Word* probs;        ///< [rows, kKeyTile / kPerWord]; the scores' place for floats
  float* o;           ///< not yet divided by the sums: [rows, head_columns_v]
  float* max;         ///< greatest score so far, in units of log 2: [rows + kLanes]
  float* tile_max;    ///< greatest score of the present tile, not scaled: [rows + kLanes]
  float* rescale;     ///< factors that bring older sums to the present max: [rows + kLanes]
  float* sum;         ///< sums of exponentials so far, by lane: [rows, kLanes]
};

/// Sets the columns of a row of scores that are not visible, in the vectors that are partly so, to
/// minus infinity.
void mask_row(float* scores, const Columns& visible) {
  for (const int64_t edge : {visible.begin, visible.end}) {
    if (edge % kLanes == 0) continue;
    float* part = scores + edge / kLanes * kLanes;
    const simd::IntVec column = tile::lane_numbers(edge / kLanes * kLanes);
    const auto seen = (column >= static_cast<int32_t>(visible.begin)) &
                      (column < static_cast<int32_t>(visible.end));
    simd::store(part, seen ? simd::load(part) : Vec{} + kMinusInfinity);
  }
}

void scale_row(float* row, int64_t columns, Vec factor) {
  for (int64_t j = 0; j < columns; j += kLanes) simd::store(row + j, simd::load(row + j) * factor);
}

/// Attention of single blocks, by one thread.
template <typename T>
class ForwardWorker {
 public:
  using Words = tile::WordsOf<T>;

  ForwardWorker(const ForwardPass& pass, std::byte* scratch)
      : spec_(pass.op.spec()),
        sizes_(pass.op),
        carver_(scratch),
        scratch_(sizes_, carver_),
        pass_(pass),
        num_tokens_(pass.q.shape[0]),
        factor_(static_cast<float>(spec_.scale) * kLog2E) {}

  void run(const QueryBlock& block, int64_t kv_head) {
    const std::span<const TokenSpan> keys = pass_.work.keys_for(block);
    const bool sees_keys = sees_any(block, keys, spec_.window);
    if (!sees_keys && !pass_.last) return;
    if (pass_.first) {
      clear();
    } else {
      load(block, kv_head);
    }
    if (sees_keys) {
      pack_queries(block, kv_head);
      for_each_key_tile(block, keys, sizes_.group, spec_.window,
                        [&](const TileMask& mask) { add_key_tile(mask, kv_head); });
    }
    if (pass_.last) {
      store(block, kv_head);
    } else {
      save(block, kv_head);
    }
  }

 private:
  void clear() {
    std::fill_n(scratch_.o, sizes_.rows * sizes_.head_columns_v, 0.0F);
    std::fill_n(scratch_.sum, sizes_.rows * kLanes, 0.0F);
    std::fill_n(scratch_.max, sizes_.rows + kLanes, kLowest);
    std::fill_n(scratch_.tile_max, sizes_.rows + kLanes, kLowest);
  }

  /// The first row of a block in ForwardSums.
  int64_t first_sum(const QueryBlock& block, int64_t kv_head) const {
    return (kv_head * num_tokens_ + block.first_query) * sizes_.group;
  }

  void load(const QueryBlock& block, int64_t kv_head) {
    clear();
    const int64_t first = first_sum(block, kv_head);
    const int64_t rows = block.num_positions * sizes_.group;
    std::copy_n(pass_.sums.o + first * sizes_.head_columns_v, rows * sizes_.head_columns_v,
                scratch_.o);
    std::copy_n(pass_.sums.max + first, rows, scratch_.max);
    for (int64_t row = 0; row < rows; ++row) {
      scratch_.sum[row * kLanes] = pass_.sums.sum[first + row];
    }
  }

  void save(const QueryBlock& block, int64_t kv_head) {
    const int64_t first = first_sum(block, kv_head);
    const int64_t rows = block.num_positions * sizes_.group;
    std::copy_n(scratch_.o, rows * sizes_.head_columns_v,
                pass_.sums.o + first * sizes_.head_columns_v);
    std::copy_n(scratch_.max, rows, pass_.sums.max + first);
    for (int64_t row = 0; row < rows; ++row) pass_.sums.sum[first + row] = row_sum(row)[0];
  }

  /// A row's sum of exponentials, in every lane.
  Vec row_sum(int64_t row) const {
    return tile::reduce_sum(simd::load(scratch_.sum + row * kLanes));
  }

  void pack_queries(const QueryBlock& block, int64_t kv_head) {
    const int64_t stride = spec_.num_heads * spec_.head_size;
    const T* q = pass_.q.as<T>() + block.first_query * stride;
    const Rows<const T> rows{q + kv_head * sizes_.group * spec_.head_size, stride,
                             block.num_positions * sizes_.group, spec_.head_size, sizes_.group};
    tile::pack_rows<Words>(rows, 0, sizes_.rows, scratch_.q, sizes_.head_words);
  }

  Rows<const T> key_rows(const Tensor& tensor, int64_t head_size, const TileMask& mask,
                         int64_t kv_head) const {
    const int64_t stride = spec_.num_kv_heads * head_size;
    return {tensor.as<T>() + mask.key_row * stride + kv_head * head_size, stride, mask.key_count,
            head_size};
  }

  void add_key_tile(const TileMask& mask, int64_t kv_head) {
    tile::pack_transposed<Words>(key_rows(pass_.k, spec_.head_size, mask, kv_head), mask.key_count,
                                 scratch_.keys, kKeyTile, sizes_.head_words, scratch_.transposing);
    tile::pack_interleaved<Words>(key_rows(pass_.v, spec_.head_size_v, mask, kv_head),
                                  tile::round_up(mask.key_count, Words::kPerWord), scratch_.values,
                                  sizes_.head_columns_v);
    compute_scores(mask);
    add_probabilities(mask);
    add_values(mask);
  }

  void compute_scores(const TileMask& mask) {
    const int64_t first = mask.first_row(0);
    const int64_t depth = tile::words_for<Words>(spec_.head_size);
    const tile::Product product{.a = scratch_.q + first * sizes_.head_words,
                                .a_row = sizes_.head_words,
                                .b = scratch_.keys,
                                .ldb = kKeyTile,
                                .c = scratch_.scores + first * kKeyTile,
                                .ldc = kKeyTile};
    tile::multiply<Words>(mask.end_row() - first, mask.key_count, product,
                          [&](int64_t /*row*/, int64_t end) {
                            return StripLimit{mask.columns_before(first + end), 0, depth};
                          });
  }

  /// One step of the online softmax: scores become probabilities relative to each row's greatest
  /// score so far, and what was summed before is brought to the same scale. In passes over all
  /// rows, so that no row waits for its own maximum.
  void add_probabilities(const TileMask& mask) {
    const int64_t first = mask.first_row(0);
    const int64_t end = std::min(mask.end_row(), mask.num_rows());
    for (int64_t row = first; row < end; ++row) find_max(mask.visible(row), row);
    for (int64_t row = first; row < end; row += kLanes) raise_max(row);
    for (int64_t row = first; row < end; ++row) {
      if (scratch_.rescale[row] != 1.0F) rescale(row, Vec{} + scratch_.rescale[row]);
      exponentiate(mask.visible(row), row, tile::round_up(mask.key_count, kLanes));
    }
  }

  void find_max(const Columns& visible, int64_t row) {
    float* scores = scratch_.scores + row * kKeyTile;
    Vec max = Vec{} + kLowest;
    if (visible.begin < visible.end) {
      mask_row(scores, visible);
      for (int64_t j = visible.begin / kLanes * kLanes; j < visible.end; j += kLanes) {
        max = simd::max(max, simd::load(scores + j));
      }
    }
    scratch_.tile_max[row] = tile::reduce_max(max)[0];
  }

  /// For kLanes rows: the greatest scores so far, and the factors from the old scale to the new.
  void raise_max(int64_t row) {
    const Vec before = simd::load(scratch_.max + row);
    const Vec max = simd::max(simd::load(scratch_.tile_max + row) * factor_, before);
    simd::store(scratch_.rescale + row, tile::exp2(before - max));
    simd::store(scratch_.max + row, max);
  }

  void rescale(int64_t row, Vec factor) {
    scale_row(scratch_.sum + row * kLanes, kLanes, factor);
    scale_row(scratch_.o + row * sizes_.head_columns_v, sizes_.head_columns_v, factor);
  }

  void exponentiate(const Columns& visible, int64_t row, int64_t width) {
    const float* scores = scratch_.scores + row * kKeyTile;
    Word* probs = scratch_.probs + row * (kKeyTile / Words::kPerWord);
    const int64_t begin = visible.begin / kLanes * kLanes;
    const int64_t end = tile::round_up(visible.end, kLanes);
    const Vec shift = Vec{} - scratch_.max[row];
    Vec sum = simd::load(scratch_.sum + row * kLanes);
    for (int64_t j = begin; j < end; j += kLanes) {
      const Vec prob = tile::exp2(simd::load(scores + j) * factor_ + shift);
      sum += prob;
      tile::store_elements<Words>(probs, j, prob);
    }
    simd::store(scratch_.sum + row * kLanes, sum);
    for (int64_t j = 0; j < begin; j += kLanes) tile::store_elements<Words>(probs, j, Vec{});
    for (int64_t j = end; j < width; j += kLanes) tile::store_elements<Words>(probs, j, Vec{});
  }

  void add_values(const TileMask& mask) {
    const int64_t first = mask.first_row(0);
    const int64_t probs_stride = kKeyTile / Words::kPerWord;
    const tile::Product product{.a = scratch_.probs + first * probs_stride,
                                .a_row = probs_stride,
                                .b = scratch_.values,
                                .ldb = sizes_.head_columns_v,
                                .c = scratch_.o + first * sizes_.head_columns_v,
                                .ldc = sizes_.head_columns_v,
                                .accumulate = true};
    const int64_t end_row = std::min(mask.end_row(), mask.num_rows());
    tile::multiply<Words>(end_row - first, spec_.head_size_v, product,
                          [&](int64_t /*row*/, int64_t end) {
                            const int64_t keys = mask.columns_before(first + end);
                            return StripLimit{spec_.head_size_v, 0, tile::words_for<Words>(keys)};
                          });
  }

  void store(const QueryBlock& block, int64_t kv_head) {
    const int64_t stride = spec_.num_heads * spec_.head_size_v;
    const int64_t first_head = kv_head * sizes_.group;
    T* o = pass_.o.as<T>() + block.first_query * stride + first_head * spec_.head_size_v;
    const Rows<T> rows{o, stride, block.num_positions * sizes_.group, spec_.head_size_v,
                       sizes_.group};
    for (int64_t row = 0; row < rows.count; ++row) {
      const Vec sum = row_sum(row);
      float* from = scratch_.o + row * sizes_.head_columns_v;
      scale_row(from, sizes_.head_columns_v, 1.0F / sum);
      simd::convert(rows.row(row), from, spec_.head_size_v);
      if (pass_.lse) {
        float* lse = pass_.lse.as<float>() + (first_head + row % sizes_.group) * num_tokens_;
        lse[block.first_query + row / sizes_.group] = scratch_.max[row] * kLn2 + std::log(sum[0]);
      }
    }
  }

  AttentionSpec spec_;
  TileSizes<Words> sizes_;
  Carver carver_;
  Scratch<Words> scratch_;
  const ForwardPass& pass_;
  int64_t num_tokens_;
  float factor_;
};

template <typename T>
int64_t bytes_per_thread(const AttentionOperator& op) {
  using Words = tile::WordsOf<T>;
  Carver counter(nullptr);
  const Scratch<Words> counted(TileSizes<Words>(op), counter);
  return counter.used();
}

/// Runs all blocks with all key-value heads. Blocks that share keys run one after another, while
/// the keys are in cache; the last of a sequence, which see most of them, go first.
template <typename T>
void run(const ForwardPass& pass, std::span<std::byte> memory) {
  const ThreadScratch scratch(memory, bytes_per_thread<T>(pass.op));
  const std::span<const QueryBlock> blocks = pass.work.blocks();
  const auto num_blocks = static_cast<int64_t>(blocks.size());
  const int64_t items = num_blocks * pass.op.spec().num_kv_heads;
#pragma omp parallel num_threads(scratch.num_threads) if (items > 1)
  {
    ForwardWorker<T> worker(pass, scratch.mine());
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = items - 1; item >= 0; --item) {
      worker.run(blocks[item % num_blocks], item / num_blocks);
      poll_once(pass.poll);
    }
  }
}

}  // namespace

ForwardSums::ForwardSums(const AttentionOperator& op, int64_t num_tokens, Carver& carver)
    : o(carver.take<float>(num_tokens * op.spec().num_heads *
                           tile::round_up(op.spec().head_size_v, kLanes))),
      max(carver.take<float>(num_tokens * op.spec().num_heads)),
      sum(carver.take<float>(num_tokens * op.spec().num_heads)) {}

int64_t forward_scratch_bytes(const AttentionOperator& op, DType dtype) {
  const int64_t bytes =
      dtype == DType::kF32 ? bytes_per_thread<float>(op) : bytes_per_thread<Bf16>(op);
  return bytes * omp_get_max_threads();
}

void run_forward(const ForwardPass& pass, std::span<std::byte> scratch) {
  if (pass.q.dtype == DType::kF32) return run<float>(pass, scratch);
  run<Bf16>(pass, scratch);
}

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera::attention
