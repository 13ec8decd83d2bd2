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

/// One thread's tiles. For floats, an interleaved matrix is the plain one and shares its place.
template <typename Words>
struct Scratch {
  static constexpr int kPerWord = Words::kPerWord;

  Scratch(const TileSizes<Words>& sizes, Carver& carver)
      : q(carver.take<Word>(sizes.rows * sizes.head_words)),
        grad_o(carver.take<Word>(sizes.rows * sizes.head_words_v)),
        q_interleaved(interleaved(q, sizes.rows * sizes.head_columns, carver)),
        grad_o_interleaved(interleaved(grad_o, sizes.rows * sizes.head_columns_v, carver)),
        keys(carver.take<Word>(sizes.head_words * kKeyTile)),
        values(carver.take<Word>(sizes.head_words_v * kKeyTile)),
        keys_interleaved(carver.take<Word>(kKeyTile / kPerWord * sizes.head_columns)),
        transposing(carver.take<Word>(kLanes * std::max(sizes.head_words, sizes.head_words_v))),
        scores(carver.take<float>(sizes.rows * kKeyTile)),
        grad_probs(carver.take<float>(sizes.rows * kKeyTile)),
        probs(interleaved(reinterpret_cast<Word*>(scores), sizes.rows * kKeyTile, carver)),
        grad_scores(
            interleaved(reinterpret_cast<Word*>(grad_probs), sizes.rows * kKeyTile, carver)),
        grad_scores_interleaved(interleaved(grad_scores, sizes.rows * kKeyTile, carver)),
        grad_q(carver.take<float>(sizes.rows * sizes.head_columns)),
        lse(carver.take<float>(sizes.rows)),
        delta(carver.take<float>(sizes.rows)) {}

  static Word* interleaved(Word* plain, int64_t elements, Carver& carver) {
    return kPerWord == 1 ? plain : carver.take<Word>(elements / kPerWord);
  }

  Word* q;                        ///< [rows, head_words]
  Word* grad_o;                   ///< [rows, head_words_v]
  Word* q_interleaved;            ///< [rows / kPerWord, head_columns]
  Word* grad_o_interleaved;       ///< [rows / kPerWord, head_columns_v]
  Word* keys;                     ///< transposed: [head_words, kKeyTile]
  Word* values;                   ///< transposed: [head_words_v, kKeyTile]
  Word* keys_interleaved;         ///< [kKeyTile / kPerWord, head_columns]
  Word* transposing;              ///< [kLanes, head_words or head_words_v]
  float* scores;                  ///< [rows, kKeyTile]
  float* grad_probs;              ///< [rows, kKeyTile]
  Word* probs;                    ///< [rows / kPerWord, kKeyTile]
  Word* grad_scores;              ///< [rows, kKeyTile / kPerWord]
  Word* grad_scores_interleaved;  ///< [rows / kPerWord, kKeyTile]
  float* grad_q;                  ///< not yet scaled: [rows, head_columns]
  float* lse;                     ///< in units of log 2: [rows]
  float* delta;                   ///< sum over keys of prob · grad_prob, less grad_lse: [rows]
};

/// Two neighbouring rows of a block against a key tile.
struct RowPair {
  Columns visible[2];

  /// Columns that both rows see, and columns that either may see.
  Columns both() const {
    return {std::max(visible[0].begin, visible[1].begin), std::min(visible[0].end, visible[1].end)};
  }
  Columns either() const {
    return {std::min(visible[0].begin, visible[1].begin), std::max(visible[0].end, visible[1].end)};
  }
};

/// `x` where `visible` holds the columns from `column` on, else 0.
Vec select_visible(Vec x, int64_t column, const Columns& visible) {
  const simd::IntVec columns = tile::lane_numbers(column);
  const auto seen = (columns >= static_cast<int32_t>(visible.begin)) &
                    (columns < static_cast<int32_t>(visible.end));
  return seen ? x : Vec{};
}

/// to = from · factor.
template <typename T>
void store_scaled(T* to, const float* from, int64_t columns, float factor) {
  simd::for_each_vector(columns, [=](int64_t j, auto lanes) {
    simd::store(to + j, simd::load(from + j, lanes) * factor, lanes);
  });
}

