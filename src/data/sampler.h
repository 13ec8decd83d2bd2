#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "data/permutation.h"
#include "data/token_file.h"

namespace tessera {

/// Marks a position that has no next token to learn.
inline constexpr int32_t kNoLabel = -100;

/// One micro-batch: T = B * S tokens, the B windows one after the other. Attention runs within the
/// stretches [cu_seqlens[i], cu_seqlens[i + 1]); positions count from 0 in each.
struct Batch {
  std::vector<int32_t> tokens;     ///< [T]
  std::vector<int32_t> labels;     ///< [T] the next token, or kNoLabel
  std::vector<int32_t> positions;  ///< [T]
  std::vector<int32_t>
      cu_seqlens;         ///< [max_sequences + 1] ascending from 0; padded with T (empty stretches)
  int64_t num_valid = 0;  ///< labels that count
};

/// Which part of the documents a BatchSource reads: training data in random order, or held-out data
/// or the whole file in its own order and once.
enum class Split { kTrain, kValidation, kAll };

struct SamplerConfig {
  int64_t sequence_length = 0;    ///< S
  int64_t micro_batch_size = 0;   ///< B windows a micro-batch
  int64_t num_micro_batches = 1;  ///< micro-batches a step
  uint64_t seed = 0;
  double validation_fraction = 0;  ///< share of the tokens, cut at the border of a document
  /// false: a window is one stretch, though it may cross documents. true: attention, positions and
  /// labels stay within a document.
  bool split_documents = false;
};

/// The tokens of a split: [begin, end) of the file's stream.
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t num_tokens() const { return end - begin; }
};

/// The two splits of a file. Validation is the last `validation_fraction` of the tokens, its begin
/// moved to the nearest border of documents when that changes its size by less than half; else (a
/// few large documents) the cut is inside a document. The two never overlap. Throws UserError when
/// a split would be empty.
TokenRange split_range(const TokenFile& file, double validation_fraction, Split split);

/// Micro-batches as a pure function of the configuration and (step, micro_batch): no state, so a
/// run is resumed by its step number alone.
///
/// The split is seen as W = floor((n - 1) / S) windows of S + 1 tokens, each beginning at the last
/// token of the one before it. Window k of the run is window permutation_epoch(k mod W) of the
/// split, epoch = k / W: each epoch visits each window once, in an order of its own that no memory
/// holds (see Permutation), the first window shifted by a random number of the tokens that W
/// windows leave over. Validation (or all of a file) visits the windows in their own order and only
/// once: rows past the last window have no labels, so that one pass counts each window exactly
/// once.
class BatchSource {
 public:
  /// Throws UserError when the split is shorter than one window, with the numbers of tokens.
  BatchSource(std::shared_ptr<const TokenFile> file, const SamplerConfig& config, Split split);

  /// Fills `batch`, reusing its memory. step >= 0; 0 <= micro_batch < num_micro_batches.
  void fetch(int64_t step, int64_t micro_batch, Batch& batch) const;

  int64_t num_windows() const { return num_windows_; }
  /// Stretches that cu_seqlens has room for: B, or where documents are kept apart B times the most
  /// documents that any window of the file touches.
  int64_t max_sequences() const { return config_.micro_batch_size * max_stretches_; }
  /// The number of steps that visit each window once, rounded up.
  int64_t steps_per_epoch() const;
  const TokenRange& range() const { return range_; }

 private:
  int64_t window_begin(int64_t sample) const;
  void fill_window(int64_t sample, int64_t row, std::vector<int32_t>& ids, Batch& batch) const;
  std::vector<int64_t> inner_borders(int64_t begin) const;

  std::shared_ptr<const TokenFile> file_;
  SamplerConfig config_;
  Split split_;
  TokenRange range_;
  int64_t num_windows_ = 0;
  int64_t max_stretches_ = 1;  // in one window
};

}  // namespace tessera