/// The product of two rows.
template <typename T>
float dot(const T* a, const T* b, int64_t columns) {
  Vec sum{};
  simd::for_each_vector(columns, [&](int64_t j, auto lanes) {
    sum += simd::load(a + j, lanes) * simd::load(b + j, lanes);
  });
  return tile::reduce_sum(sum)[0];
}

/// Gradients of one sequence with one key-value head at a time, by one thread. The queries' blocks
/// pass in ascending order and each meets its key tiles in ascending order, so that every sum has
/// one order.
template <typename T>
class BackwardWorker {
 public:
  using Words = tile::WordsOf<T>;

  BackwardWorker(const BackwardPass& pass, std::byte* scratch)
      : spec_(pass.op.spec()),
        sizes_(pass.op),
        carver_(scratch),
        scratch_(sizes_, carver_),
        pass_(pass),
        num_tokens_(pass.q.shape[0]),
        scale_(static_cast<float>(spec_.scale)) {}

  void run(const SequenceWork& work, int64_t kv_head) {
    kv_head_ = kv_head;
    const std::span<const TokenSpan> keys = pass_.work.keys_of(work);
    for (const TokenSpan& span : keys) {
      std::fill_n(grad_keys(span.first_row()), span.count() * sizes_.head_columns, 0.0F);
      std::fill_n(grad_values(span.first_row()), span.count() * sizes_.head_columns_v, 0.0F);
    }
    for (const QueryBlock& block : pass_.work.blocks_of(work)) {
      run_block(block, keys);
      poll_once(pass_.poll);
    }
    if (!pass_.grad_k) return;
    for (const TokenSpan& span : keys) {
      store_key_gradients(pass_.op, pass_.key_sums, kv_head, {span.first_row(), span.count()},
                          pass_.grad_k, pass_.grad_v);
    }
  }

 private:
  float* grad_keys(int64_t row) const {
    return pass_.key_sums.keys + (kv_head_ * num_tokens_ + row) * sizes_.head_columns;
  }
  float* grad_values(int64_t row) const {
    return pass_.key_sums.values + (kv_head_ * num_tokens_ + row) * sizes_.head_columns_v;
  }
  /// The block's rows in the sums between passes.
  float* query_sums(const QueryBlock& block) const {
    const int64_t row = (kv_head_ * num_tokens_ + block.first_query) * sizes_.group;
    return pass_.query_sums + row * sizes_.head_columns;
  }

  /// The block's rows of a tensor [T, N · head_size], an input or an output.
  template <typename Element>
  Rows<Element> block_rows(const Tensor& tensor, int64_t head_size, const QueryBlock& block) const {
    const int64_t stride = spec_.num_heads * head_size;
    T* data = tensor.as<T>() + block.first_query * stride;
    return {data + kv_head_ * sizes_.group * head_size, stride, block.num_positions * sizes_.group,
            head_size, sizes_.group};
  }

  Rows<const T> key_rows(const Tensor& tensor, int64_t head_size, const TileMask& mask) const {
    const int64_t stride = spec_.num_kv_heads * head_size;
    return {tensor.as<T>() + mask.key_row * stride + kv_head_ * head_size, stride, mask.key_count,
            head_size};
  }

  void run_block(const QueryBlock& block, std::span<const TokenSpan> keys) {
    const bool sees_keys = sees_any(block, keys, spec_.window);
    if (!sees_keys && !pass_.last) return;
    const int64_t num_sums = block.num_positions * sizes_.group * sizes_.head_columns;
    std::fill_n(scratch_.grad_q, sizes_.rows * sizes_.head_columns, 0.0F);
    if (!pass_.first) std::copy_n(query_sums(block), num_sums, scratch_.grad_q);
    if (sees_keys) {
      pack_block(block);
      read_statistics(block);
      for_each_key_tile(block, keys, sizes_.group, spec_.window,
                        [&](const TileMask& mask) { add_key_tile(mask); });
    }
    if (pass_.last) {
      store_query_gradients(block);
    } else {
      std::copy_n(scratch_.grad_q, num_sums, query_sums(block));
    }
  }

  void store_query_gradients(const QueryBlock& block) {
    const auto rows = block_rows<T>(pass_.grad_q, spec_.head_size, block);
    for (int64_t row = 0; row < rows.count; ++row) {
      store_scaled(rows.row(row), scratch_.grad_q + row * sizes_.head_columns, rows.columns,
                   scale_);
    }
  }

  void pack_block(const QueryBlock& block) {
    const auto q = block_rows<const T>(pass_.q, spec_.head_size, block);
    const auto grad_o = block_rows<const T>(pass_.grad_o, spec_.head_size_v, block);
    tile::pack_rows<Words>(q, 0, sizes_.rows, scratch_.q, sizes_.head_words);
    tile::pack_rows<Words>(grad_o, 0, sizes_.rows, scratch_.grad_o, sizes_.head_words_v);
    if constexpr (Words::kPerWord > 1) {
      tile::pack_interleaved<Words>(q, sizes_.rows, scratch_.q_interleaved, sizes_.head_columns);
      tile::pack_interleaved<Words>(grad_o, sizes_.rows, scratch_.grad_o_interleaved,
                                    sizes_.head_columns_v);
    }
  }

  void read_statistics(const QueryBlock& block) {
    const auto o = block_rows<const T>(pass_.o, spec_.head_size_v, block);
    const auto grad_o = block_rows<const T>(pass_.grad_o, spec_.head_size_v, block);
    const auto* lse = pass_.lse.as<float>();
    for (int64_t row = 0; row < o.count; ++row) {
      const int64_t head = kv_head_ * sizes_.group + row % sizes_.group;
      const int64_t idx = head * num_tokens_ + block.first_query + row / sizes_.group;
      scratch_.lse[row] = lse[idx] * kLog2E;
      scratch_.delta[row] = dot(o.row(row), grad_o.row(row), spec_.head_size_v);
      if (pass_.grad_lse) scratch_.delta[row] -= pass_.grad_lse.as<float>()[idx];
    }
  }

  void add_key_tile(const TileMask& mask) {
    pack_keys(mask);
    multiply_keys(mask, scratch_.q, sizes_.head_words, spec_.head_size, scratch_.keys,
                  scratch_.scores);
    multiply_keys(mask, scratch_.grad_o, sizes_.head_words_v, spec_.head_size_v, scratch_.values,
                  scratch_.grad_probs);
    for (int64_t row = mask.first_row(0); row < mask.end_row(); row += 2) {
      differentiate_softmax(mask, row);
    }
    add_to_keys(mask, scratch_.probs, scratch_.grad_o_interleaved, sizes_.head_columns_v,
                grad_values(mask.key_row));
    add_to_keys(mask, scratch_.grad_scores_interleaved, scratch_.q_interleaved, sizes_.head_columns,
                grad_keys(mask.key_row));
    add_to_queries(mask);
  }

  void pack_keys(const TileMask& mask) {
    const auto keys = key_rows(pass_.k, spec_.head_size, mask);
    const auto values = key_rows(pass_.v, spec_.head_size_v, mask);
    tile::pack_transposed<Words>(keys, mask.key_count, scratch_.keys, kKeyTile, sizes_.head_words,
                                 scratch_.transposing);
    tile::pack_transposed<Words>(values, mask.key_count, scratch_.values, kKeyTile,
                                 sizes_.head_words_v, scratch_.transposing);
    tile::pack_interleaved<Words>(keys, tile::round_up(mask.key_count, Words::kPerWord),
                                  scratch_.keys_interleaved, sizes_.head_columns);
  }

  /// result[rows, keys] = rows of queries · keys.
  void multiply_keys(const TileMask& mask, const Word* rows, int64_t width, int64_t head_size,
                     const Word* keys, float* result) {
    const int64_t first = mask.first_row(0);
    const int64_t depth = tile::words_for<Words>(head_size);
    const tile::Product product{.a = rows + first * width,
                                .a_row = width,
                                .b = keys,
                                .ldb = kKeyTile,
                                .c = result + first * kKeyTile,
                                .ldc = kKeyTile};
    tile::multiply<Words>(mask.end_row() - first, mask.key_count, product,
                          [&](int64_t /*row*/, int64_t end) {
                            return StripLimit{mask.columns_before(first + end), 0, depth};
                          });
  }

  /// Turns scores and gradients of probabilities of rows `row` and `row` + 1 into probabilities and
  /// gradients of scores; both are 0 where a row does not see a key.
  void differentiate_softmax(const TileMask& mask, int64_t row) {
    const RowPair pair{{mask.visible(row), mask.visible(row + 1)}};
    const Columns both = pair.both();
    const Columns either = pair.either();
    const int64_t width = tile::round_up(mask.key_count, kLanes);
    for (int64_t j = 0; j < width; j += kLanes) {
      if (j >= both.begin && j + kLanes <= both.end) {
        differentiate_columns<false>(row, j, pair);
      } else if (j + kLanes > either.begin && j < either.end) {
        differentiate_columns<true>(row, j, pair);
      } else {
        store_softmax(row, j, VecPair{}, VecPair{});
      }
    }
  }

  struct VecPair {
    Vec even;
    Vec odd;
  };

  template <bool kMasked>
  void differentiate_columns(int64_t row, int64_t column, const RowPair& pair) {
    Vec probs[2];
    Vec grads[2];
    for (int i = 0; i < 2; ++i) {
      const int64_t at = (row + i) * kKeyTile + column;
      const float factor = scale_ * kLog2E;
      const Vec lse = Vec{} + scratch_.lse[row + i];
      probs[i] = tile::exp2(simd::load(scratch_.scores + at) * factor - lse);
      grads[i] = probs[i] * (simd::load(scratch_.grad_probs + at) - scratch_.delta[row + i]);
      if (kMasked) {
        probs[i] = select_visible(probs[i], column, pair.visible[i]);
        grads[i] = select_visible(grads[i], column, pair.visible[i]);
      }
    }
    store_softmax(row, column, VecPair{probs[0], probs[1]}, VecPair{grads[0], grads[1]});
  }

  void store_softmax(int64_t row, int64_t column, const VecPair& probs, const VecPair& grads) {
    const int64_t at = row / Words::kPerWord * kKeyTile + column;
    Words::store_pair(scratch_.probs + at, kKeyTile, probs.even, probs.odd);
    Words::store_pair(scratch_.grad_scores_interleaved + at, kKeyTile, grads.even, grads.odd);
    if constexpr (Words::kPerWord > 1) {
      constexpr int64_t kStride = kKeyTile / Words::kPerWord;
      Word* plain = scratch_.grad_scores + row * kStride;
      tile::store_elements<Words>(plain, column, grads.even);
      tile::store_elements<Words>(plain + kStride, column, grads.odd);
    }
  }

  /// sums[keys, columns] += weights[rows, keys]^T · rows[rows, columns].
  void add_to_keys(const TileMask& mask, const Word* weights, const Word* rows, int64_t columns,
                   float* sums) {
    const tile::Product product{.a = weights,
                                .a_row = 1,
                                .a_depth = kKeyTile,
                                .b = rows,
                                .ldb = columns,
                                .c = sums,
                                .ldc = columns,
                                .accumulate = true};
    const int64_t end_row = mask.end_row() / Words::kPerWord;
    tile::multiply<Words>(mask.key_count, columns, product, [&](int64_t key, int64_t /*end*/) {
      return StripLimit{columns, mask.first_row(key) / Words::kPerWord, end_row};
    });
  }

  void add_to_queries(const TileMask& mask) {
    const int64_t first = mask.first_row(0);
    const int64_t stride = kKeyTile / Words::kPerWord;
    const tile::Product product{.a = scratch_.grad_scores + first * stride,
                                .a_row = stride,
                                .b = scratch_.keys_interleaved,
                                .ldb = sizes_.head_columns,
                                .c = scratch_.grad_q + first * sizes_.head_columns,
                                .ldc = sizes_.head_columns,
                                .accumulate = true};
    tile::multiply<Words>(mask.end_row() - first, spec_.head_size, product,
                          [&](int64_t /*row*/, int64_t end) {
                            const int64_t keys = mask.columns_before(first + end);
                            return StripLimit{spec_.head_size, 0, tile::words_for<Words>(keys)};
                          });
  }

  AttentionSpec spec_;
  TileSizes<Words> sizes_;
  Carver carver_;
  Scratch<Words> scratch_;
  const BackwardPass& pass_;
  int64_t num_tokens_;
  float scale_;
  int64_t kv_head_ = 0;
};

template <typename T>
int64_t bytes_per_thread(const AttentionOperator& op) {
  using Words = tile::WordsOf<T>;
  Carver counter(nullptr);
  const Scratch<Words> counted(TileSizes<Words>(op), counter);
  return counter.used();
}

template <typename T>
void run(const BackwardPass& pass, std::span<std::byte> memory) {
  const ThreadScratch scratch(memory, bytes_per_thread<T>(pass.op));
  const std::span<const SequenceWork> sequences = pass.work.sequences();
  const int64_t kv_heads = pass.op.spec().num_kv_heads;
  const int64_t items = static_cast<int64_t>(sequences.size()) * kv_heads;
#pragma omp parallel num_threads(scratch.num_threads) if (items > 1)
  {
    BackwardWorker<T> worker(pass, scratch.mine());
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < items; ++item) {
      worker.run(sequences[item / kv_heads], item % kv_heads);
    }
  }
}

template <typename T>
void store_rows(const AttentionOperator& op, const KeySums& sums, int64_t kv_head,
                const IndexRange& rows, const Tensor& grad_k, const Tensor& grad_v) {
  const TileSizes<tile::FloatWords> sizes(op);
  const int64_t stride = op.spec().num_kv_heads * sizes.head_size;
  const int64_t stride_v = op.spec().num_kv_heads * sizes.head_size_v;
  const auto scale = static_cast<float>(op.spec().scale);
  T* keys = grad_k.as<T>() + kv_head * sizes.head_size;
  T* values = grad_v.as<T>() + kv_head * sizes.head_size_v;
  const int64_t first_sum = kv_head * grad_k.shape[0];
  for (int64_t row = rows.begin; row < rows.end(); ++row) {
    store_scaled(keys + row * stride, sums.keys + (first_sum + row) * sizes.head_columns,
                 sizes.head_size, scale);
    simd::convert(values + row * stride_v, sums.values + (first_sum + row) * sizes.head_columns_v,
                  sizes.head_size_v);
  }
}

}  // namespace

KeySums::KeySums(const AttentionOperator& op, int64_t num_tokens, Carver& carver)
    : keys(carver.take<float>(op.spec().num_kv_heads * num_tokens *
                              tile::round_up(op.spec().head_size, kLanes))),
      values(carver.take<float>(op.spec().num_kv_heads * num_tokens *
                                tile::round_up(op.spec().head_size_v, kLanes))) {}

float* take_query_sums(const AttentionOperator& op, int64_t num_tokens, Carver& carver) {
  return carver.take<float>(op.spec().num_heads * num_tokens *
                            tile::round_up(op.spec().head_size, kLanes));
}

int64_t backward_scratch_bytes(const AttentionOperator& op, DType dtype) {
  const int64_t bytes =
      dtype == DType::kF32 ? bytes_per_thread<float>(op) : bytes_per_thread<Bf16>(op);
  return bytes * omp_get_max_threads();
}

void run_backward(const BackwardPass& pass, std::span<std::byte> scratch) {
  if (pass.q.dtype == DType::kF32) return run<float>(pass, scratch);
  run<Bf16>(pass, scratch);
}

void store_key_gradients(const AttentionOperator& op, const KeySums& sums, int64_t kv_head,
                         const IndexRange& rows, const Tensor& grad_k, const Tensor& grad_v) {
  if (grad_k.dtype == DType::kF32) {
    return store_rows<float>(op, sums, kv_head, rows, grad_k, grad_v);
  }
  store_rows<Bf16>(op, sums, kv_head, rows, grad_k, grad_v);
}

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera::attention
